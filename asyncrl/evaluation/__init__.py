"""Evaluation of checkpoints on prompt files."""
