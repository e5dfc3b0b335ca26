"""Algorithms, a file each, and the maths that they share: `ALGORITHMS` of `asyncrl.trainer.algorithms.base` finds
them."""
