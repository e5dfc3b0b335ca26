"""What lets a run share CPU cores, and GPU packages run on a CPU."""
