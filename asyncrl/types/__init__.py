"""Data that moves between the pools: prompts, samples, groups, versions."""
