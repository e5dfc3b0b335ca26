"""Advantages: how much better a sample was than expected."""
