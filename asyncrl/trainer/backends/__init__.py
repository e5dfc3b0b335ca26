"""Training frameworks behind the interface of `asyncrl.trainer.backends.base`."""
