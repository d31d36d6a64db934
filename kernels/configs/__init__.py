"""Launch configurations as data, looked up by operation, GPU generation, dtype and shape."""
