"""Runs a configuration in virtual time, and says how fast it was and what it waited for."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl.config.algorithm_checks import problems as algorithm_problems
from asyncrl.config.checks import constraints, derive
from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.efficiency import EfficiencyTracker
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.coordinator import ParameterSyncCoordinator
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.session_protocol import ReplicaSession
from asyncrl.processes.actor_client import first_leaf
from asyncrl.processes.tasks import together
from asyncrl.rollouter.drops import NothingToTrain
from asyncrl.run.rollouters import Rollouters, shard_of
from asyncrl.run.supervision import DiedTooOften, RestartPolicy, Supervisor
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.simulation.deaths import Deaths, MortalCluster
from asyncrl.simulation.engine import SimulatedEngine, SimulatedReceiver
from asyncrl.simulation.profile import Profile
from asyncrl.simulation.ranks import SimulatedRanks
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.simulation.rollouter import SimulatedRollouter
from asyncrl.simulation.virtual_loop import Stuck, run_virtually
from asyncrl.simulation.workload import VOCABULARY
from asyncrl.trainer.checkpoints import CheckpointStore
from asyncrl.trainer.loop import TrainLoop
from asyncrl.trainer.progress import Progress

_STUCK_S = 86400.0  # without any work
_WARM_UP = 2  # steps that no figure counts: they begin with empty pools


@dataclass(frozen=True)
class Step:
    """A finished step. Totals since the start: ``at_s``, seconds of each pool's work (the mean over its members), and
    tokens generated. ``metrics``: of the step, as a run reports them. ``cpu_s``: CPU time of this process so far."""

    at_s: float
    trainer_busy_s: float
    rollout_busy_s: float
    generated: int
    metrics: Mapping[str, float]
    cpu_s: float


@dataclass(frozen=True)
class Simulation:
    """A simulated run. ``counters`` and ``groups``: what `asyncrl.observability.run_profile` makes a profile of."""

    config: Config
    steps: tuple[Step, ...]
    counters: Mapping[str, float]
    groups: Sequence[Any]
    samples_per_step: int
    deaths: int  # of replicas

    def figures(self) -> dict[str, float]:
        """Means over the steps after the first ones. ``step_s``: seconds of a step; the idle ratios: shares of the time
        in which a pool had no work; ``ideal_step_s``: a step of pools that never wait, and ``fraction_of_ideal``."""
        counted, seconds = self._counted, self._passed("at_s")
        mean = lambda name: statistics.fmean([step.metrics[name] for step in counted if name in step.metrics] or [0.0])
        trainer, rollout = self._passed("trainer_busy_s") / seconds, self._passed("rollout_busy_s") / seconds
        step_s, busy = seconds / len(counted), max(trainer, rollout)
        return {
            "step_s": step_s,
            "samples_per_s": self.samples_per_step / step_s,
            "tokens_per_s": self._passed("generated") / seconds,
            "trainer_idle": 1 - trainer,
            "rollouter_idle": 1 - rollout,
            "ideal_step_s": busy * step_s,
            "fraction_of_ideal": busy,
            "staleness_mean": mean("fully_async/staleness/mean"),
            "queue_depth": mean("fully_async/queue/depth"),
            "sync_s": mean("param_sync/total_s"),
            "deaths": self.deaths,
        }

    def advice(self) -> str:
        """What binds, in one line."""
        trainer, rollout = self.config.trainer, self.config.rollout
        pools = EfficiencyTracker(trainer.ranks, rollout.replicas, "actor")
        tokens = self._passed("generated")
        known = pools.step(
            self._passed("at_s"),
            tokens,
            self._passed("trainer_busy_s"),
            tokens,
            self._passed("rollout_busy_s"),
            0,
            True,
        )
        return pools.advice() if known else "nothing was generated during the steps that count: simulate more steps"

    @property
    def _counted(self) -> Sequence[Step]:
        return self.steps[self._before + 1 :]

    @property
    def _before(self) -> int:
        """Index of the step after which steps count."""
        return min(_WARM_UP, len(self.steps) - 1) - 1

    def _passed(self, total: str) -> float:
        """How much a total has grown over the steps that count."""
        return getattr(self.steps[-1], total) - getattr(self.steps[self._before], total)


def simulate(
    config: Config,
    profile: Profile,
    engine: type[SimulatedEngine] = SimulatedEngine,
    ranks: type[SimulatedRanks] = SimulatedRanks,
    cpu_s: Callable[[], float] = time.process_time,
    deaths: Deaths | None = None,
    prompts: int = 8192,
    goes_on: bool = False,
) -> Simulation:
    """Train ``trainer.total_steps`` steps of ``config`` in virtual time. Equal arguments give an equal run. ``cpu_s``:
    the clock of `Step.cpu_s`; ``deaths``: of replicas; ``prompts``: of each of endless epochs. ``goes_on``: the steps
    are the first ones of a longer run, so that figures do not contain the end of generation.

    Validation, agents' processes, sandboxes and reward workers are left out: agents wait, and rewards take, as long as
    the profile says. Raises ConfigError for options that contradict each other, and if all groups would be dropped, a
    replica dies too often or, without ``deaths``, would be restarted, or the run would wait for ever; and the errors of
    the control plane."""
    if problems := [*constraints(config), *algorithm_problems(config)]:
        raise ConfigError(problems)
    if config.trainer.total_steps < 3:
        raise ValueError(f"trainer.total_steps: expected at least 3 to simulate, found {config.trainer.total_steps}")
    profile.check(
        parts=len(derive(config).parts) > 1,
        checkpoints=bool(config.checkpoint.every_steps),
        staged=config.param_sync.staging == "full",
    )
    with tempfile.TemporaryDirectory(prefix="asyncrl-simulation-") as folder:
        try:
            seen = run_virtually(
                lambda: _run(config, profile, engine, ranks, cpu_s, Path(folder), deaths, prompts, goes_on)
            )
        except Exception as e:
            if isinstance(leaf := first_leaf(e), NothingToTrain):
                raise ConfigError([f"with the rewards of the profile nothing would be trained: {leaf}"]) from None
            if isinstance(leaf, DiedTooOften | Stuck):
                raise ConfigError([f"the run would fail: {leaf}"]) from None
            if isinstance(leaf, _WouldRestart):
                hint = "--death-every-h and --restart-s simulate restarts"
                raise ConfigError([f"the run would restart {leaf}; {hint}"]) from None
            raise
    samples = derive(config).groups_per_step * config.rollout.n
    return Simulation(config, tuple(seen.steps), seen.counters, seen.groups, samples, seen.deaths)


async def _run(
    config: Config,
    profile: Profile,
    make_engine: type[SimulatedEngine],
    make_ranks: type[SimulatedRanks],
    cpu_s: Callable[[], float],
    folder: Path,
    deaths: Deaths | None,
    count: int,
    goes_on: bool,
) -> _Observer:
    derived, recorder, rollout = derive(config), Recorder("simulation"), config.rollout
    admission = Admission(derived.groups_per_version, derived.staleness_threshold, derived.total_groups)
    options = config.async_training
    queue = SampleQueue(
        admission,
        InMemoryRecords(profile.flush_s),
        options.queue_policy,
        options.overdue,
        vocab_size=VOCABULARY,
        max_attempts=rollout.max_attempts,
        shards=rollout.shards,
    )
    engines = {f"replica/{i}": make_engine(profile, rollout.engine.slots) for i in range(rollout.replicas)}
    of_shard = lambda shard: {name: e for name, e in engines.items() if shard_of(name, rollout) == shard}
    shards = [
        SimulatedRollouter(config, profile, shard, of_shard(shard), queue, count, recorder)
        for shard in range(rollout.shards)
    ]
    rollouters = Rollouters(shards, rollout)
    sessions: dict[str, ReplicaSession] = {}
    cluster: MortalCluster | None = None
    if deaths is None:
        for name, engine in engines.items():
            sessions[name] = EngineSession(name, engine, SimulatedReceiver(name, profile.sync))
    else:  # replicas join as they start
        cluster = MortalCluster(deaths, config.seed, profile, engines, rollouters)
    ranks = make_ranks(profile, config.trainer.ranks, recorder)
    sync = ParameterSyncCoordinator(
        replace(config.param_sync, pause=derived.pause),
        {"trainer/0": ranks},
        sessions,
        rollouters.set_routable,
        recorder,
        _would_restart if cluster is None else cluster.end,
        rollouters.strands,
    )
    observer = _Observer(ranks, engines, queue, recorder, cpu_s)
    trainer = TrainLoop(
        config,
        derived,
        queue,  # type: ignore[arg-type]  # its journal is never copied to another disk
        ranks,
        sync,
        _Rollouter(),
        _NoValidation(),
        observer,
        recorder,
        CheckpointStore(folder, config.checkpoint),
    )
    begun = asyncio.Event()

    async def train() -> None:
        if cluster is not None:
            await supervisor.started()
        await trainer.begin(None)
        if goes_on:  # groups of later steps start, too
            later = (derived.staleness_bound + 1) * derived.groups_per_version
            await queue.rollback(0, derived.total_groups + later)
        begun.set()
        await trainer.run()

    beside = [*(shard.run(begun) for shard in shards), observer.watch()]
    if cluster is not None:
        supervision = config.supervision
        supervisor = Supervisor(supervision, RestartPolicy(supervision), cluster, sync, recorder)  # type: ignore[arg-type]
        beside.append(supervisor.run())
    await together(train(), beside)
    if cluster is not None:
        observer.deaths = cluster.count
    return observer


class _Observer:
    """Implements `asyncrl.trainer.protocols.Observer`: notes every step."""

    def __init__(
        self,
        ranks: SimulatedRanks,
        engines: Mapping[str, SimulatedEngine],
        queue: SampleQueue,
        recorder: Recorder,
        cpu_s: Callable[[], float],
    ) -> None:
        self._ranks, self._engines, self._queue, self._recorder = ranks, engines, queue, recorder
        self._cpu_s = cpu_s
        self.deaths = 0  # of replicas
        self.steps: list[Step] = []
        self.counters: Counter[str] = Counter()
        self.groups: list[Any] = []

    async def on_version(self, progress: Progress) -> None: ...

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> Mapping[str, float]:
        batch = self._recorder.drain()
        self.counters.update(batch.counters)
        self.groups += batch.profiled
        all_metrics = {**metrics, **await self._queue.stats()}
        engines = self._engines.values()
        step = Step(
            now_s(),
            self._ranks.busy_s,
            sum(engine.busy_s for engine in engines) / len(engines),
            sum(engine.tokens for engine in engines),
            all_metrics,
            self._cpu_s(),
        )
        self.steps.append(step)
        return all_metrics

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None: ...

    async def watch(self) -> None:
        """Raises Stuck. Some task always has a timer, so the loop does not notice."""
        before = None
        while before != (now := (len(self.steps), sum(engine.busy_s for engine in self._engines.values()))):
            before = now
            await asyncio.sleep(_STUCK_S)
        raise Stuck(f"nothing was generated or trained for {_STUCK_S / 3600:g} hours")


class _WouldRestart(RuntimeError):
    """A replica that a real run restarts, where replicas live for ever."""


async def _would_restart(name: str, why: str) -> None:
    raise _WouldRestart(f"{name}, which {why}")


class _Rollouter:
    """Implements `asyncrl.trainer.protocols.Rollouter`; ranks never die here."""

    async def reset(self) -> None:
        raise RuntimeError("a simulated rank died, which none does")


class _NoValidation:
    """Implements `asyncrl.trainer.protocols.Validation`."""

    async def finished(self) -> None: ...
    async def validate(self, progress: Progress) -> None: ...
