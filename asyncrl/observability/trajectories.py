"""Samples for people to read: turn by turn, with what was trained, by which version, for what reward."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl.observability.number_format import json_number
from asyncrl.observability.telemetry.recorder import Failure
from asyncrl.types.groups import Group
from asyncrl.types.samples import TOKEN_REWARDS, FinishReason

BETWEEN_SEQUENCES = "\n\n[next sequence]\n\n"

#: token ids → text with special tokens, so that the ends of turns are visible
Decode = Callable[[Sequence[int]], str]


def trajectory_row(step: int, group: Group, s: int, decode: Decode) -> dict[str, Any]:
    """Sample ``s`` of a group, as a row of `asyncrl.observability.trajectory_files`. ``response`` has the texts of its
    sequences one after another, ``parts`` the same in parts, see `_parts`."""
    sequences = group.sequences(s)
    rows = [group.response(q) for q in sequences]
    parts = [part for i, q in enumerate(sequences) for part in _parts(i, group, q, decode)]
    return {
        "step": int(step),
        "uid": group.uid,
        "prompt_id": group.prompt_id,
        "data_source": group.data_source,
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
        "versions": list(dict.fromkeys(part["version"] for part in parts if part["version"])),
        "parts": parts,
    }


def _parts(index: int, group: Group, q: int, decode: Decode) -> list[dict[str, Any]]:
    """Sequence ``q``, number ``index`` of its sample, cut wherever the mask or the version changes.

    ``kind``: trained; masked (sampled, but trained in another sequence or not at all); read (a tool's answer, say). A
    failed sample has parts of the kind ``sampled`` instead, of no sequence.
    ``start``: first token of the response; ``reward``: of the turns that end in it; ``logprob``: mean of its tokens.
    Version, replica and logprob only of sampled ones."""
    of, spans = group.response(q), group.spans(q)
    count = of.stop - of.start
    mask, logprobs = group.loss_mask[of], group.logprobs[of]
    rewards = np.zeros(count)
    if TOKEN_REWARDS in group.extras:
        values, offsets = group.extras[TOKEN_REWARDS]
        given = values[offsets[q] : offsets[q + 1]]
        rewards[: len(given)] = given
    span = np.searchsorted([x.start for x in spans], np.arange(count), side="right") - 1
    kind = np.where(mask, 2, _sampled(logprobs, mask, span))
    span = np.where(kind > 0, span, -1)
    cuts = np.flatnonzero((np.diff(kind) != 0) | (np.diff(span) != 0)) + 1
    parts = []
    for tokens in np.split(np.arange(count), cuts) if count else []:
        first, sampled = int(tokens[0]), bool(kind[tokens[0]])
        by = spans[span[first]] if sampled else None
        parts.append(
            {
                "sequence": index,
                "start": first,
                "tokens": len(tokens),
                "kind": ("read", "masked", "trained")[kind[first]],
                "text": decode(group.tokens[of][tokens].tolist()),
                "version": str(by.version) if by else None,
                "mixed_kv": by.mixed_kv if by else False,
                "replica": (by.replica or None) if by else None,
                "reward": json_number(rewards[tokens].sum()) if rewards[tokens].any() else None,
                "logprob": json_number(logprobs[tokens].mean()) if sampled else None,
            }
        )
    return parts


def _sampled(logprobs: np.ndarray, mask: np.ndarray, span: np.ndarray) -> np.ndarray:
    """bool [R]: tokens that the policy sampled, as far as they are not trained.

    A token that it only read has logprob 0. So has one that it was certain of, hence all between two others of a
    version span count as sampled, and all from its first token: each span begins with a sampled token, but for a
    sequence's first, which also covers what was read before."""
    sampled = np.zeros(len(mask), bool)
    edges = np.flatnonzero((np.diff(span) != 0) | (np.diff(mask.astype(np.int8)) != 0)) + 1
    for run in np.split(np.arange(len(mask)), edges):
        if len(found := run[logprobs[run] != 0]):
            begins = run[0] > 0 and span[run[0]] != span[run[0] - 1]
            sampled[run[0] if begins else found[0] : found[-1] + 1] = True
    return sampled


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def caption(part: Mapping[str, Any]) -> str:
    """A line above a part's text."""
    words = [part["kind"], plural(part["tokens"], "token")]
    if part["version"] is not None:
        words.append(f"version {part['version']}{' over mixed KV' if part['mixed_kv'] else ''}")
    if part["logprob"] is not None:
        words.append(f"mean logprob {part['logprob']:.3g}")
    if part["reward"] is not None:
        words.append(f"reward {part['reward']:.3g}")
    where = "" if part["sequence"] is None else f"sequence {part['sequence'] + 1}: "
    return where + ", ".join(words)


def failed_row(failure: Failure) -> dict[str, Any]:
    """What was sampled for it are its parts; none of them is trained."""
    kept = [(count, text) for count, text in failure.sampled if count]
    row = failure._asdict()
    del row["sampled"]
    return {
        **row,
        "response": BETWEEN_SEQUENCES.join(text for _, text in kept),
        "response_tokens": sum(count for count, _ in kept),
        "trained_tokens": 0,
        "parts": [
            {"sequence": None, "start": None, "tokens": count, "kind": "sampled", "text": text} for count, text in kept
        ],
    }


def sampled_rows(step: int, groups: Sequence[Group], decode: Decode, k: int) -> list[dict[str, Any]]:
    """``k`` samples of a step's groups (all, if there are fewer), drawn uniformly so that they are representative.
    Seeded by the step, so that a repeated run draws the same samples."""
    every = [(group, s) for group in groups for s in range(len(group))]
    chosen = random.Random(step).sample(every, min(k, len(every)))
    return [trajectory_row(step, group, s, decode) for group, s in chosen]
