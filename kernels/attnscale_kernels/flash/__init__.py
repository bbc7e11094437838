"""Flash attention: forward and backward."""
