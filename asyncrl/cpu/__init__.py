"""CPU scheduling on shared cores, and corrections that let GPU packages run on a CPU."""
