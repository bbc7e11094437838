"""What this package costs on a CPU, against what a user would call instead: ratios in one interleaved run."""
