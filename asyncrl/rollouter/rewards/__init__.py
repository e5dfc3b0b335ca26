"""Reward functions, and the killable worker processes that run them under a time limit."""
