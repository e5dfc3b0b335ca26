"""SAPO: instead of a clip, a soft gate that closes as the ratio leaves 1.

Gao et al. 2025, "Soft Adaptive Policy Optimization"::

    loss = −(4 / τ) · sigmoid(τ · (π / π_anchor − 1)) · A    with τ = sapo_tau_positive if A > 0, else sapo_tau_negative

A higher temperature closes faster; the paper's is higher for negative advantages, whose gradients spread over many
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.items import Surrogate, TokenFigures
from asyncrl.algorithms.ratios import clamped
from asyncrl.config.section import Section

if TYPE_CHECKING:
    from torch import Tensor

    from asyncrl.algorithms.items import Segments


@dataclass
class SAPOOptions(Section):
    sapo_tau_positive: PositiveFloat = 1.0  # temperature of SAPO's gate where the advantage is positive
    sapo_tau_negative: PositiveFloat = 1.05  # and where it is not


def loss(
    logprobs: Tensor, anchor: Tensor, advantages: Tensor, segments: Segments, options: SAPOOptions
) -> tuple[Tensor, TokenFigures]:
    ratio = clamped(logprobs - anchor).exp()
    positive = advantages > 0
    high, low = (advantages.new_tensor(tau) for tau in (options.sapo_tau_positive, options.sapo_tau_negative))
    tau = high.where(positive, low)
    gate = (tau * (ratio - 1)).sigmoid()
    # the gradient's weight relative to that of an on-policy token: 4 · gate · (1 − gate)
    return -4 / tau * gate * advantages, {"gate": 4 * (gate * (1 - gate)).detach()}


SURROGATE = Surrogate(loss, SAPOOptions, scales_advantages=True)
