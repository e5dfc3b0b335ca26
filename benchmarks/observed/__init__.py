"""CPU clocks of `benchmarks.observability`; this folder's `sitecustomize` installs them in every process."""

FOLDER = "ASYNCRL_OBSERVED"  # where each process writes its CPU seconds
