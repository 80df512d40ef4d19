"""Training that hangs."""
