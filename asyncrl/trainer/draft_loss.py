"""The draft's loss beside the policy's: which tokens it is taught, and how they weigh.

With S_d the trained response tokens that depth d can predict, in all micro-batches and ranks, and p_d the draft's
distribution at the temperature that the tokens were sampled at (so that its logits approach the policy's)::

    loss_d = − 1/|S_d| · Σ over S_d of log p_d(token)
    L      = loss_scaling_factor / depths · Σ over d of loss_d          (DeepSeek-V3 2024, section 2.2)

|S_d| is a count of its own, whatever the policy's loss divides by: advantages and sequence weights say nothing of how
often the draft should have been right.
"""

from __future__ import annotations

import numpy as np

from asyncrl.trainer.backend import TrainBatch


def draft_targets(batch: TrainBatch, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """What depth ``depth`` (from 1) is taught: packed places and the tokens to predict from them, int64 [S] each.

    Token p+2 is predicted from place p, see `asyncrl.models.decoder.Decoder.draft_states`; place p+1−depth, where the
    draft began, must be in the same sequence."""
    trained = batch.loss_mask
    rows, tokens = batch.rows[trained], batch.targets[trained]
    first = np.repeat(batch.cu_seqlens[:-1], np.diff(batch.row_offsets))[trained]
    known = rows - depth >= first
    return rows[known] - 1, tokens[known].astype(np.int64)
