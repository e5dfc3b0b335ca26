"""Micro-batches that hold the prompt of a group's sequences once."""

from __future__ import annotations

from asyncrl.models.config import DecoderConfig
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import cut_groups, cut_micro_batches, tokens_once


def attention_cost(config: DecoderConfig) -> float:
    """Of a query and one key in causal attention, in units of a token's linear layers: 2 · heads · head_dim FLOPs (half
    of the keys are masked) over 2 · parameters of a layer."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parameters = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return queries / parameters


def cut_with_prompts_once(batch: TrainBatch, max_tokens: int, attention_cost: float) -> list[list[int]] | None:
    """Sequence indices of micro-batches of at most ``max_tokens`` tokens, written out, as attention holds them; None if
    they would cost more than those of `cut_micro_batches`, in which similar lengths pad each other less."""
    together, apart = cut_groups(batch, max_tokens), cut_micro_batches(batch.lengths, max_tokens)
    padded = lambda cuts: sum(len(cut) * int(batch.lengths[cut].max()) ** 2 for cut in cuts)
    cost = attention_cost * padded(together) + sum(tokens_once(batch, cut) for cut in together)
    return together if cost < attention_cost * padded(apart) + len(batch.tokens) else None
