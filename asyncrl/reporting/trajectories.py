"""Sampled trajectories as people read them: what was asked, what the policy answered, what it earned."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.reporting.jsonl import LineFile, json_number
from asyncrl.sample import FinishReason, Group
from asyncrl.telemetry.recorder import Batch

TRAJECTORIES_FILE = "trajectories.jsonl"

#: token ids → text, special tokens included: a reader wants to see where a turn ends
Decode = Callable[[Sequence[int]], str]


def trajectory_row(step: int, group: Group, s: int, decode: Decode) -> dict[str, Any]:
    """Row ``s`` of a group as one JSON object. ``versions`` lists the version spans as
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
    """``k`` samples of a step's groups (all, if there are fewer), each as likely as any other: what is shown is what is
    trained on, not the best of it. The step is the seed, so that a run repeated shows the same ones."""
    every = [(group, s) for group in groups for s in range(len(group))]
    chosen = random.Random(step).sample(every, min(k, len(every)))
    return [trajectory_row(step, group, s, decode) for group, s in chosen]


class TrajectoryFile:
    """A sink that keeps the rows of `sampled_rows` in trajectories.jsonl::

    hub.trajectories(sampled_rows(step, groups, tokenizer.decode, k=2))
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._lines = LineFile(Path(run_dir) / TRAJECTORIES_FILE)

    def trajectories(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._lines.write(rows)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        pass

    def spans(self, batch: Batch) -> None:
        pass

    def close(self, failed: str | None, stopped: str | None = None) -> None:
        self._lines.close()
