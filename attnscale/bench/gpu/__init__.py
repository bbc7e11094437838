"""GPU benchmark of the kernels against other attention implementations: correctness first, then speed."""
