"""Experiments on calibration: coverage of its intervals, its predictions on fresh seeds, and a real model."""
