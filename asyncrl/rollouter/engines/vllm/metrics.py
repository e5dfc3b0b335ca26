"""vLLM's counters of speculative decoding under our names, see `asyncrl.rollouter.spec_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from asyncrl.observability.telemetry.recorder import Recorder


def stat_logger(recorder: Recorder) -> Callable[[VllmConfig, int], StatLoggerBase]:
    """Factory of the stat logger, which vLLM calls after every step of the engine core."""

    def make(config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        return _SpeculationCounters(recorder)

    return make


class _SpeculationCounters(StatLoggerBase):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None or (spec := scheduler_stats.spec_decoding_stats) is None or not spec.num_drafts:
            return
        count = self._recorder.count
        count("rollout/spec/verifications", spec.num_drafts)
        count("rollout/spec/tokens", spec.num_accepted_tokens + spec.num_drafts)  # and one of the target's own each
        for place, accepted in enumerate(spec.num_accepted_tokens_per_pos, 1):
            count(f"rollout/spec/accepted/{place}", accepted)
        for place, drafted in enumerate(spec.num_draft_tokens_per_pos, 1):
            count(f"rollout/spec/drafted/{place}", drafted)

    def log_engine_initialized(self) -> None:
        pass
