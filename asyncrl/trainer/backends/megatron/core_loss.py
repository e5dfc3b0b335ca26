"""The draft's cross-entropy through megatron-core's `process_mtp_loss`, available from 0.17 on.

It rolls the labels to the positions from which each depth predicts them, within packed sequences and across context
parallel ranks, and attaches the losses to the trunk's states. The caller supplies head and loss, as its signature
permits, so no depth materializes all logits, and the temperature is that of sampling.

Shape suffixes: T this rank's tokens, M hidden size, r the trained ones of them.
"""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.device_copy import on_device
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.packing import MicroBatch

from megatron.core.transformer import multi_token_prediction  # isort: skip (after what makes it run without CUDA)
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

ProcessMTPLoss = Callable[..., Tensor]
#: (depth from 1, its states [r, M], their tokens [r]) → a scalar, divided by the global count
DepthLoss = Callable[[int, Tensor, Tensor], Tensor]


#: arguments that `through_core` can supply
_GIVEN = frozenset(
    "hidden_states labels loss_mask output_layer output_weight runtime_gather_output is_training "
    "compute_language_model_loss config cp_group packed_seq_params".split()
)


def process_mtp_loss() -> ProcessMTPLoss | None:
    """megatron-core's function; None if the installed release has none that supports packed sequences without requiring
    an unknown argument."""
    process: ProcessMTPLoss | None = getattr(multi_token_prediction, "process_mtp_loss", None)
    parameters = inspect.signature(process).parameters if process else {}
    needed = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    return process if "packed_seq_params" in parameters and needed <= _GIVEN else None


def through_core(
    process: ProcessMTPLoss,
    config: TransformerConfig,
    scaling_factor: float,
    micro: MicroBatch,
    share: PackedSequences,
    hidden_T1M: Tensor,
    states: Sequence[Tensor],
    loss: DepthLoss,
) -> Tensor:
    """A zero whose gradient is that of ``scaling_factor`` times the mean over depths of ``loss``, for the trained
    positions of this rank's share. ``hidden_T1M``: the trunk's states, ``states``: the draft's, by depth."""
    # Labels are row numbers from 1, because megatron-core fills with 0 after the end of a sequence.
    trained = np.flatnonzero(micro.batch.loss_mask)
    places_r, mine = share.here(micro.rows[on_device(trained, micro.rows.device)])
    numbers_1T = micro.rows.new_zeros(1, len(hidden_T1M))
    numbers_1T[0, places_r] = on_device(trained + 1, micro.rows.device)[mine]
    depths = itertools.count(1)

    def of_next_depth(labels_1T: Tensor, draft_T1M: Tensor) -> Tensor:
        taught_r = labels_1T[0].nonzero().squeeze(1)
        tokens_r = micro.targets[labels_1T[0, taught_r] - 1]
        # This scalar covers all positions. megatron-core broadcasts it and takes the mean, which is the same scalar.
        return loss(next(depths), draft_T1M.squeeze(1).index_select(0, taught_r), tokens_r)

    aligned: list[Tensor] = []
    for depth, state in enumerate(states):
        # Our state at position p predicts token p + 2 at every depth; megatron-core's at depth d predicts p + 1 + d.
        for _ in range(depth):
            state = share.after(state)
        aligned.append(state)
    settings = copy.copy(config)
    settings.mtp_num_layers, settings.mtp_loss_scaling_factor = len(states), scaling_factor
    settings.mtp_detach_heads = False  # ``loss`` detaches its head if needed
    settings.calculate_per_token_loss = False  # else a rank weights by its labels before the roll
    on_host = copy.copy(share)
    on_host.cu_seqlens_q = share.cu_seqlens_q.cpu()  # it reads single elements
    given: dict[str, Any] = {
        "hidden_states": torch.cat([hidden_T1M, *aligned]),
        "labels": numbers_1T,
        "loss_mask": (numbers_1T > 0).float(),
        "output_layer": lambda draft_T1M, **_: (draft_T1M, None),
        "output_weight": None,
        "runtime_gather_output": None,
        "is_training": False,  # True would record metrics computed from states instead of logits
        "compute_language_model_loss": of_next_depth,
        "config": settings,
        "cp_group": share.group,
        "packed_seq_params": on_host,
    }
    wanted = inspect.signature(process).parameters.keys()
    joined_T1M = process(**{name: given[name] for name in wanted & _GIVEN})
    return joined_T1M[:0].sum()
