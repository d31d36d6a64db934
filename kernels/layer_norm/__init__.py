"""LayerNorm and RMSNorm, with the residual addition before them, forward and backward."""
