"""The objective of a run: the selected items of its algorithm put together, over whole batches and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.divergence import EntropyControl, kl_estimate, kl_loss
from asyncrl.algorithms.items import TokenFigures
from asyncrl.algorithms.ratios import clamped
from asyncrl.config.schema import Config
from asyncrl.models.device_copy import on_device
from asyncrl.trainer.backends.base import LossOutput, Outputs, TrainBatch
from asyncrl.trainer.batches import first_sequences
from asyncrl.trainer.segments import RowSegments
from asyncrl.types.samples import TOKEN_REWARDS


class Source(NamedTuple):
    """Of a column: one of a rank's models, and which of its outputs."""

    model: str
    output: str


class Objective:
    """Per token of a train step, with the advantage A, the weights w of the corrections and the policies π (current),
    π_anchor (``algorithm.anchor``), μ (behaviour) and π_reference::

        loss = w(π_anchor / μ) · surrogate(π, π_anchor, A) + kl_coef · KL(π ‖ π_reference) − c · entropy

    - ``anchor=behaviour``: π_anchor = μ. What the surrogate bounds is how far a stale token's probability may have
      moved, over all optimizer steps since it was sampled. Corrections may only mask.
    - ``anchor=proximal``: the trainer's policy at the start of the batch, which with the correction ``tis`` is
      decoupled PPO (Hilton et al. 2021, "Batch size-invariance for policy optimization"). In the first optimizer step
      of a batch the ratio is 1.
    - ``anchor=loglinear``: that policy estimated between μ and π, so that it needs no forward pass (Fu et al. 2025,
      "AReaL")::

        log π_anchor = log μ + α (log sg(π) − log μ),    α = (v − v_μ) / (v + δ − v_μ)

      with v the position of the trainer's weights in versions, δ how much a train step adds, v_μ the token's version.

    c is ``entropy_coef``, or follows ``entropy_target``. With ``kl_reward_coef`` log(μ / π_reference) of each trained
    token is subtracted from its sample's reward. A train step goes through four methods: `step_scores`, `prepare`,
    `scores`, and `loss` for every micro-batch.
    """

    def __init__(self, config: Config) -> None:
        self._options, self._constant = config.algorithm, config.rollout.max_response_tokens
        options = config.algorithm
        advantage, surrogate, corrections = options.items()
        self._advantage = partial(_with, advantage.compute, options.read_by(advantage))
        self._surrogate = partial(_with, surrogate.loss, options.read_by(surrogate))
        #: of whole steps or not → the corrections
        self._corrections = {
            of_step: [partial(_with, c.weights, options.read_by(c)) for c in corrections if c.of_step == of_step]
            for of_step in (False, True)
        }
        self._weighs = any(item.weighs for item in corrections)
        #: True if the loss of a group's tokens depends on nothing of the other groups of its train step
        self.of_groups = advantage.of_groups and not self.step_scores()
        self.entropy = EntropyControl(options)
        #: True if a sequence without an advantage other than 0 has no gradient
        self.scales_advantages = surrogate.scales_advantages and not options.kl_coef and not self.entropy.used

    def step_scores(self) -> dict[str, Source]:
        """Columns that `prepare` reads, of the whole train step, and where they come from."""
        found = {}
        if self._corrections[True]:
            found["proximal_logprobs"] = Source("policy", "logprobs")
        if self._options.kl_reward_coef:
            found["reference_logprobs"] = Source("reference", "logprobs")
        return found

    def scores(self, several_steps: bool) -> dict[str, Source]:
        """Columns that the loss reads beside the current policy's outputs and those of `step_scores`, before the first
        of a batch's optimizer steps, and where they come from.

        In a batch's only step the current policy is the proximal one, so the loss uses its detached logprobs: exactly
        equal, without another forward pass."""
        found = {}
        if several_steps and self._options.anchor == "proximal":
            found["proximal_logprobs"] = Source("policy", "logprobs")
        if self._options.kl_coef:
            found["reference_logprobs"] = Source("reference", "logprobs")
        return {column: source for column, source in found.items() if column not in self.step_scores()}

    def prepare(self, batch: TrainBatch, version: float = 0.0, step: float = 1.0) -> np.ndarray:
        """Add the columns ``weights`` and ``advantages``, and those that the anchor reads, to a whole batch, in which
        the overlong policy is applied. Returns each sequence's share of the denominator, float64 [B].

        ``version``: position of the weights in versions; ``step``: what a train step adds to it."""
        columns, first = batch.sequence_columns, first_sequences(batch)
        weights, shares = token_weights(
            batch.loss_mask, batch.row_offsets, columns["sample"], columns["owned"], self._options, self._constant
        )
        sample = columns["sample"]
        trained = np.concatenate([[0], np.cumsum(batch.loss_mask)])[batch.row_offsets]
        penalty = self._penalty(batch)
        of_token = np.repeat(sample, np.diff(batch.row_offsets))
        view = BatchView(
            rewards=columns["rewards"][first] - np.bincount(of_token, penalty, len(first)).astype(np.float32),
            group=columns["group"][first],
            counted=np.bincount(sample, np.diff(trained)) > 0,
            sample=sample,
            row_offsets=batch.row_offsets,
            loss_mask=batch.loss_mask,
            penalty=penalty,
            token_rewards=batch.columns[TOKEN_REWARDS],
        )
        batch.columns["weights"] = weights
        batch.columns["advantages"] = self._advantage(view)
        if self._options.anchor == "loglinear":
            age = np.maximum(version - batch.columns["version"], 0.0)
            batch.columns["anchor_share"] = (age / (age + step)).astype(np.float32)
        if self._corrections[True]:
            self._correct_step(batch)
        return shares

    def _penalty(self, batch: TrainBatch) -> np.ndarray:
        """float32 [R]: the KL that each trained token's reward loses."""
        if not self._options.kl_reward_coef:
            return np.zeros(len(batch.loss_mask), np.float32)
        columns = batch.columns
        kl = _difference(columns["behaviour_logprobs"], columns["reference_logprobs"], batch.loss_mask)
        return (self._options.kl_reward_coef * kl).astype(np.float32)

    def _correct_step(self, batch: TrainBatch) -> None:
        """Add the column ``step_correction``, and one for each figure."""
        columns, trained = batch.columns, torch.from_numpy(batch.loss_mask)
        log_ratio = _difference(columns["proximal_logprobs"], columns["behaviour_logprobs"], batch.loss_mask)
        correction, figures = _product(
            self._corrections[True], torch.from_numpy(log_ratio), RowSegments(batch.row_offsets, trained)
        )
        columns["step_correction"] = correction.float().numpy()
        columns |= {_FIGURE + name: values.float().numpy() for name, values in figures.items()}

    def loss(self, outputs: Outputs, batch: TrainBatch) -> LossOutput:
        """A `LossFunction`. Tokens of weight 0 are not trained: whatever their columns hold, NaN included, changes
        neither loss nor gradient.

        Sums: ``entropy``, ``kl_behaviour`` (k3 of behaviour ‖ anchor, with the behaviour anchor ‖ current),
        ``ratio_mean`` (of those two policies), ``kl_reference``, ``kl_proximal`` (k3 of anchor ‖ current, for other
        anchors), and the items' own figures. Extremes over trained tokens: ``ratio_max`` and ``ratio_min_negated`` of
        the ratio of ``ratio_mean``, ``ppo_ratio_max`` and ``ppo_ratio_min_negated`` of current to anchor."""
        options, logprobs, entropy = self._options, outputs["logprobs"], outputs["entropy"]
        column = {
            name: on_device(values, logprobs.device)
            for name, values in batch.columns.items()
            if name in _READ or name.startswith(_FIGURE)
        }
        weights = column["weights"]
        # untrained tokens become zeros before any product: 0 · NaN is NaN, in the gradient too
        trained = weights != 0
        column = {name: torch.where(trained, values, 0) for name, values in column.items()}
        logprobs, entropy = torch.where(trained, logprobs, 0), torch.where(trained, entropy, 0)
        segments = RowSegments(batch.row_offsets, trained)

        behaviour, current = column["behaviour_logprobs"], logprobs.detach()
        anchor = self._anchor(current, column)
        token_loss, figures = self._surrogate(logprobs, anchor, column["advantages"], segments)
        compared = current if options.anchor == "behaviour" else anchor
        drift = clamped(compared - behaviour)
        importance = drift.exp()
        sums = {"entropy": entropy.detach(), "kl_behaviour": torch.expm1(drift) - drift, "ratio_mean": importance}
        sums |= figures
        sums |= {name.removeprefix(_FIGURE): v for name, v in column.items() if name.startswith(_FIGURE)}
        correction, figures = _product(self._corrections[False], compared - behaviour, segments)
        sums |= figures
        if (of_step := column.get("step_correction")) is not None:
            correction = correction * of_step
        if of_step is not None or self._corrections[False]:
            token_loss = token_loss * correction
        if self._weighs:
            sums |= {"correction_weight": correction, "correction_weight_squared": correction.square()}
        change = clamped(current - anchor)
        if options.anchor != "behaviour":
            sums["kl_proximal"] = torch.expm1(change) - change
        if (reference := column.get("reference_logprobs")) is not None:
            sums["kl_reference"] = kl_estimate(current, reference, "k3")
            if options.kl_coef:
                token_loss = token_loss + options.kl_coef * kl_loss(logprobs, reference, behaviour, options)
        if self.entropy.coefficient:
            token_loss = token_loss - self.entropy.coefficient * entropy

        def largest(values: Tensor) -> Tensor:
            return values.masked_fill(~trained, -torch.inf).max()

        ratio = change.exp()
        return LossOutput(
            loss=token_loss @ weights,
            sums={name: values.masked_fill(~trained, 0).sum(dtype=torch.float64) for name, values in sums.items()},
            extremes={
                "ratio_max": largest(importance),
                "ratio_min_negated": largest(-importance),
                "ppo_ratio_max": largest(ratio),
                "ppo_ratio_min_negated": largest(-ratio),
            },
        )

    def _anchor(self, current: Tensor, column: Mapping[str, Tensor]) -> Tensor:
        behaviour = column["behaviour_logprobs"]
        if self._options.anchor == "behaviour":
            return behaviour
        if self._options.anchor == "proximal":
            return column.get("proximal_logprobs", current)
        return behaviour + column["anchor_share"] * (current - behaviour)


