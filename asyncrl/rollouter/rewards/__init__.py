"""Rewards: functions named by import path, run in worker processes that can be killed at their time limit."""
