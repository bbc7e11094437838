"""The softmax of a score matrix that exists."""
