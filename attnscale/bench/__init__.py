"""Measuring cost: ratios in one interleaved run, never absolute times."""
