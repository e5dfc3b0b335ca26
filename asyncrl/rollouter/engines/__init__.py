"""Inference engines, behind the interface of `asyncrl.rollouter.engines.base`."""
