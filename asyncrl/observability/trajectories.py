"""Random samples of the training batches, as readable rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.observability.number_format import json_number
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason

#: token ids → text with special tokens, so that the ends of turns are visible
Decode = Callable[[Sequence[int]], str]


def trajectory_row(step: int, group: Group, s: int, decode: Decode) -> dict[str, Any]:
    """Sample ``s`` of a group as a JSON object. ``versions`` lists the version spans:
    ``{"start": first token, "version": "lineage.number", "mixed_kv": bool}``."""
    tokens = group.tokens[group.response(s)]
    return {
        "step": int(step),
        "uid": group.uid,
        "prompt_id": group.prompt_id,
        "epoch": int(group.epoch),
        "sample": int(group.sample_index[s]),
        "prompt": decode(group.prompt_tokens.tolist()),
        "response": decode(tokens.tolist()),
        "reward": json_number(group.rewards[s]),
        "metrics": {name: json_number(column[s]) for name, column in group.metrics.items()},
        "prompt_tokens": len(group.prompt_tokens),
        "response_tokens": len(tokens),
        "trained_tokens": int(group.loss_mask[group.response(s)].sum()),
        "finish": FinishReason(int(group.finish[s])).name.lower(),
        "versions": [
            {"start": span.start, "version": str(span.version), "mixed_kv": span.mixed_kv} for span in group.spans(s)
        ],
    }


def sampled_rows(step: int, groups: Sequence[Group], decode: Decode, k: int) -> list[dict[str, Any]]:
    """``k`` samples of a step's groups (all, if there are fewer), drawn uniformly so that they are representative.
    Seeded by the step, so that a repeated run draws the same samples."""
    every = [(group, s) for group in groups for s in range(len(group))]
    chosen = random.Random(step).sample(every, min(k, len(every)))
    return [trajectory_row(step, group, s, decode) for group, s in chosen]
