"""Pipe from rollouter to trainer: admission by staleness budget, a bounded durable queue, a ledger of all groups."""
