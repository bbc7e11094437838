"""What can be known of the kernels without a GPU: compiled ahead of time, and counted beside a plain kernel."""
