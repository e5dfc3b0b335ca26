"""Rates of speculative decoding from the engines' counters, of whatever replicas and time they were summed over."""

from __future__ import annotations

from collections.abc import Mapping

BARREN_TOKENS = 1000  # drafted without one accepted: the draft does not belong to these weights


def spec_metrics(counters: Mapping[str, float]) -> dict[str, float]:
    """Of ``rollout/spec/verifications``, ``…/tokens``, ``…/drafted/<place>`` and ``…/accepted/<place>``, places counted
    from 1: accepted ÷ drafted tokens, in all and by place, tokens per verification, and the alarm: 1 where of
    `BARREN_TOKENS` or more none was accepted. Empty where nothing was drafted.
    """
    verifications = counters.get("rollout/spec/verifications", 0.0)
    if not verifications:
        return {}
    values = {"rollout/spec_accept_length": counters.get("rollout/spec/tokens", 0.0) / verifications}
    prefix = "rollout/spec/drafted/"
    drafted = {key.removeprefix(prefix): n for key, n in counters.items() if key.startswith(prefix) and n}
    accepted = {place: counters.get(f"rollout/spec/accepted/{place}", 0.0) for place in drafted}
    values |= {f"rollout/spec_accept_rate_{place}": accepted[place] / n for place, n in drafted.items()}
    if drafted:
        values["rollout/spec_accept_rate"] = sum(accepted.values()) / sum(drafted.values())
        barren = sum(drafted.values()) >= BARREN_TOKENS and not any(accepted.values())
        values["rollout/spec_zero_acceptance"] = float(barren)
    return values
