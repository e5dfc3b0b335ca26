"""Destinations of a run's metrics, spans and trajectories."""
