"""SGLang's counters of speculative decoding under our names, see `asyncrl.rollouter.spec_metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.observability.telemetry.recorder import Recorder


def count_speculation(recorder: Recorder, meta: Mapping[str, Any]) -> None:
    """Count one finished request. SGLang reports how many verifications accepted how many drafted tokens, and drafts
    the same number for each."""
    verifications = meta.get("spec_verify_ct", 0)
    if not verifications:
        return
    recorder.count("rollout/spec/verifications", verifications)
    recorder.count("rollout/spec/tokens", meta["completion_tokens"])
    drafted = round(meta["spec_num_proposed_drafts"] / verifications)
    accepting = meta.get("spec_correct_drafts_histogram") or []  # [n]: verifications that accepted n drafted tokens
    for place in range(1, drafted + 1):
        recorder.count(f"rollout/spec/drafted/{place}", verifications)
        recorder.count(f"rollout/spec/accepted/{place}", sum(accepting[place:]))
