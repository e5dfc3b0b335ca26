"""How buckets travel: shared memory on one machine."""
