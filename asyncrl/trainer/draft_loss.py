"""The draft's loss beside the policy's: which tokens it is taught, how they weigh, and in how many steps.

With S_d the trained response tokens that depth d can predict, in all micro-batches and ranks, and q_d and p the draft's
and the policy's distributions of such a token, both at the temperature that it was sampled at::

    acceptance:     loss_d = − 1/|S_d| · Σ over S_d of log Σ_v min(p(v), q_d(v))
    cross_entropy:  loss_d = − 1/|S_d| · Σ over S_d of log q_d(token)
    L = loss_scaling_factor / depths · Σ over d of loss_d          (DeepSeek-V3 2024, section 2.2)

What the first takes the logarithm of is the chance that a drafted token is accepted. It learns from whole
distributions, as in Zhou et al. 2024, "DistillSpec" (arXiv 2310.08461), and spends a draft that is too small to equal
the policy on what is accepted. exp(−loss_d) is the geometric mean of those chances.

|S_d| is a count of its own, whatever the policy's loss divides by: advantages and sequence weights say nothing of how
often the draft should have been right.

The draft has far more to learn from a batch than the policy does, since its target is told to it, and must follow a
policy that moves with every step. So with ``detach_encoder`` the batch is cut into equal shares, and it takes an
optimizer step on each, ``passes`` times over; |S_d| is then that of a share.
"""

from __future__ import annotations

import numpy as np

from asyncrl.config.schema import MTPConfig
from asyncrl.trainer.backend import TrainBatch

#: how many steps a draft takes that is not bound to the trunk's
DETACHED_UPDATES = 16


def draft_updates(config: MTPConfig) -> int:
    """Steps of the draft's optimizer in one pass over a batch."""
    return config.updates_per_pass or (DETACHED_UPDATES if config.detach_encoder else 1)


def draft_targets(batch: TrainBatch, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """What depth ``depth`` (from 1) is taught: packed places and the tokens to predict from them, int64 [S] each.

    Token p+2 is predicted from place p, see `asyncrl.models.decoder.Decoder.draft_states`; place p+1−depth, where the
    draft began, must be in the same sequence."""
    trained = batch.loss_mask
    rows, tokens = batch.rows[trained], batch.targets[trained]
    first = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.row_offsets))[trained]
    known = rows - depth >= first
    return rows[known] - 1, tokens[known].astype(np.int64)
