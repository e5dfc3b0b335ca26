"""Policy losses: clipped policy gradient on stale samples, KL to a reference, entropy bonus, and token weights.

Shape suffix: R response tokens of a micro-batch. A loss is a weighted sum over tokens; the backend divides it by the
mini batch's global denominator, so neither micro-batches nor ranks can change the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.models.device_copy import on_device
from asyncrl.trainer.backends.base import LossFunction, LossOutput, TrainBatch
from asyncrl.trainer.batches import per_token, trained_tokens

#: log-ratios are clamped to ±20 before exp: float32 cannot overflow, and no weight beyond e^20 is meaningful
MAX_LOG_RATIO = 20.0

AGGREGATIONS = ("token_mean", "sequence_mean", "sample_mean", "constant")
KL_ESTIMATORS = ("k1", "k2", "k3")


def token_weights(
    batch: TrainBatch, aggregation: str, denominators: str = "owned", constant: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Weight of each response token (float32 [R]), and share of each sequence in the denominator (float64 [B]).

    - ``token_mean``: all trained tokens of the mini batch weigh the same, so long samples count more (Yu et al. 2025,
      "DAPO", section 3.3).
    - ``sequence_mean``: all sequences weigh the same, each by the mean over its tokens (Shao et al. 2024, GRPO).
    - ``sample_mean``: all samples weigh the same, each by the mean over the trained tokens of its sequences.
    - ``constant``: each sample's tokens are summed and divided by ``constant`` (Liu et al. 2025, Dr. GRPO).

    ``denominators``: means are over the tokens that a sequence ``owned`` before masks of age and overlong samples, so a
    mask does not make the rest weigh more, or over those that are still ``trained``. Raises ValueError for an unknown
    aggregation."""
    owned, sample = batch.sequence_columns["owned"], batch.sequence_columns["sample"]
    count = (trained_tokens(batch) if denominators == "trained" else owned).astype(np.float64)
    of_sample = np.bincount(sample, count)[sample]
    share_of_sample = count / np.maximum(of_sample, 1)
    weights = batch.loss_mask.astype(np.float32)
    if aggregation == "token_mean":
        return weights, count
    if aggregation == "sequence_mean":
        return (batch.loss_mask / np.maximum(per_token(batch, count), 1)).astype(np.float32), (count > 0).astype(float)
    if aggregation == "sample_mean":
        return (batch.loss_mask / np.maximum(per_token(batch, of_sample), 1)).astype(np.float32), share_of_sample
    if aggregation == "constant":
        return weights, share_of_sample * constant
    raise ValueError(f"algorithm.loss_aggregation is {aggregation!r}; expected one of {', '.join(AGGREGATIONS)}")


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) per token [R], from tokens of the policy (Schulman 2020, "Approximating KL Divergence").

    With d = reference − logprobs: k1 = −d, unbiased but noisy (as a loss its gradient is zero in the mean); k2 = d²/2,
    biased but with the right gradient; k3 = e^d − 1 − d, unbiased and never negative. Raises ValueError for others."""
    d = reference - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(d) - d
    raise ValueError(f"algorithm.kl_estimator is {estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}")


def clipped_loss_problems(config: Config) -> Iterator[str]:
    """One line for each option of `clipped_policy_loss` that contradicts another."""
    options, training = config.algorithm, config.async_training
    if 0 < options.importance_cap < 1:
        yield (
            "algorithm.importance_cap: expected 0 or at least 1 (a smaller cap would truncate fresh tokens too), found "
            f"{options.importance_cap}"
        )
    if options.anchor == "behaviour" and options.importance_cap:
        yield (
            "algorithm.importance_cap: the ratio to algorithm.anchor=behaviour already corrects stale tokens, and a "
            f"weight would correct them twice; expected 0, or algorithm.anchor=proximal, found {options.importance_cap}"
        )
    off_policy = training.staleness_threshold > 0 or training.trigger_parameter_sync_step > 1
    if options.anchor == "proximal" and not options.importance_cap and off_policy:
        yield (
            "algorithm.importance_cap: with algorithm.anchor=proximal and 0 nothing corrects stale tokens; expected at "
            "least 1, such as 2, or algorithm.anchor=behaviour"
        )
    if options.kl_coef and options.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator: as a loss, k1's gradient is zero in the mean; expected k2 or k3 with "
            f"algorithm.kl_coef={options.kl_coef:g}"
        )


def clipped_policy_loss(config: AlgorithmConfig) -> LossFunction:
    """Loss function of the PPO family for stale samples. Per token, with advantage A::

        ratio = exp(logprobs − anchor)
        loss  = −w · min(ratio · A, clip(ratio, 1 − clip_low, 1 + clip_high) · A)
                + kl_coef · KL(policy ‖ reference) − entropy_coef · entropy

    The clipped surrogate is PPO's (Schulman et al. 2017), the separate bounds are DAPO's clip-higher (Yu et al. 2025).
    ``config.anchor`` selects the policy that the ratio is relative to:

    - ``behaviour``: the policy that sampled the token, with w = 1. The clip bounds how far a stale token's probability
      may have moved, over all optimizer steps since it was sampled.
    - ``proximal``: the trainer's policy at the start of the batch, with w = min(exp(proximal − behaviour),
      importance_cap); with a cap of 0, w = 1. This is decoupled PPO (Hilton et al. 2021, "Batch size-invariance for
      policy optimization") with truncated importance sampling (Ionides 2008). In the first optimizer step of a batch
      the ratio is 1, so the clip has an effect only if a batch takes several steps.

    Reads the columns ``weights``, ``advantages``, ``behaviour_logprobs``, and where present ``proximal_logprobs`` and
    ``reference_logprobs``. Without ``proximal_logprobs`` the current policy stands for the proximal one, which is exact
    in the only optimizer step of a batch. Tokens of weight 0 are not trained: whatever their columns hold, NaN
    included, changes neither loss nor gradient.

    Sums (weighted like the loss): ``entropy``, ``kl_behaviour`` (k3 of behaviour ‖ proximal, with the behaviour
    anchor ‖ current), ``kl_reference``, ``clip_fraction_low|high``, ``ratio_mean`` (of those two policies, before any
    cap); with the proximal anchor ``kl_proximal`` (k3 of proximal ‖ current: how far the batch's optimizer steps have
    moved the policy, 0 in the first) and ``tis_truncated``. Extremes over trained tokens: ``ratio_max`` and
    ``ratio_min_negated`` of the ratio of ``ratio_mean``, ``ppo_ratio_max`` and ``ppo_ratio_min_negated`` of current to
    anchor, before the clip.
    """

    def loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossOutput:
        column = {name: on_device(values, logprobs.device) for name, values in batch.columns.items()}
        weights = column["weights"]
        # untrained tokens become zeros before any product: 0 · NaN is NaN, in the gradient too
        trained = weights != 0
        column = {name: torch.where(trained, values, 0) for name, values in column.items()}
        logprobs, entropy = torch.where(trained, logprobs, 0), torch.where(trained, entropy, 0)

        advantages, behaviour = column["advantages"], column["behaviour_logprobs"]
        current = logprobs.detach()
        proximal = column.get("proximal_logprobs", current)
        anchor, compared = (behaviour, current) if config.anchor == "behaviour" else (proximal, proximal)

        change = (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = change.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)

        drift = (compared - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        importance = drift.exp()
        if config.anchor == "proximal" and config.importance_cap:
            surrogate = surrogate * importance.clamp(max=config.importance_cap)

        token_loss = -surrogate
        sums = {
            "entropy": entropy.detach(),
            "kl_behaviour": torch.expm1(drift) - drift,
            "clip_fraction_low": (advantages < 0) & (ratio.detach() < 1 - config.clip_low),
            "clip_fraction_high": (advantages > 0) & (ratio.detach() > 1 + config.clip_high),
            "ratio_mean": importance,
        }
        if config.anchor == "proximal":
            sums["kl_proximal"] = torch.expm1(change.detach()) - change.detach()
            sums["tis_truncated"] = (importance > config.importance_cap) & (config.importance_cap > 0)
        if config.kl_coef:
            token_loss = token_loss + config.kl_coef * kl_estimate(
                logprobs, column["reference_logprobs"], config.kl_estimator
            )
            sums["kl_reference"] = kl_estimate(current, column["reference_logprobs"], "k3")
        if config.entropy_coef:
            token_loss = token_loss - config.entropy_coef * entropy

        def largest(values: Tensor) -> Tensor:
            return values.masked_fill(~trained, -torch.inf).max()

        return LossOutput(
            loss=token_loss @ weights,
            sums={name: values.to(weights.dtype) @ weights for name, values in sums.items()},
            extremes={
                "ratio_max": largest(importance),
                "ratio_min_negated": largest(-importance),
                "ppo_ratio_max": largest(ratio.detach()),
                "ppo_ratio_min_negated": largest(-ratio.detach()),
            },
        )

    return loss
