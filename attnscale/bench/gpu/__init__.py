"""Measuring the kernels on a GPU against what a user would use instead: correctness first, then speed."""
