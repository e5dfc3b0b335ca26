"""What generates: engines behind the one interface of `asyncrl.rollouter.engines.base`."""
