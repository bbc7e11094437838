"""Decoding: a few queries against a long cache."""
