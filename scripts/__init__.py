"""Repository tools, run from the root by the Makefile. Not part of the wheel."""
