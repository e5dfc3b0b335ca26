"""Reward functions, and the worker processes that contain them."""
