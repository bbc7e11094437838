"""Softmax over the rows of a materialised score matrix."""
