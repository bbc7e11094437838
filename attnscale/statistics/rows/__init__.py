"""Row engine: attention output and row statistics in torch, computed from tiles of raw scores."""
