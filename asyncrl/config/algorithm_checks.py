"""Constraints between the items of an algorithm, their options, and other sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from asyncrl.algorithms.items import Correction, Surrogate
from asyncrl.algorithms.options import AlgorithmConfig, Item, unread
from asyncrl.config.fields import expected, fields_of
from asyncrl.config.schema import Config
from asyncrl.config.section import OptionProblems


def problems(config: Config) -> Iterator[str]:
    """One line for each option of ``algorithm`` that contradicts another option. Raises UnknownPart."""
    options, training = config.algorithm, config.async_training
    samples = config.rollout.n
    off_policy = training.staleness_threshold > 0 or training.trigger_parameter_sync_step > 1
    advantage, surrogate, corrections = options.items()
    if samples < advantage.min_samples:
        yield (
            f"rollout.n: {options.advantage} compares the samples of a group and needs at least "
            f"{advantage.min_samples}, found {samples}"
        )
    if samples == 1 and options.group_baseline:
        yield "algorithm.group_baseline: an only sample has no baseline but itself; expected rollout.n of at least 2"
    if samples == 1 and options.filter_zero_variance:
        yield (
            "algorithm.filter_zero_variance: a group of one sample has equal rewards, so all would be dropped; "
            "expected false, or rollout.n of at least 2"
        )
    if options.overlong_buffer > config.rollout.max_response_tokens:
        yield (
            f"algorithm.overlong_buffer: expected at most rollout.max_response_tokens="
            f"{config.rollout.max_response_tokens}, found {options.overlong_buffer}"
        )
    if options.denominators == "trained" and options.overlong != "mask" and training.overdue != "mask":
        yield (
            "algorithm.denominators: owned and trained tokens differ only with algorithm.overlong=mask or "
            "async_training.overdue=mask; expected owned"
        )
    if options.kl_reward_coef and training.overdue == "mask":
        yield (
            "algorithm.kl_reward_coef: a sample would lose the KL of only those tokens that "
            "async_training.overdue=mask has left; expected wait or drop, or algorithm.kl_coef instead"
        )
    yield from _anchor_problems(options, surrogate, corrections, off_policy)
    selected: list[Item] = [advantage, surrogate, *corrections]
    yield from unread(options, selected)
    for item in selected:
        try:
            options.read_by(item)
        except ValidationError as e:
            for error in e.errors(include_url=False):
                if isinstance(cause := error.get("ctx", {}).get("error"), OptionProblems):
                    yield from cause.lines
                    continue
                name = str(error["loc"][0])
                words = expected(error, fields_of(item.options)[name], options.args.get(name, error["input"]))
                yield f"algorithm.args.{name}: {words}"


def _anchor_problems(
    options: AlgorithmConfig, surrogate: Surrogate, corrections: Sequence[Correction], off_policy: bool
) -> Iterator[str]:
    """Stale tokens are corrected once, by the ratio to the anchor or by a weight."""
    anchor = options.anchor
    if surrogate.anchors and anchor not in surrogate.anchors:
        yield f"algorithm.anchor: {options.surrogate} is defined for {' or '.join(surrogate.anchors)}, found {anchor}"
    if len(set(options.corrections)) < len(options.corrections):
        yield f"algorithm.corrections: expected each once, found {', '.join(options.corrections)}"
    weighing = [name for name, item in zip(options.corrections, corrections, strict=True) if item.weighs]
    if len(weighing) > 1:
        yield (
            f"algorithm.corrections: {' and '.join(weighing)} weigh tokens by importance, which corrects twice; "
            "expected one of them"
        )
    if anchor == "behaviour" and weighing:
        yield (
            f"algorithm.corrections: the ratio to algorithm.anchor=behaviour already corrects stale tokens, and "
            f"{weighing[0]} would correct them twice; expected none that weighs, or algorithm.anchor=proximal"
        )
    if anchor != "behaviour" and not corrections and off_policy:
        yield (
            f"algorithm.corrections: with algorithm.anchor={anchor} nothing corrects stale tokens; expected tis, mis "
            "or reject, or algorithm.anchor=behaviour"
        )
    if anchor == "loglinear" and not off_policy:
        yield (
            "algorithm.anchor: loglinear lies between the policies that sampled and train, which here are the same; "
            "expected behaviour or proximal"
        )
