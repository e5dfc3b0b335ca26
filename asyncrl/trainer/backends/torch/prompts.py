"""Micro-batches that hold the prompt of a group's sequences once."""

from __future__ import annotations

import numpy as np

from asyncrl.models.config import DecoderConfig
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import cut_groups, cut_micro_batches, tokens_once


def attention_cost(config: DecoderConfig) -> float:
    """Of a query and one key in causal attention, in units of a token's linear layers: 2 · heads · head_dim FLOPs (half
    of the keys are masked) over 2 · parameters of a layer."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parameters = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return queries / parameters


#: what one more block costs, in units of a token's linear layers: measured on a CPU, a guess for a GPU
BLOCK_COST = {"cpu": 8.0, "cuda": 500.0}


def cut_with_prompts_once(
    batch: TrainBatch, max_tokens: int, attention_cost: float, device: str
) -> list[list[list[int]]] | None:
    """Micro-batches of at most ``max_tokens`` tokens, written out, as attention holds them: each in blocks of sequence
    indices that attention pads together. None if they would cost more than those of `cut_micro_batches`, in which
    similar lengths pad each other less."""
    together, apart = cut_groups(batch, max_tokens), cut_micro_batches(batch.lengths, max_tokens)
    padded = lambda cuts: sum(len(cut) * int(batch.lengths[cut].max()) ** 2 for cut in cuts)
    blocks = [blocks_of(batch.lengths, cut, BLOCK_COST[device] / attention_cost) for cut in together]
    cost = attention_cost * sum(map(padded, blocks)) + BLOCK_COST[device] * sum(len(of) - 1 for of in blocks)
    cost += sum(tokens_once(batch, cut) for cut in together)
    return blocks if cost < attention_cost * padded(apart) + len(batch.tokens) else None


def blocks_of(lengths: np.ndarray, sequences: list[int], block_cost: float) -> list[list[int]]:
    """Sequences in blocks of similar lengths, the longest first, such that the sum over blocks of their number ·
    longest² + ``block_cost`` is least."""
    order = np.array(sequences)[np.argsort(-lengths[sequences], kind="stable")]
    squares = lengths[order].astype(np.float64) ** 2
    places = np.arange(len(order))
    least, begins = np.zeros(len(order) + 1), np.zeros(len(order) + 1, np.int64)  # of the first sequences, by number
    for end in range(1, len(order) + 1):
        costs = least[:end] + (end - places[:end]) * squares[:end] + block_cost
        begins[end] = costs.argmin()
        least[end] = costs[begins[end]]
    blocks, end = [], len(order)
    while end:
        blocks.append(order[begins[end] : end].tolist())
        end = int(begins[end])
    return blocks[::-1]
