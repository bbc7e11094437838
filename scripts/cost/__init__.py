"""CPU cost of attnscale relative to its alternatives, measured interleaved in one run."""
