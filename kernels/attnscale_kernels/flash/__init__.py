"""Flash attention: forward and backward pass."""
