"""Observes the run: drains all recorders every two seconds, computes each step's metrics, keeps the summary."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from asyncrl.config.schema import Config
from asyncrl.observability.efficiency import EfficiencyTracker
from asyncrl.observability.run_profile import MAX_GROUPS, MAX_SYNCS, run_profile
from asyncrl.observability.sinks.hub import Hub
from asyncrl.observability.telemetry.clock import ClockOffset, now_s
from asyncrl.observability.telemetry.intervals import Activity, intersect, length
from asyncrl.observability.telemetry.recorder import Batch, Recorder
from asyncrl.observability.trajectories import Decode, sampled_rows
from asyncrl.processes.actor_client import ActorDied, DataLost
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.rollouter.sources import several_sources, source_means
from asyncrl.sample_queue.messages import DROPPED_METRICS, PROMPT_REFUSED, PROMPT_TOO_LONG, SKIPPED
from asyncrl.trainer.progress import Progress
from asyncrl.types.groups import Group

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 2.0  # at least
CHECK_EVERY_S = 1.0
DRAIN_PATIENCE_S = 1.0  # for an answer; a later one is taken in the next round

#: gauges that are metrics of a step, too
_GAUGES = ("rollout/curriculum/",)
#: drop reasons of groups without samples
_NOT_GENERATED = (PROMPT_REFUSED, PROMPT_TOO_LONG, SKIPPED)
#: counters reported as totals since training began, not per step
_TOTALS = (
    "rollout/failed_samples/",
    "rollout/failed_rewards/",
    "rollout/agent/",
    "rollout/recovered_",
    "rollout/restarted_",
    "rollout/cancelled_groups",
    "rollout/refused_groups/",
    "param_sync/refused_connections",
    "supervision/restarts/",
)


class ObservedSystem(Protocol):
    """The parts of a running system that the monitor asks."""

    rank_names: list[str]
    replica_names: list[str]
    queue: Any  # stats()
    ranks: Any  # drawn_groups()

    def pool_resources(self) -> tuple[float, float, str]: ...
    def drains(self) -> Mapping[str, Callable[[], Awaitable[Batch]]]: ...


class Monitor:
    """The training loop's `Observer`. ``run()`` drains spans and counters beside the loop, and calls
    ``on_unresponsive(actor, why)`` for an actor that has not answered for ``supervision.answer_s``."""

    def __init__(
        self,
        config: Config,
        hub: Hub,
        recorder: Recorder,
        system: ObservedSystem,
        decode: Decode,
        on_unresponsive: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._config, self._hub, self._recorder, self._system, self._decode = config, hub, recorder, system, decode
        self._on_unresponsive = on_unresponsive
        self._activity = Activity()
        self._window: Counter[str] = Counter()  # counters since the last step
        self._totals: Counter[str] = Counter()  # and since training began
        self._window_s = now_s()
        self._draining = asyncio.Lock()
        self._drained_s = -math.inf
        self._asked: dict[str, asyncio.Task[Batch]] = {}
        self._replicas: set[str] = set()  # at the last drain
        self._offsets: defaultdict[str, ClockOffset] = defaultdict(ClockOffset)  # of each actor's clock
        self._gauges: dict[str, float] = {}  # the last of each, over all actors
        self._widths: dict[str, float] = {}  # samples that each rollouter lets a replica generate at once
        self.efficiency: EfficiencyTracker | None = None  # from the first version on
        self._syncs: deque[Mapping[str, float]] = deque(maxlen=MAX_SYNCS)  # metrics of the newest
        self._groups: deque[Any] = deque(maxlen=MAX_GROUPS)  # shapes of the newest
        self._profile: dict[str, Any] | None = None
        self._summary: dict[str, Any] = {}
        self._ended = (0.0, 0.0)  # at the last step, see `_ended_groups`

    async def run(self) -> None:
        while True:
            if now_s() - self._drained_s >= DRAIN_EVERY_S:
                await self._queue_stats()
                await self._drain()
            await asyncio.sleep(CHECK_EVERY_S)

    # -- the training loop's observer ------------------------------------------------------------------------------

    async def on_version(self, progress: Progress) -> None:
        """Starts the figures of this driver at its first version, where training begins."""
        if self.efficiency is not None:
            return
        self._ended = _ended_groups(await self._queue_stats())
        self.efficiency = EfficiencyTracker(*self._system.pool_resources())
        await self._drain()
        self._window_s = now_s()
        self._window.clear()
        self._totals.clear()

    def on_validation(self, progress: Progress, metrics: Mapping[str, float], when: str | None) -> None:
        """``when``: "before" or "after" training, whose results go to the summary, too."""
        self._hub.metrics(progress.step, metrics)
        if when:
            self._summary |= {f"{k.removeprefix('validation/')}_{when}": v for k, v in metrics.items()}

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> dict[str, float]:
        if k := self._config.reporting.trajectories_per_step:
            groups = [Group.from_buffer(b) for b in await self._system.ranks.drawn_groups()]
            self._hub.trajectories(sampled_rows(progress.step, groups, self._decode, k))
        window = await self._window_metrics()
        if self.efficiency is not None:
            trainer, rollout, _ = self._system.pool_resources()
            self.efficiency.resize(trainer, rollout)
        queue = await self._queue_stats()
        values = dict(metrics) | window | self._efficiency_metrics(metrics, window, queue) | queue
        if (paused_s := metrics.get("param_sync/paused_total_s")) is not None:
            self._syncs.append({name: v for name, v in metrics.items() if name.startswith("param_sync/")})
            generating_s = len(self._system.replica_names) * values["perf/step_s"] - paused_s
            rate = values["perf/rollout_tokens_per_s"] * values["perf/step_s"] / max(generating_s, 1e-9)
            values["param_sync/tokens_not_generated"] = rate * paused_s
        values["perf/trainer_tokens_per_s"] = metrics.get("trainer/tokens", 0.0) / values["perf/step_s"]
        values["fully_async/version"] = progress.version.number
        self._hub.metrics(progress.step, values)
        self._summary["steps"] = progress.step
        return values

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None:
        counts = {k.removeprefix("fully_async/"): v for k, v in queue.items() if k.startswith("fully_async/count/")}
        dropped = {k.removeprefix("fully_async/"): v for k, v in queue.items() if k.startswith(DROPPED_METRICS)}
        perf = {k: v for k, v in queue.items() if k.startswith("perf/")}
        self._summary |= {"version": str(progress.version), **counts, **dropped, **perf}
        self._summary |= self.efficiency.figures() if self.efficiency else {}
        self._profile = run_profile(
            self._totals, list(self._syncs), self._groups, queue.get("perf/ledger_write_s", math.nan), self._config
        )
        if advice := self._summary.get("advice"):
            log.info("efficiency: %.0f %% of the ideal; %s", 100 * self._summary["fraction_of_ideal"], advice)

    def summary(self) -> dict[str, Any]:
        """Figures of the run beside those in its metrics; those of its efficiency are of this driver."""
        return dict(self._summary)

    def profile(self) -> dict[str, Any] | None:
        """The run's, see `asyncrl.simulation.profile`; None before its end."""
        return self._profile

    # -- windows of time -------------------------------------------------------------------------------------------

    def _both_busy_within(self, since_s: float, until_s: float) -> float:
        """Seconds of the window in which the trainer computes while at least half of the rollouter's slots generate.

        A lower bound with several replicas: half of the slots of each must generate, which implies half of all slots.
        Ranks compute together, so any rank's step counts."""
        both = self._activity.intervals(["trainer/step"], since_s, until_s)
        for replica in self._system.replica_names:
            both = intersect(both, self._activity.intervals(["rollout/half_busy"], since_s, until_s, replica))
        return length(both)

    async def _window_metrics(self) -> dict[str, float]:
        """Idle shares, rates and rollout metrics since the last step, whose spans are forgotten with this call."""
        since, until = self._window_s, now_s()
        await self._drain()  # after the window's end: what is under way then covers it
        counters, self._window, self._window_s = self._window, Counter(), until
        seconds = max(until - since, 1e-9)
        busy = self._activity.share
        values = {
            "perf/step_s": seconds,
            "rollout/samples": counters["rollout/samples"],
            "perf/rollout_tokens_per_s": counters["rollout/tokens"] / seconds,
            "fully_async/trainer/idle_ratio": 1 - busy(["trainer/step"], since, until, self._system.rank_names),
            "fully_async/rollouter/idle_ratio": 1
            - busy(["rollout/generate"], since, until, self._system.replica_names),
            "fully_async/overlap": self._both_busy_within(since, until) / seconds,
            "fully_async/rewarding_ratio": busy(["rollout/reward"], since, until),
        }
        self._activity.forget(until)
        if samples := counters["rollout/samples"]:
            sums = {k.removeprefix("rollout/sum/"): v for k, v in counters.items() if k.startswith("rollout/sum/")}
            values |= {f"rollout/{name}": total / samples for name, total in sums.items()}
        if groups := counters["rollout/groups"]:
            values["rollout/zero_variance"] = counters["rollout/zero_variance_groups"] / groups
        if several_sources(self._totals):
            values |= source_means(counters)
        values |= engine_metrics(counters)
        values |= {k: v for k, v in self._gauges.items() if k.startswith(_GAUGES)}
        return values | {k: v for k, v in self._totals.items() if k.startswith(_TOTALS)}

    def _efficiency_metrics(
        self, metrics: Mapping[str, float], window: Mapping[str, float], queue: Mapping[str, float]
    ) -> dict[str, float]:
        """Step time relative to the ideal, see `asyncrl.observability.efficiency`."""
        if self.efficiency is None:
            return {}
        seconds = window["perf/step_s"]
        (ended_before, dropped_before), self._ended = self._ended, _ended_groups(queue)
        ended, dropped = self._ended
        return self.efficiency.step(
            seconds,
            trained=metrics.get("trainer/trained_tokens", 0.0),
            training_s=(1 - window["fully_async/trainer/idle_ratio"]) * seconds,
            generated=window["perf/rollout_tokens_per_s"] * seconds,
            generating_s=(1 - window["fully_async/rollouter/idle_ratio"]) * seconds,
            rewarding_s=window["fully_async/rewarding_ratio"] * seconds,
            unthrottled=min(self._widths.values(), default=math.inf) >= self._config.rollout.engine.slots,
            ended=max(0.0, ended - ended_before),  # fewer after a death of the queue
            dropped=max(0.0, dropped - dropped_before),
        )

    async def _queue_stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self._system.queue.stats()
        for name, value in stats.items():
            if name in ("fully_async/queue/depth", "fully_async/in_flight") or name.startswith(DROPPED_METRICS):
                self._recorder.gauge(name, value)
        return stats

    async def _drain(self) -> None:
        """Collect every actor's records; an unresponsive actor delays neither the others nor the caller."""
        async with self._draining:
            self._drained_s = now_s()
            for name, drain in self._system.drains().items():
                if name not in self._asked:
                    self._asked[name] = asyncio.create_task(self._answer(name, drain))
            if self._asked:  # else all are being restarted
                await asyncio.wait(self._asked.values(), timeout=DRAIN_PATIENCE_S)
            answered = [name for name, asked in self._asked.items() if asked.done()]
            for batch in [*(self._asked.pop(name).result() for name in answered), self._recorder.drain()]:
                self._activity.add(batch)
                self._window.update(batch.counters)
                self._totals.update(batch.counters)
                self._gauges |= batch.gauges
                if (width := batch.gauges.get("rollout/width")) is not None:
                    self._widths[batch.actor] = width
                self._groups += batch.profiled
                self._hub.spans(batch)
            left = self._replicas.difference(self._system.replica_names, self._asked)  # after its last answer
            for name in left:
                self._hub.left(name)
            self._replicas = (self._replicas - left) | set(self._system.replica_names)

    async def _answer(self, name: str, drain: Callable[[], Awaitable[Batch]]) -> Batch:
        """An actor's records, with times of this process's clock; an empty batch, at 0, if it died, which its
        supervisor notices, or is unresponsive, or its machine is gone with them."""
        limit_s, sent_s = self._config.supervision.answer_s, now_s()
        try:
            batch = await asyncio.wait_for(drain(), limit_s)
            offset_s = self._offsets[name].observe(sent_s, batch.at_s, now_s())
            return batch.shifted(offset_s) if offset_s else batch
        except TimeoutError:
            await self._on_unresponsive(name, f"has not answered for {limit_s:g} s: its process is stopped or stuck")
        except (ActorDied, DataLost):
            pass
        return Batch(name)


def _ended_groups(queue: Mapping[str, float]) -> tuple[float, float]:
    """Groups that the queue has accepted or dropped so far, and the dropped ones, without those that nobody
    generated."""
    accepted = sum(queue[f"fully_async/count/{state}"] for state in ("queued", "leased", "trained"))
    dropped = queue["fully_async/count/dropped"]
    dropped -= sum(queue.get(f"{DROPPED_METRICS}{reason}", 0.0) for reason in _NOT_GENERATED)
    return accepted + dropped, dropped
