"""Compares serving engines with transformers and attnscale on the same checkpoints (`make test-serving`)."""
