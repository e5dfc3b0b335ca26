"""The rollouter pool: engines, router, agent loops, rewards and the rollout loop."""
