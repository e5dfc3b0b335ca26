"""Observability of a run: telemetry, sinks, sampled trajectories and the HTML report."""
