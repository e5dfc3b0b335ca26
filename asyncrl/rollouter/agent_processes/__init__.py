"""Processes in which the agents of samples run, with all that they start."""
