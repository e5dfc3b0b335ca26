"""The trainer pool: batches, advantages, losses, backends, checkpoints and the training loop."""
