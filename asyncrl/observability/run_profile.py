"""The profile of a run: the figures of its parts, from which `asyncrl simulate` predicts other runs. A JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.checks import derive
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.measured import ENGINE, REPORTS, REWARDS, STAGES, TRAINER

FILE = "profile.json"
MAX_GROUPS = 512  # in a profile; the newest
MAX_SYNCS = 1024  # that count for it; the newest
_PHASES = ("plan", "pause", "unload", "load", "verify", "commit", "reload", "resume")


def run_profile(
    counters: Mapping[str, float],
    syncs: Sequence[Mapping[str, float]],
    groups: Sequence[Any],
    flush_s: float,
    config: Config,
) -> dict[str, Any]:
    """The JSON object of a profile, without what was not measured.

    ``counters``: totals of the run; ``syncs``: metrics of its sessions; ``groups``: shapes of the newest ones;
    ``flush_s``: of the journal, NaN if unknown."""
    engine = {**ENGINE.coefficients(counters), **_mean(counters, REPORTS, "report_s")}
    trainer = {"ranks": config.trainer.ranks, **TRAINER.coefficients(counters), **_mean(counters, STAGES, "stage_s")}
    found = {"engine": engine, "trainer": trainer, "sync": _sync(syncs, config), **_mean(counters, REWARDS, "reward_s")}
    if math.isfinite(flush_s):
        found["flush_s"] = flush_s
    about = {
        "name": config.name,
        "engine": config.rollout.engine.name,
        "backend": config.trainer.backend,
        "replicas": config.rollout.replicas,
        "slots": config.rollout.engine.slots,
        "staleness_threshold": config.async_training.staleness_threshold,
        "not_told_apart": [
            f"{part}.{term}"
            for part, fit in (("engine", ENGINE), ("trainer", TRAINER))
            for term in fit.not_told_apart(counters)
        ],
    }
    return {**found, "about": about, "groups": list(groups)}


def profiled_groups(path: Path) -> int:
    """Number of groups in a profile; 0 if there is none, or none that can be read."""
    try:
        return len(json.loads(path.read_bytes())["groups"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _mean(counters: Mapping[str, float], name: str, figure: str) -> dict[str, float]:
    count = counters.get(f"{name}/count", 0.0)
    return {figure: counters.get(f"{name}/s", 0.0) / count} if count else {}


def _sync(syncs: Sequence[Mapping[str, float]], config: Config) -> dict[str, float]:
    """Of the session of median length; the first one does not count, because its processes are cold."""
    counted = sorted(syncs[1:] or syncs, key=lambda metrics: metrics["param_sync/total_s"])
    if not counted:
        return {}
    median = counted[len(counted) // 2]
    phases = {f"{p}_s": median[f"param_sync/{p}_s"] for p in _PHASES if f"param_sync/{p}_s" in median}
    if derive(config).pause == "wait":  # it was the wait for running samples; a simulation waits for its own
        phases["pause_s"] = 0.0
    nbytes, seconds = median["param_sync/bytes"], median["param_sync/transfer_s"]
    return {"nbytes": nbytes, "bytes_per_s": nbytes / max(seconds, 1e-9), **phases}
