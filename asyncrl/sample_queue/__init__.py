"""The pipe from rollouter to trainer: admission by staleness budget, the bounded queue, the ledger of every group."""
