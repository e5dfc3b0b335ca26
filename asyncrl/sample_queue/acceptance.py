"""Checks on a finished group: every trained token was sampled by an engine of this run, every sample has a reward."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import numpy as np

from asyncrl.types.groups import Group

Defect = Literal[
    "no_trained_token", "logprob_not_finite", "token_out_of_vocabulary", "unknown_version", "reward_not_finite"
]


def defect(group: Group, vocab_size: int, versions: Container[tuple[int, int]]) -> Defect | None:
    """Reason why the group must not be trained, or None.

    - ``no_trained_token``: the loss mask is set nowhere.
    - ``logprob_not_finite``: a trained token has a behaviour logprob that is NaN or infinite.
    - ``token_out_of_vocabulary``: a token, trained or not, is not in 0 ≤ token < ``vocab_size``.
    - ``unknown_version``: a span has a policy version that was never announced; ``versions`` holds those that were, as
      (lineage, number).
    - ``reward_not_finite``: a sample has no reward, or one that is infinite."""
    if not group.loss_mask.any():
        return "no_trained_token"
    if not np.isfinite(group.logprobs).all() and not np.isfinite(group.logprobs[group.loss_mask]).all():
        return "logprob_not_finite"
    for tokens in (group.prompt_tokens, group.tokens):
        if len(tokens) and (tokens.min() < 0 or tokens.max() >= vocab_size):
            return "token_out_of_vocabulary"
    sampled_under = set(zip(group.span_lineage.tolist(), group.span_number.tolist()))
    if any(version not in versions for version in sampled_under):
        return "unknown_version"
    if not np.isfinite(group.rewards).all():
        return "reward_not_finite"
    return None
