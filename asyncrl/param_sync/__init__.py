"""The pipe from trainer to rollouter: versioned buckets of weights, sent in one transaction per policy version."""
