"""Random samples of the training batches, as readable rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from asyncrl.observability.number_format import json_number
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason

BETWEEN_SEQUENCES = "\n\n[next sequence]\n\n"

#: token ids → text with special tokens, so that the ends of turns are visible
Decode = Callable[[Sequence[int]], str]


def trajectory_row(step: int, group: Group, s: int, decode: Decode) -> dict[str, Any]:
    """Sample ``s`` of a group as a JSON object. ``response`` has the texts of its sequences one after another;
    ``versions`` lists the version spans of each: ``{"sequence": index, "start": first token, "version":
    "lineage.number", "mixed_kv": bool}``."""
    sequences = group.sequences(s)
    rows = [group.response(q) for q in sequences]
    return {
        "step": int(step),
        "uid": group.uid,
        "prompt_id": group.prompt_id,
        "epoch": int(group.epoch),
        "sample": int(group.sample_index[s]),
        "prompt": decode(group.prompt_tokens.tolist()),
        "response": BETWEEN_SEQUENCES.join(decode(group.tokens[of].tolist()) for of in rows),
        "reward": json_number(group.rewards[s]),
        "metrics": {name: json_number(column[s]) for name, column in group.metrics.items()},
        "prompt_tokens": len(group.prompt_tokens),
        "response_tokens": sum(of.stop - of.start for of in rows),
        "trained_tokens": sum(int(group.loss_mask[of].sum()) for of in rows),
        "finish": FinishReason(int(group.finish[s])).name.lower(),
        "versions": [
            {"sequence": i, "start": span.start, "version": str(span.version), "mixed_kv": span.mixed_kv}
            for i, q in enumerate(sequences)
            for span in group.spans(q)
        ],
    }


def sampled_rows(step: int, groups: Sequence[Group], decode: Decode, k: int) -> list[dict[str, Any]]:
    """``k`` samples of a step's groups (all, if there are fewer), drawn uniformly so that they are representative.
    Seeded by the step, so that a repeated run draws the same samples."""
    every = [(group, s) for group in groups for s in range(len(group))]
    chosen = random.Random(step).sample(every, min(k, len(every)))
    return [trajectory_row(step, group, s, decode) for group, s in chosen]
