"""Rates of speculative decoding and of prefix reuse from the engines' counters, summed over any replicas and time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.observability.telemetry.recorder import Recorder

ZERO_ACCEPTANCE_TOKENS = 1000  # drafted and none accepted: the draft does not match these weights


def count_speculation(
    recorder: Recorder, verifications: int, tokens: int, drafted: Iterable[int], accepted: Iterable[int]
) -> None:
    """Record the counters that `engine_metrics` reads. ``drafted``, ``accepted``: tokens by draft position."""
    if not verifications:
        return
    recorder.count("rollout/spec/verifications", verifications)
    recorder.count("rollout/spec/tokens", tokens)
    for kind, counts in (("drafted", drafted), ("accepted", accepted)):
        for position, n in enumerate(counts, 1):
            recorder.count(f"rollout/spec/{kind}/{position}", n)


def count_prompt(recorder: Recorder, prefilled: int, reused: int) -> None:
    """Count tokens that requests started from: those whose KV was computed, and those whose KV the engine had."""
    recorder.count("rollout/prompt/prefilled", prefilled)
    recorder.count("rollout/prompt/reused", reused)


def engine_metrics(counters: Mapping[str, float]) -> dict[str, float]:
    """Share of prompt tokens that were not prefilled again; acceptance rates in all and by draft position, accepted
    tokens per verification, and the zero-acceptance alarm.

    Reads ``rollout/prompt/prefilled`` and ``…/reused``; ``rollout/spec/verifications``, ``…/tokens``,
    ``…/drafted/<position>`` and ``…/accepted/<position>``, with positions from 1. The alarm is 1 if none of
    `ZERO_ACCEPTANCE_TOKENS` or more drafted tokens was accepted, else 0. Without a count there is no rate of it."""
    values: dict[str, float] = {}
    reused = counters.get("rollout/prompt/reused", 0.0)
    if prompt := counters.get("rollout/prompt/prefilled", 0.0) + reused:
        values["rollout/prefix_reuse"] = reused / prompt
    verifications = counters.get("rollout/spec/verifications", 0.0)
    if not verifications:
        return values
    values["rollout/spec_accept_length"] = counters.get("rollout/spec/tokens", 0.0) / verifications
    prefix = "rollout/spec/drafted/"
    drafted = {key.removeprefix(prefix): n for key, n in counters.items() if key.startswith(prefix) and n}
    accepted = {position: counters.get(f"rollout/spec/accepted/{position}", 0.0) for position in drafted}
    values |= {f"rollout/spec_accept_rate_{position}": accepted[position] / n for position, n in drafted.items()}
    if drafted:
        values["rollout/spec_accept_rate"] = sum(accepted.values()) / sum(drafted.values())
        zero_acceptance = sum(drafted.values()) >= ZERO_ACCEPTANCE_TOKENS and not any(accepted.values())
        values["rollout/spec_zero_acceptance"] = float(zero_acceptance)
    return values
