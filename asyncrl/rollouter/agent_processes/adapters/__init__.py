"""Agents of other systems: each file runs in an environment that has its system, and imports nothing of asyncrl."""
