"""Figures of the experiments, drawn from the rows of their tables alone; one file per experiment."""