#: columns of tokens that the loss reads, those that are there
_READ = (
    "weights",
    "advantages",
    "behaviour_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "anchor_share",
    "step_correction",
)
#: prefix of the columns that hold figures of corrections of whole steps
_FIGURE = "figure/"


def _difference(a: np.ndarray, b: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """a − b for trained tokens, 0 for others, whatever they hold."""
    return np.subtract(a, b, out=np.zeros_like(a), where=trained)


def _product(
    corrections: Sequence[Callable[..., tuple[Tensor, TokenFigures]]], log_ratio: Tensor, segments: RowSegments
) -> tuple[Tensor, TokenFigures]:
    """The product of the weights, ones without any correction, and all figures."""
    weights = torch.ones_like(log_ratio)
    figures: dict[str, Tensor] = {}
    for correction in corrections:
        factor, found = correction(log_ratio, segments)
        weights = weights * factor
        figures |= found
    return weights, figures


def _with(function: Callable[..., Any], options: Any, *given: Any) -> Any:
    return function(*given, options)


def effective_sample_size(figures: dict[str, float]) -> None:
    """Replace the moments of the corrections' weights, where there are any, by ``effective_sample_size``: (mean w)² /
    mean w², the share of tokens that equal weights would have needed (Kish 1965)."""
    if (squared := figures.pop("correction_weight_squared", None)) is not None:
        figures["effective_sample_size"] = figures["correction_weight"] ** 2 / max(squared, np.finfo(float).tiny)
