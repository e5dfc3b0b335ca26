"""For `benchmarks.observability`: what a process spends on telling what it does, by this folder's `sitecustomize`."""

FOLDER = "ASYNCRL_OBSERVED"  # where each process writes its CPU seconds
