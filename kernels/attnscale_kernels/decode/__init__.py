"""Decode attention: a few queries against a long KV cache."""
