"""Reports vLLM's counters under asyncrl's names, see `asyncrl.rollouter.engine_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import count_prompt, count_speculation


def stat_logger(recorder: Recorder) -> Callable[[VllmConfig, int], StatLoggerBase]:
    """Factory of the stat logger, which vLLM calls after every step of the engine core."""

    def make(config: VllmConfig, engine_index: int = 0) -> StatLoggerBase:
        return _Counters(recorder)

    return make


class _Counters(StatLoggerBase):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        prompt = scheduler_stats.prefix_cache_stats
        if prompt.queries:
            count_prompt(self._recorder, prompt.queries - prompt.hits, prompt.hits)
        if (spec := scheduler_stats.spec_decoding_stats) is None:
            return
        count_speculation(
            self._recorder,
            spec.num_drafts,
            spec.num_accepted_tokens + spec.num_drafts,  # each verification adds one of the target's own
            spec.num_draft_tokens_per_pos,
            spec.num_accepted_tokens_per_pos,
        )

    def log_engine_initialized(self) -> None:
        pass
