"""Destinations of metrics, spans and trajectories while the run goes on."""
