"""One file per experiment, each with `run(quick, progress)`, which returns an `Experiment`."""
