"""Loss of the MTP draft, trained beside the policy: its targets, their weights, and the number of steps.

S_d are the trained response tokens that depth d can predict, in all micro-batches and ranks; q_d and p the draft's and
the policy's distributions of such a token, both at its sampling temperature::

    acceptance:     loss_d = − 1/|S_d| · Σ over S_d of log Σ_v min(p(v), q_d(v))
    cross_entropy:  loss_d = − 1/|S_d| · Σ over S_d of log q_d(token)
    L = loss_scaling_factor / depths · Σ over d of loss_d          (DeepSeek-V3 2024, section 2.2)

The sum in the acceptance loss is the probability that a drafted token is accepted. This loss learns from whole
distributions, as in Zhou et al. 2024, "DistillSpec" (arXiv 2310.08461), and makes a draft that is too small to match
the policy optimize acceptance itself. exp(−loss_d) is the geometric mean of those probabilities.

|S_d| is independent of the policy loss's denominator: advantages and sequence weights do not apply to the draft.

The draft has labels, so it can learn far more from a batch than the policy, and it must keep up with a policy that
changes at every step. With ``detach_encoder`` the batch is therefore split into equal shares and the draft takes an
optimizer step on each, ``passes`` times; |S_d| then counts the tokens of one share.
"""

from __future__ import annotations

import numpy as np

from asyncrl.config.schema import MTPConfig
from asyncrl.trainer.backends.base import TrainBatch

#: default number of steps per pass of a detached draft
DETACHED_UPDATES = 16


def draft_updates(config: MTPConfig) -> int:
    """Optimizer steps of the draft in one pass over a batch."""
    return config.updates_per_pass or (DETACHED_UPDATES if config.detach_encoder else 1)


def draft_targets(batch: TrainBatch, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Targets of depth ``depth`` (from 1): packed positions, and the tokens to predict from them, int64 [S] each.

    Position p predicts token p+2, see `asyncrl.models.decoder.Decoder.draft_states`; position p+1−depth, where the
    draft began, must be in the same sequence."""
    trained = batch.loss_mask
    rows, tokens = batch.rows[trained], batch.targets[trained]
    first = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.row_offsets))[trained]
    known = rows - depth >= first
    return rows[known] - 1, tokens[known].astype(np.int64)
