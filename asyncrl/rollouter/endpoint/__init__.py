"""Serves the policy to unmodified agents over HTTP, and turns what they sampled into exact trajectories."""
