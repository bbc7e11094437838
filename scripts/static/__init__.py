"""Static analysis of the kernels without a GPU: ahead-of-time compilation and instruction counts."""
