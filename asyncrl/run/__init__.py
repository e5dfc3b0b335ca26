"""Lifecycle of a run: checks, placement, start, supervision, monitoring, shutdown."""
