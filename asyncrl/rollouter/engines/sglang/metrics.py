"""Reports SGLang's counters under asyncrl's names, see `asyncrl.rollouter.engine_metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import count_prompt, count_speculation


def count_finished(recorder: Recorder, meta: Mapping[str, Any]) -> None:
    """Count one finished request. SGLang drafts the same number of tokens for every verification and reports a
    histogram of how many were accepted."""
    cached = meta.get("cached_tokens", 0)
    count_prompt(recorder, meta.get("prompt_tokens", 0) - cached, cached)
    verifications = meta.get("spec_verify_ct", 0)
    if not verifications:
        return
    drafted = round(meta["spec_num_proposed_drafts"] / verifications)
    accepting = meta.get("spec_correct_drafts_histogram") or []  # [n]: verifications that accepted n drafted tokens
    accepted = [sum(accepting[position:]) for position in range(1, drafted + 1)]
    count_speculation(recorder, verifications, meta["completion_tokens"], [verifications] * drafted, accepted)
