"""Training frameworks behind the one interface of `asyncrl.trainer.backend`."""
