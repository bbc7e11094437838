"""What can be known of the kernels without a GPU: compiled ahead of time, counted, and held against peak rates."""
