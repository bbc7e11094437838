"""Benchmarks: ratios within one interleaved run, not absolute times."""
