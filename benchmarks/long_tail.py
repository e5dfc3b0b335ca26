"""A long-tailed distribution of response lengths, as long reasoning has it, with what runs need to have it.

Lengths are log-normal: prompts differ by `BETWEEN`, samples of one prompt by `WITHIN` (standard deviations of the
logarithm), up to `LIMIT` medians. The mean is 1.8 medians, one sample in a hundred has 13, and the longest twentieth
has more than a quarter of all tokens. A sample's length depends on its group and index alone, so all runs have the same
work.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from statistics import NormalDist
from typing import Any

import xxhash

from asyncrl.rollouter.agents.base import Generate
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample

BETWEEN, WITHIN = 0.85, 0.7
LIMIT = 16


def length(median: float, group: str, index: int) -> int:
    """Tokens of a sample, at least 1 and at most ``LIMIT · median``."""
    spread = BETWEEN * _normal(group) + WITHIN * _normal(f"{group}/{index}")
    return max(1, round(median * min(LIMIT, math.exp(spread))))


def _normal(name: str) -> float:
    """A draw from the standard normal distribution, fixed by the name."""
    return NormalDist().inv_cdf((xxhash.xxh3_64_intdigest(name.encode()) + 0.5) / 2**64)


class LongTail(SingleTurn):
    """An agent loop whose answers end at their length of this distribution with ``median``, in tokens."""

    def __init__(self, tokenizer: Any, max_response_tokens: int, median: float) -> None:
        super().__init__(tokenizer, max_response_tokens)
        self._median = median

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        limited = SingleTurn(None, length(self._median, prompt.uid, index))
        return await limited.run(prompt, index, generate)


def reward(prompt: Prompt, response: str) -> float:
    """0 or 1 by the text alone: most groups have both, so that all samples are computed."""
    return float(xxhash.xxh3_64_intdigest(response.encode()) & 1)


def without_end(checkpoint: Path, out: Path) -> Path:
    """A copy of the quickstart's checkpoint whose answers have no end but their length: its stop token is one that the
    policy does not write."""
    shutil.copytree(checkpoint, out)
    changes = {
        "generation_config.json": {"eos_token_id": 0},
        "config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }
    for name, change in changes.items():
        (out / name).write_text(json.dumps(json.loads((out / name).read_text()) | change))
    return out
