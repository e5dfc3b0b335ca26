"""Lookup of a run's parts by registered name or import path."""
