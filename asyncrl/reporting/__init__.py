"""Where a run shows itself: console, JSONL, wandb, sampled trajectories and the HTML report."""
