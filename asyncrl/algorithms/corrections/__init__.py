"""Corrections: weights of tokens that another policy sampled than the one that the loss is relative to."""
