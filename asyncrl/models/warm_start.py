"""Short supervised warm start of a randomly initialized model, so that reinforcement learning has something to
improve.

Target and draft are trained together: the draft (MTP) reads the trunk's hidden states, embeddings and head, all
detached, so that it follows its target without changing it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout

if TYPE_CHECKING:
    from asyncrl.models.scoring import ScoringModel


class Demonstration(NamedTuple):
    """Token ids of a prompt and of its response, including the end token."""

    prompt: list[int]
    response: list[int]


class WarmStartLosses(NamedTuple):
    """Mean cross-entropy of response tokens in nats; ``draft`` is 0 for a decoder without MTP layers."""

    target: float
    draft: float


def warm_start(
    model: Decoder | ScoringModel,
    demonstrations: Iterator[Demonstration],
    steps: int,
    batch_size: int,
    lr: float = 1.5e-3,
    warmup_steps: int = 30,
    decay_steps: int = 0,
) -> list[WarmStartLosses]:
    """Train in place with AdamW for ``steps`` batches of ``batch_size`` demonstrations.

    The learning rate rises over ``warmup_steps``, holds, and decays to a tenth over the last ``decay_steps``. Returns
    each step's losses. Deterministic for a given model, demonstrations and number of threads."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    losses = []
    for step in range(steps):
        rise = min(1.0, (step + 1) / warmup_steps)
        fall = 1 - 0.9 * max(0, step + decay_steps - steps) / max(1, decay_steps)
        optimizer.param_groups[0]["lr"] = lr * rise * fall
        target, draft = demonstration_losses(model, list(islice(demonstrations, batch_size)))
        optimizer.zero_grad(set_to_none=True)
        (target + draft).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(WarmStartLosses(target.item(), draft.item()))
    return losses


def demonstration_losses(model: Decoder | ScoringModel, batch: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Mean cross-entropies (scalars) of the response tokens under the target and its first MTP layer."""
    lengths = np.array([len(d.prompt) + len(d.response) for d in batch])
    tokens_T = torch.tensor([token for d in batch for token in d.prompt + d.response])
    is_response_T = torch.tensor([r for d in batch for r in [False] * len(d.prompt) + [True] * len(d.response)])
    layout = PackedLayout.from_lengths(lengths)

    places = is_response_T.nonzero().squeeze(1)  # a response never starts a sequence, so place - 1 is in the same one
    if not isinstance(model, Decoder):
        target = -model(tokens_T, layout, places - 1, tokens_T[places], 1.0).logprobs.mean()
        return target, target.new_zeros(())
    hidden_TM = model.hidden_states(tokens_T, layout)
    target = F.cross_entropy(model.lm_head(hidden_TM[places - 1]), tokens_T[places])
    if not model.config.num_mtp_layers:
        return target, target.new_zeros(())

    places = places[layout.positions[places] >= 2]  # the draft needs a hidden state and the token after it
    (draft_TM,) = model.draft_states(hidden_TM, tokens_T, layout, depths=1, detach=True)
    logits = F.linear(draft_TM[places - 2], model.lm_head.weight.detach())
    return target, F.cross_entropy(logits, tokens_T[places])
