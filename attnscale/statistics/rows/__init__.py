"""The one engine for row statistics in torch: tiles of raw scores in, a few numbers per row out."""
