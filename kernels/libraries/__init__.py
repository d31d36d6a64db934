"""cuBLASLt's product, which torch does not offer with a residual."""
