"""How many replicas a rollouter and one driver serve. The last line is JSON.

    python -m benchmarks.scale [--replicas 16 128 1024]

Simulates runs of as many replicas, each with `REQUESTS` requests at a time, in the real control plane: rollout loops,
routers, queue core, admission, train loop and sync sessions, see `asyncrl.simulation`. A shard has `OF_SHARD` replicas.
Answers have about `TOKENS` tokens and take half a minute.

- ``control_cpu_us_per_sample_N``: CPU time of the control plane for each trained sample with N replicas, once as many
  samples are in flight as fit; without that of the models of engines and ranks. Calls to other processes cost nothing
  here, and the journal is memory. ``…_over_16``: by how much it grows with the number of replicas.
- ``samples_per_s_per_shard``: samples for which one core would do the part of a rollouter's process: all but the queue
  and the train loop, which have processes of their own.
- ``session_calls_N``: calls that a driver makes in a sync session of N replicas on machines of `ON_MACHINE`.
- ``session_real_s``: such a session with `REAL` Ray actors that answer at once, and as many relays as they would have.
  ``session_s_N``: its extrapolation, with what the driver computes more for N.
  ``session_cpu_s_N``: CPU time of the driver for one: its own with N replicas, with the pickling of what it sends and
  gets counted twice, and that of a call with those actors.
- ``calls_cpu_us_per_sample``: CPU time for Ray's calls in a process that does with `CALLED` such actors, on machines of
  `ON_MACHINE`, what a rollouter does: each reports `ENDED` ended answers five times a second and gets as many requests.
  ``…_direct``: without relays.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import inspect
import json
import math
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import ray
from ray import cloudpickle

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, ParamSyncConfig
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport, remote_session
from asyncrl.processes.actor_client import ActorClient, start_ray
from asyncrl.processes.garbage import collect_rarely
from asyncrl.processes.relay import SILENT_S, Answer, Call, RelayCalls, Relayed
from asyncrl.rollouter.actors import GATHER_S, SYNC_GATHER_S, RelayActor, Route
from asyncrl.rollouter.engine_lease import FencedEngine, LeasedEngine
from asyncrl.rollouter.engines.base import EventBatch, Request, SamplingParams
from asyncrl.run.cluster import RELAYS_PER_CALL
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.simulation.engine import SimulatedEngine
from asyncrl.simulation.profile import (
    EngineFigures,
    GroupFigures,
    Profile,
    SampleFigures,
    SyncFigures,
    TrainerFigures,
    Turn,
)
from asyncrl.simulation.ranks import SimulatedRanks
from asyncrl.simulation.simulate import Simulation, simulate
from asyncrl.trainer.loop import TrainLoop
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

ROOT = Path(__file__).parent.parent
REQUESTS, TOKENS, SAMPLES = 256, 512, 8
REPORT_S = 0.2  # between two reports of an engine
STEPS_IN_FLIGHT = 2  # steps whose samples are in flight at a time
MEASURED = 2  # steps, after those that fill the replicas


OF_SHARD = 128  # replicas
ON_MACHINE = 8  # replicas
REAL = 48
CALLED, ENDED, CALLED_S = 16, 2, 10.0


class CpuByPart:
    """CPU time of this process, by part: of the functions and coroutines given to `part`, and of all else."""

    def __init__(self, rest: str) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._part, self._since_s = rest, time.process_time()

    def seconds(self) -> dict[str, float]:
        self.enter(self._part)
        return dict(self._seconds)

    def enter(self, part: str) -> str:
        """Returns the part until now."""
        now_s, before = time.process_time(), self._part
        self._seconds[before] += now_s - self._since_s
        self._since_s, self._part = now_s, part
        return before

    def part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which counts as this part."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(name)
            try:
                result = function(*args, **kwargs)
            finally:
                self.enter(before)
            return _Steps(self, name, result) if inspect.iscoroutine(result) else result

        return counted


class _Steps(Coroutine[Any, Any, Any]):
    """A coroutine, each step of which counts as a part."""

    def __init__(self, cpu: CpuByPart, part: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._send, self._throw = cpu.part(part, coroutine.send), cpu.part(part, coroutine.throw)

    def send(self, value: Any) -> Any:
        return self._send(value)

    def throw(self, *error: Any) -> Any:
        return self._throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __next__(self) -> Any:
        return self._send(None)

    def __iter__(self) -> _Steps:
        return self

    __await__ = __iter__  # type: ignore[assignment]


CPU = CpuByPart("rollouter")


class MeteredEngine(SimulatedEngine):
    _continue = CPU.part("models", SimulatedEngine._continue)
    _due = CPU.part("models", SimulatedEngine._due)
    _advance = CPU.part("models", SimulatedEngine._advance)
    _batch = CPU.part("models", SimulatedEngine._batch)
    _progress = CPU.part("models", lambda self: list(SimulatedEngine._progress(self)))


class MeteredRanks(SimulatedRanks):
    _computed = CPU.part("models", SimulatedRanks._computed)


def meter_processes() -> None:
    """Count queue and train loop as parts of their own: they run in other processes than the rollouter."""
    for name, method in list(vars(SampleQueue).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(SampleQueue, name, CPU.part("queue", method))
    TrainLoop.run = CPU.part("train loop", TrainLoop.run)  # type: ignore[method-assign]


def profile() -> Profile:
    """Answers of a quarter less to a quarter more than `TOKENS` tokens; the trainer takes two thirds of the time that
    generation does."""
    draw = random.Random(0)
    length = lambda: draw.randint(TOKENS * 3 // 4, TOKENS * 5 // 4)
    groups = tuple(
        GroupFigures(64, tuple(SampleFigures((Turn(length()),), float(i % 2)) for i in range(SAMPLES)))
        for _ in range(1024)
    )
    engine = EngineFigures(step_s=0.02, row_s=1e-4, context_token_s=0.0, prefill_token_s=1e-6, report_s=REPORT_S)
    answer_s = TOKENS * (engine.step_s + engine.row_s * REQUESTS)
    trainer = TrainerFigures(ranks=1, step_s=answer_s / STEPS_IN_FLIGHT / 1.5, part_s=0, token_s=0, stage_s=0)
    sync = SyncFigures(10**9, 10**10, *(0.01 for _ in range(8)))
    return Profile(engine, trainer, sync, groups, reward_s=0.05, flush_s=0.003)


def config(replicas: int) -> Config:
    groups = replicas * REQUESTS // SAMPLES // STEPS_IN_FLIGHT
    return load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [
            "model.path=none",
            "data.train_files=[none]",
            f"rollout.n={SAMPLES}",
            f"rollout.max_response_tokens={2 * TOKENS}",
            f"rollout.engine.max_context_tokens={2 * TOKENS + 64}",
            f"rollout.engine.slots={REQUESTS}",
            f"rollout.replicas={replicas}",
            f"rollout.shards={max(1, replicas // OF_SHARD)}",
            f"trainer.mini_batch_groups={groups}",
            f"trainer.total_steps={STEPS_IN_FLIGHT + MEASURED}",
            f"async_training.staleness_threshold={STEPS_IN_FLIGHT - 1}",
            "checkpoint.every_steps=0",
        ],
    )


def control_cpu_s(replicas: int) -> tuple[dict[str, float], Simulation]:
    """CPU seconds of each part of the control plane for each sample that is trained."""
    totals: list[dict[str, float]] = []

    def total_s() -> float:
        totals.append(CPU.seconds())
        return sum(totals[-1].values())

    run = simulate(config(replicas), profile(), MeteredEngine, MeteredRanks, total_s)
    samples, last, first = MEASURED * run.samples_per_step, totals[-1], totals[-MEASURED - 1]
    return {part: (last[part] - first.get(part, 0.0)) / samples for part in last if part != "models"}, run


# -- calls of Ray ------------------------------------------------------------------------------------------------------

ANSWERS: dict[str, Any] = {"plan": ("reader",), "pause": 0, "unload": 0, "receive": 0}


class Sender:
    """A rank without weights."""

    async def offer(self) -> Offer:
        return Offer(Manifest(()), None)

    async def send(self, plan: SendPlan) -> SendReport:
        return SendReport()

    async def abort(self, session: str) -> None: ...


class InstantRelay:
    """Answers every call at once. Calls and answers are pickled and read again, of which a driver does half."""

    async def exchange(self, caller: str, calls: Sequence[Call], gather_s: float, within_s: float) -> list[Answer]:
        calls = cloudpickle.loads(cloudpickle.dumps(calls))
        answers = [Answer(call.number, ANSWERS.get(call.args[0]), None) for call in calls]
        return cloudpickle.loads(cloudpickle.dumps(answers))


@ray.remote(num_cpus=0)
class InstantReplica:
    def __init__(self) -> None:
        import asyncrl.param_sync.session  # noqa: F401 (what the first call brings would be imported within its deadline)

    async def sync(self, call: str, *args: Any) -> Any:
        return ANSWERS.get(call)

    async def submit(self, token: int, number: int, requests: Sequence[Request]) -> None: ...

    async def events(self, token: int, number: int) -> EventBatch:
        await asyncio.sleep(REPORT_S)
        tokens, ids = ENDED * TOKENS, [f"{number}/{i}" for i in range(ENDED)]
        return EventBatch(
            ids,
            np.arange(0, tokens + 1, TOKENS),
            np.zeros(tokens, np.int32),
            np.zeros(tokens, np.float32),
            [PolicyVersion(0, 1)] * ENDED,
            [FinishReason.STOP] * ENDED,
            [False] * ENDED,
        )


class Counted:
    """A relay, and the number of its calls."""

    def __init__(self, relay: Any) -> None:
        self._relay, self.calls = relay, 0

    def exchange(self, *args: Any) -> Any:
        self.calls += 1
        return self._relay.exchange(*args)


class SessionTimes(NamedTuple):
    seconds: float
    cpu_s: float
    calls: int


async def session_times(relays: Sequence[Any], replicas: int, rounds: int) -> SessionTimes:
    """Medians over ``rounds`` sessions of ``replicas``, each relay with those of `RELAYS_PER_CALL` machines."""
    fleet, counted = Fleet(), [Counted(relay) for relay in relays]
    through, each = [Relayed(relay, "driver", SYNC_GATHER_S) for relay in counted], ON_MACHINE * RELAYS_PER_CALL
    for number in range(replicas):
        client = through[number // each].client(number % each, None)
        fleet.add(f"replica/{number}", remote_session(client.sync))
    found = []
    for number in range(rounds + 1):
        calls, began_s, cpu_s = sum(relay.calls for relay in counted), time.perf_counter(), time.process_time()
        await SyncSession({"trainer/0": Sender()}, fleet, ParamSyncConfig(pause="abort")).run(PolicyVersion(0, number))
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        found.append((took_s, cpu_s, sum(relay.calls for relay in counted) - calls + 2))  # and two to the rank
    seconds, cpu, counts = zip(*found[1:], strict=True)  # after a warm-up
    return SessionTimes(statistics.median(seconds), statistics.median(cpu), max(counts))


class Machines:
    """As many Ray actors as `REAL`, and the relays of their machines."""

    def __init__(self) -> None:
        self.replicas = [InstantReplica.remote() for _ in range(REAL)]  # type: ignore[attr-defined]
        self.relays: list[ActorClient] = []
        self.targets: list[int] = []  # number of each replica at its machine's relay

    async def start(self) -> None:
        await asyncio.gather(*(replica.sync.remote("up") for replica in self.replicas))  # minutes, on two cores
        for i in range(REAL // ON_MACHINE):
            handle = RelayActor.options(num_cpus=0).remote(f"relay/{i}", SILENT_S)  # type: ignore[attr-defined]
            relay = ActorClient(handle, f"relay/{i}")
            self.relays.append(relay)
            first = self.relays[i - i % RELAYS_PER_CALL]
            for number in range(i * ON_MACHINE, (i + 1) * ON_MACHINE):
                name, replica = f"replica/{number}", self.replicas[number]
                self.targets.append(await relay.register(name, replica))
                if first is not relay:
                    await first.register(name, replica, Route(relay.name, relay.handle, self.targets[-1]))


async def called(engines: Sequence[LeasedEngine]) -> float:
    """CPU seconds for each sample that the engines make, as `calls_cpu_us_per_sample` counts it."""
    batches = 0
    request = Request("0", "0", np.zeros(64, np.int32), 64, 0, 0, TOKENS, SamplingParams())

    async def serve(engine: LeasedEngine) -> None:
        nonlocal batches
        while True:
            await engine.events()
            batches += 1
            await engine.submit([request] * ENDED)

    async with asyncio.TaskGroup() as tasks:
        serving = [tasks.create_task(serve(engine)) for engine in engines]
        await asyncio.sleep(10 * REPORT_S)
        before, cpu_s = batches, time.process_time()
        await asyncio.sleep(CALLED_S)
        cpu_s = (time.process_time() - cpu_s) / (batches - before) / ENDED
        for task in serving:
            task.cancel()
    return cpu_s


async def rollouter_calls(machines: Machines, rounds: int) -> dict[str, float]:
    """Medians over ``rounds``, with and without relays in turn."""
    clients = [ActorClient(replica, "replica") for replica in machines.replicas[:CALLED]]
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        found["direct"].append(await called([LeasedEngine(cast(FencedEngine, client), 0) for client in clients]))
        caller = f"rollouter {len(found['relayed'])}"
        through = [Relayed(cast(RelayCalls, relay), caller, GATHER_S) for relay in machines.relays]
        relayed = [
            LeasedEngine(cast(FencedEngine, client), 0, through[i // ON_MACHINE].client(machines.targets[i], client))
            for i, client in enumerate(clients)
        ]
        found["relayed"].append(await called(relayed))
    return {name: statistics.median(values) for name, values in found.items()}


async def of_actors(rounds: int) -> tuple[SessionTimes, dict[str, float]]:
    machines = Machines()
    await machines.start()
    times = await session_times(machines.relays[::RELAYS_PER_CALL], REAL, rounds)
    return times, await rollouter_calls(machines, 3)


def with_actors(replicas: int, rounds: int = 7) -> dict[str, float]:
    own = {
        count: asyncio.run(session_times([InstantRelay() for _ in range(calls)], count, rounds))
        for count in (REAL, replicas)
        for calls in [math.ceil(count / ON_MACHINE / RELAYS_PER_CALL)]
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as folder:
        start_ray(num_cpus=2, object_store_memory=128 * 1024 * 1024, logging_level="ERROR", _temp_dir=folder)
        try:
            real, calls = asyncio.run(of_actors(rounds))
        finally:
            ray.shutdown()
    call_s = (real.cpu_s - own[REAL].cpu_s) / real.calls
    at_scale = own[replicas]
    cpu_s = at_scale.cpu_s + at_scale.calls * call_s
    print(f"session of {REAL} Ray actors: {real.seconds:.3f} s; driver: {real.calls} calls, {real.cpu_s:.3f} s of CPU")
    print(f"session of {replicas}: driver: {at_scale.calls} calls, {cpu_s:.3f} s, its own part {at_scale.cpu_s:.3f} s")
    return {
        "session_real_s": real.seconds,
        f"session_s_{replicas}": real.seconds + cpu_s - real.cpu_s,
        f"session_calls_{replicas}": at_scale.calls,
        f"session_cpu_s_{replicas}": cpu_s,
        "calls_cpu_us_per_sample": calls["relayed"] * 1e6,
        "calls_cpu_us_per_sample_direct": calls["direct"] * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 128, 1024])
    args = parser.parse_args()
    args.replicas.sort()
    if any(replicas % ON_MACHINE for replicas in args.replicas):
        parser.error(f"--replicas: expected multiples of {ON_MACHINE}, found {args.replicas}")
    found: dict[str, float] = {}
    collect_rarely()  # as rollouter and driver do
    meter_processes()
    parts = "rollouter", "queue", "train loop"
    heads = " ".join(f"{part:>10}" for part in parts)
    print(f"{'':>17} {'us of CPU per sample':^33}")
    print(f"{'replicas':>8} {'samples':>8} {'control':>8} {heads} {'real s':>7} {'virtual s':>10} {'of ideal':>9}")
    for replicas in args.replicas:
        began_s = time.perf_counter()
        seconds, run = control_cpu_s(replicas)
        found[f"control_cpu_us_per_sample_{replicas}"] = control_us = sum(seconds.values()) * 1e6
        took_s, virtual_s = time.perf_counter() - began_s, run.steps[-1].at_s
        ideal = run.figures()["fraction_of_ideal"]
        samples = len(run.steps) * run.samples_per_step
        print(
            f"{replicas:>8} {samples:>8} {control_us:>8.0f}"
            f" {' '.join(f'{seconds[part] * 1e6:>10.0f}' for part in parts)}"
            f" {took_s:>7.1f} {virtual_s:>10.1f} {ideal:>9.2f}",
            flush=True,
        )
    least, most = args.replicas[0], args.replicas[-1]
    per_sample = {n: found[f"control_cpu_us_per_sample_{n}"] for n in (least, most)}
    found[f"control_cpu_us_per_sample_{most}_over_{least}"] = per_sample[most] / per_sample[least]
    found["samples_per_s_per_shard"] = 1 / seconds["rollouter"]
    found |= with_actors(most)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
