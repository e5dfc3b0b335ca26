"""Clocks of `benchmarks.observability`, which `sitecustomize` in this folder puts into every process."""

FOLDER = "ASYNCRL_OBSERVED"  # where each process writes its CPU seconds
