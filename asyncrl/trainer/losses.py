"""Policy losses: clipped policy gradient over stale samples, KL to a reference, entropy bonus, and how tokens weigh.

Shape suffix: R response tokens of a micro-batch. A loss is a weighted sum over tokens; the backend divides it by the
mini batch's global denominator, so neither micro-batches nor ranks can change the gradient.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import AlgorithmConfig
from asyncrl.models.uploads import on_device
from asyncrl.trainer.backend import LossFunction, LossOutput, TrainBatch
from asyncrl.trainer.batches import per_token, trained_tokens

#: log-ratios are held within ±20 before exp: float32 then cannot overflow, and no weight beyond e^20 means anything
MAX_LOG_RATIO = 20.0

AGGREGATIONS = ("token_mean", "sequence_mean")
KL_ESTIMATORS = ("k1", "k2", "k3")


def token_weights(batch: TrainBatch, aggregation: str) -> tuple[np.ndarray, np.ndarray]:
    """How much each response token weighs (float32 [R]) and each sequence adds to the denominator (float64 [B]).

    - ``token_mean``: every trained token of the mini batch weighs the same, so long samples count for more (Yu et al.
      2025, "DAPO", section 3.3).
    - ``sequence_mean``: every sample weighs the same, the mean over its trained tokens (Shao et al. 2024, GRPO).

    Raises ValueError for another aggregation."""
    trained = trained_tokens(batch)
    if aggregation == "token_mean":
        return batch.loss_mask.astype(np.float32), trained.astype(np.float64)
    if aggregation == "sequence_mean":
        return (batch.loss_mask / np.maximum(per_token(batch, trained), 1)).astype(np.float32), (trained > 0).astype(
            float
        )
    raise ValueError(f"algorithm.loss_aggregation is {aggregation!r}; expected one of {', '.join(AGGREGATIONS)}")


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """KL(policy ‖ reference) per token [R], from tokens of the policy (Schulman 2020, "Approximating KL Divergence").

    With d = reference − logprobs: k1 = −d, unbiased but noisy (as a loss its gradient is zero in the mean); k2 = d²/2,
    biased but with the right gradient; k3 = e^d − 1 − d, unbiased and never negative. Raises ValueError for another."""
    d = reference - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(d) - d
    raise ValueError(f"algorithm.kl_estimator is {estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}")


def clipped_policy_loss(config: AlgorithmConfig) -> LossFunction:
    """The loss function of PPO's family for stale samples. Per token, with advantage A::

        ratio      = exp(logprobs − proximal)
        importance = min(exp(proximal − behaviour), importance_cap)
        loss       = −importance · min(ratio · A, clip(ratio, 1 − clip_low, 1 + clip_high) · A)
                     + kl_coef · KL(policy ‖ reference) − entropy_coef · entropy

    The clipped surrogate is PPO's (Schulman et al. 2017), the bounds apart are DAPO's clip-higher (Yu et al. 2025),
    proximal and behaviour policies apart are decoupled PPO (Hilton et al. 2021, "Batch size-invariance for policy
    optimization"), the cap is truncated importance sampling (Ionides 2008).

    Reads the columns ``weights``, ``advantages``, ``behaviour_logprobs``, and where present ``proximal_logprobs`` and
    ``reference_logprobs``. Without ``proximal_logprobs`` the current policy is taken for the proximal one: exact in the
    only optimizer step of a batch.

    Sums (weighted like the loss): ``entropy``, ``kl_behaviour`` (k3 of behaviour ‖ proximal), ``kl_proximal`` (k3 of
    proximal ‖ current: how far the batch's optimizer steps have moved the policy, 0 in the first), ``kl_reference``,
    ``clip_fraction_low|high``, ``ratio_mean`` (of proximal to behaviour, before the cap), ``tis_truncated``. Extremes
    over trained tokens: ``ratio_max`` and ``ratio_min_negated`` of that ratio, ``ppo_ratio_max`` and
    ``ppo_ratio_min_negated`` of current to proximal, before the clip.
    """
    if config.kl_coef and config.kl_estimator not in KL_ESTIMATORS:
        raise ValueError(
            f"algorithm.kl_estimator is {config.kl_estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}"
        )

    def loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossOutput:
        column = {name: on_device(values, logprobs.device) for name, values in batch.columns.items()}
        weights, advantages = column["weights"], column["advantages"]
        current = logprobs.detach()
        proximal = column.get("proximal_logprobs", current)

        change = (logprobs - proximal).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = change.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)

        drift = (proximal - column["behaviour_logprobs"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        importance = drift.exp()
        if config.importance_cap:
            surrogate = surrogate * importance.clamp(max=config.importance_cap)

        token_loss = -surrogate
        sums = {
            "entropy": entropy.detach(),
            "kl_behaviour": torch.expm1(drift) - drift,
            "kl_proximal": torch.expm1(change.detach()) - change.detach(),
            "clip_fraction_low": (advantages < 0) & (ratio.detach() < 1 - config.clip_low),
            "clip_fraction_high": (advantages > 0) & (ratio.detach() > 1 + config.clip_high),
            "ratio_mean": importance,
            "tis_truncated": (importance > config.importance_cap) & (config.importance_cap > 0),
        }
        if config.kl_coef:
            token_loss = token_loss + config.kl_coef * kl_estimate(
                logprobs, column["reference_logprobs"], config.kl_estimator
            )
            sums["kl_reference"] = kl_estimate(current, column["reference_logprobs"], "k3")
        if config.entropy_coef:
            token_loss = token_loss - config.entropy_coef * entropy

        def largest(values: Tensor) -> Tensor:
            return values.masked_fill(weights == 0, -torch.inf).max()

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
