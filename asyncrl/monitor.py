"""Watches the run: drains all recorders every two seconds, makes a step's metrics, validates, keeps the summary."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from asyncrl.config.schema import Config
from asyncrl.ray_client import ActorDied
from asyncrl.reporting.hub import Hub
from asyncrl.reporting.trajectories import Decode, sampled_rows
from asyncrl.rollouter.spec_metrics import spec_metrics
from asyncrl.sample import Group
from asyncrl.speed import SpeedAccount
from asyncrl.telemetry.intervals import Activity, intersect, length
from asyncrl.telemetry.recorder import Batch, Recorder, now_s
from asyncrl.trainer.loop import Progress

log = logging.getLogger(__name__)

DRAIN_EVERY_S = 2.0  # at least
LOOK_EVERY_S = 1.0
DRAIN_PATIENCE_S = 1.0  # for an answer; a later one is taken with the next round


#: counters that are shown as they stand since training began, not by step
_TOTALS = (
    "rollout/failed_samples/",
    "rollout/recovered_",
    "rollout/restarted_samples",
    "rollout/cancelled_groups",
    "supervision/restarts/",
)


class Watched(Protocol):
    """The parts of a running system that the monitor asks."""

    rank_names: list[str]
    replica_names: list[str]
    queue: Any  # stats()
    rollouter: Any  # validate()
    ranks: Any  # first_groups(count)

    def pool_resources(self) -> tuple[float, float, str]: ...
    def drains(self) -> Mapping[str, Callable[[], Awaitable[Batch]]]: ...
    async def end(self, name: str, why: str) -> None: ...


class Monitor:
    """The training loop's `Hooks`. ``run()`` beside the loop keeps spans and counters coming."""

    def __init__(self, config: Config, hub: Hub, own: Recorder, watched: Watched, decode: Decode) -> None:
        self._config, self._hub, self._own, self._watched, self._decode = config, hub, own, watched, decode
        self._activity = Activity()
        self._window: Counter[str] = Counter()  # counters since the last step
        self._totals: Counter[str] = Counter()  # and of all training
        self._began_s = self._window_s = now_s()
        self._draining = asyncio.Lock()
        self._drained_s = -math.inf
        self._asked: dict[str, asyncio.Task[Batch]] = {}
        self._validation: asyncio.Task[dict[str, float]] | None = None
        self._training = False  # the first version is out
        self._newest: dict[str, float] = {}
        self._gauges: dict[str, float] = {}  # of the actors, the last of each
        self._speed: SpeedAccount | None = None  # of training, once it has begun
        self._summary: dict[str, Any] = {}

    async def run(self) -> None:
        while True:
            if now_s() - self._drained_s >= DRAIN_EVERY_S:
                await self._queue_stats()
                await self._drain()
            if self._validation is not None and self._validation.done():
                self._validation.result()  # a failure ends the run
                self._validation = None
            await asyncio.sleep(LOOK_EVERY_S)

    # -- the training loop's hooks ---------------------------------------------------------------------------------

    async def before_sync(self, progress: Progress) -> None:
        """A validation is answered under one version: the next one waits for it."""
        if self._validation is not None:
            with self._own.span("validation/holds_sync"):
                await asyncio.wait([self._validation])  # it goes on if this is given up

    async def on_restore(self, progress: Progress) -> None:
        """Groups in flight wait for their places in the new lineage; what they have is kept."""
        await self._watched.rollouter.reset()

    def newest(self, metric: str) -> float | None:
        return self._newest.get(metric)

    async def on_version(self, progress: Progress) -> None:
        """Validate where the config asks for it: before and after training while it waits, between beside it."""
        first, last = not self._training, progress.last
        self._training = True
        every = self._config.validation.every_versions
        due = bool(every) and progress.version.number % every == 0
        if self._config.data.validation_files and (first or last or due):
            if first or last:
                values = await self._validate(progress.step)
                name = "after" if last else "before"
                self._summary |= {f"{k.removeprefix('validation/')}_{name}": v for k, v in values.items()}
            else:
                self._validation = asyncio.create_task(self._validate(progress.step))
        if first:
            self._speed = SpeedAccount(*self._watched.pool_resources())
            await self._drain()
            self._began_s = self._window_s = now_s()
            self._window.clear()
            self._totals.clear()

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> None:
        if k := self._config.reporting.trajectories_per_step:
            groups = [Group.from_buffer(b) for b in await self._watched.ranks.first_groups(k)]
            self._hub.trajectories(sampled_rows(progress.step, groups, self._decode, k))
        window = await self._window_metrics()
        values = dict(metrics) | window | self._accounted(metrics, window) | await self._queue_stats()
        if (paused_s := metrics.get("param_sync/paused_total_s")) is not None:
            generating_s = len(self._watched.replica_names) * values["perf/step_s"] - paused_s
            rate = values["perf/rollout_tokens_per_s"] * values["perf/step_s"] / max(generating_s, 1e-9)
            values["param_sync/tokens_not_generated"] = rate * paused_s
        values["perf/trainer_tokens_per_s"] = metrics.get("trainer/tokens", 0.0) / values["perf/step_s"]
        values["fully_async/version"] = progress.version.number
        self._hub.metrics(progress.step, values)
        self._newest |= values
        self._summary |= {
            "steps": progress.step,
            "duration_s": self._window_s - self._began_s,
            "overlap": self.overlap(self._began_s, self._window_s),
            "samples": self._totals["rollout/samples"],
            "tokens": self._totals["rollout/tokens"],
        }

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None:
        counts = {k.removeprefix("fully_async/"): v for k, v in queue.items() if k.startswith("fully_async/count/")}
        dropped = {k.removeprefix("fully_async/"): v for k, v in queue.items() if k.startswith("fully_async/dropped/")}
        perf = {k: v for k, v in queue.items() if k.startswith("perf/")}
        self._summary |= {"version": str(progress.version), **counts, **dropped, **perf}
        self._summary |= self._speed.figures() if self._speed else {}
        if advice := self._summary.get("advice"):
            log.info("speed: %.0f %% of the ideal; %s", 100 * self._summary["fraction_of_ideal"], advice)

    def summary(self) -> dict[str, Any]:
        """Figures of the whole run; ``duration_s`` and ``overlap`` are of training, without start-up and validation."""
        return dict(self._summary)

    # -- windows of time -------------------------------------------------------------------------------------------

    def overlap(self, since_s: float, until_s: float) -> float:
        """Share of the window in which the trainer computes while at least half of the rollouter's slots generate.

        Of several replicas each must have half of its slots generating: then half of all slots are, and sometimes also
        when it is not so. Ranks compute together: any stands for all."""
        both = self._activity.intervals(["trainer/step"], since_s, until_s)
        for replica in self._watched.replica_names:
            both = intersect(both, self._activity.intervals(["rollout/half_busy"], since_s, until_s, replica))
        return length(both) / (until_s - since_s) if until_s > since_s else 0.0

    async def _window_metrics(self) -> dict[str, float]:
        """Idle shares, rates and rollout figures of the time since the last step."""
        await self._drain()
        since, until = self._window_s, now_s()
        counters, self._window, self._window_s = self._window, Counter(), until
        seconds = max(until - since, 1e-9)
        busy = self._activity.share
        values = {
            "perf/step_s": seconds,
            "perf/rollout_tokens_per_s": counters["rollout/tokens"] / seconds,
            "fully_async/trainer/idle_ratio": 1 - busy(["trainer/step"], since, until, self._watched.rank_names),
            "fully_async/rollouter/idle_ratio": 1
            - busy(["rollout/generate"], since, until, self._watched.replica_names),
            "fully_async/overlap": self.overlap(since, until),
        }
        if samples := counters["rollout/samples"]:
            sums = {k.removeprefix("rollout/sum/"): v for k, v in counters.items() if k.startswith("rollout/sum/")}
            values |= {f"rollout/{name}": total / samples for name, total in sums.items()}
        if groups := counters["rollout/groups"]:
            values["rollout/zero_variance"] = counters["rollout/zero_variance_groups"] / groups
        values |= spec_metrics(counters)
        return values | {k: v for k, v in self._totals.items() if k.startswith(_TOTALS)}

    def _accounted(self, metrics: Mapping[str, float], window: Mapping[str, float]) -> dict[str, float]:
        """What the step took beside the ideal, see `asyncrl.speed`."""
        if self._speed is None:
            return {}
        seconds = window["perf/step_s"]
        return self._speed.step(
            seconds,
            trained=metrics.get("trainer/trained_tokens", 0.0),
            training_s=(1 - window["fully_async/trainer/idle_ratio"]) * seconds,
            generated=window["perf/rollout_tokens_per_s"] * seconds,
            generating_s=(1 - window["fully_async/rollouter/idle_ratio"]) * seconds,
            full_width=self._gauges.get("rollout/width", math.inf) >= self._config.rollout.engine.slots,
        )

    async def _queue_stats(self) -> dict[str, float]:
        stats: dict[str, float] = await self._watched.queue.stats()
        for name in ("fully_async/queue/depth", "fully_async/in_flight"):
            self._own.gauge(name, stats[name])
        return stats

    async def _drain(self) -> None:
        """Take what every actor recorded; one that does not answer holds up neither the others nor the caller."""
        async with self._draining:
            self._drained_s = now_s()
            for name, drain in self._watched.drains().items():
                if name not in self._asked:
                    self._asked[name] = asyncio.create_task(self._answer(name, drain()))
            if self._asked:  # else all are being started again
                await asyncio.wait(self._asked.values(), timeout=DRAIN_PATIENCE_S)
            answered = [name for name, asked in self._asked.items() if asked.done()]
            for batch in [*(self._asked.pop(name).result() for name in answered), self._own.drain()]:
                self._activity.add(batch)
                self._window.update(batch.counters)
                self._totals.update(batch.counters)
                self._gauges |= batch.gauges
                self._hub.spans(batch)

    async def _validate(self, step: int) -> dict[str, float]:
        values = await self._watched.rollouter.validate()
        self._hub.metrics(step, values)
        self._newest |= values
        return values

    async def _answer(self, name: str, drain: Awaitable[Batch]) -> Batch:
        """What the actor recorded: nothing, if it died, which is for its supervisor; one that hangs is ended."""
        limit_s = self._config.supervision.answer_s
        try:
            return await asyncio.wait_for(drain, limit_s)
        except TimeoutError:
            await self._watched.end(name, f"has not answered for {limit_s:g} s: its process is stopped or stuck")
        except ActorDied:
            pass
        return Batch(name)
