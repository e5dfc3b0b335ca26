"""How many replicas one rollouter and one driver serve. The last line is JSON.

    python -m benchmarks.scale [--replicas 16 128 1024]

Simulates runs of as many replicas, each with `REQUESTS` requests at a time, in the real control plane: rollout loop,
router, queue core, admission, train loop and sync sessions, see `asyncrl.simulation`. Answers have about `TOKENS`
tokens and take half a minute.

- ``control_cpu_us_per_sample_N``: CPU time of the control plane for each trained sample with N replicas, once as many
  samples are in flight as fit; without that of the models of engines and ranks. Calls to other processes cost nothing
  here, and the journal is memory. ``…_over_16``: by how much it grows with the number of replicas.
- ``samples_per_s_per_shard``: samples for which one core would do all that.
- ``session_calls_N``: calls that a driver makes in a sync session of N replicas on machines of `ON_MACHINE`.
- ``session_real_s``: such a session with `REAL` Ray actors that answer at once, and as many relays as they would have.
  ``session_s_N``: its extrapolation, with what the driver computes more for N.
  ``session_cpu_s_N``: CPU time of the driver for one: its own with N replicas, and that of a call with those
  actors.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import ray

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config, ParamSyncConfig
from asyncrl.param_sync.digest import ROLES, combine_hashes
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest, Role
from asyncrl.param_sync.relay import Answer, Call, RelayedSessions
from asyncrl.param_sync.sender import SendPlan, SendReport
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.session_protocol import ReplicaSession
from asyncrl.processes.actor_client import ActorClient, start_ray
from asyncrl.rollouter.actors import RelayActor
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
from asyncrl.types.versions import PolicyVersion

ROOT = Path(__file__).parent.parent
REQUESTS, TOKENS, SAMPLES = 256, 512, 8
STEPS_IN_FLIGHT = 2  # steps whose samples are in flight at a time
MEASURED = 2  # steps, after those that fill the replicas


class Meter:
    """CPU time of the methods that it measures; of nested ones, the outermost."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def metered(*args: Any) -> Any:
            if self._inside:
                return method(*args)
            self._inside, began_s = True, time.process_time()
            try:
                return method(*args)
            finally:
                self._inside = False
                self.seconds += time.process_time() - began_s

        return metered


MODELS = Meter()
ON_MACHINE = 8  # replicas
REAL = 48


class MeteredEngine(SimulatedEngine):
    _continue = MODELS(SimulatedEngine._continue)
    _due = MODELS(SimulatedEngine._due)
    _advance = MODELS(SimulatedEngine._advance)
    _batch = MODELS(SimulatedEngine._batch)
    _progress = MODELS(lambda self: list(SimulatedEngine._progress(self)))


class MeteredRanks(SimulatedRanks):
    _computed = MODELS(SimulatedRanks._computed)


def profile() -> Profile:
    """Answers of a quarter less to a quarter more than `TOKENS` tokens; the trainer takes two thirds of the time that
    generation does."""
    draw = random.Random(0)
    length = lambda: draw.randint(TOKENS * 3 // 4, TOKENS * 5 // 4)
    groups = tuple(
        GroupFigures(64, tuple(SampleFigures((Turn(length()),), float(i % 2)) for i in range(SAMPLES)))
        for _ in range(1024)
    )
    engine = EngineFigures(step_s=0.02, row_s=1e-4, context_token_s=0.0, prefill_token_s=1e-6, report_s=0.2)
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
            f"trainer.mini_batch_groups={groups}",
            f"trainer.total_steps={STEPS_IN_FLIGHT + MEASURED}",
            f"async_training.staleness_threshold={STEPS_IN_FLIGHT - 1}",
            "checkpoint.every_steps=0",
        ],
    )


def control_cpu_s(replicas: int) -> tuple[float, Simulation]:
    """CPU seconds of the control plane for each sample that is trained."""
    run = simulate(
        config(replicas), profile(), MeteredEngine, MeteredRanks, lambda: time.process_time() - MODELS.seconds
    )
    first, last = run.steps[-MEASURED - 1], run.steps[-1]
    return (last.cpu_s - first.cpu_s) / (MEASURED * run.samples_per_step), run


# -- sync sessions -----------------------------------------------------------------------------------------------------

DIGESTS: dict[Role, str] = {role: combine_hashes({}) for role in ROLES}
ANSWERS: dict[str, Any] = {"plan": ("reader",), "verify": DIGESTS, "pause": 0, "unload": 0, "receive": 0}


class Sender:
    """A rank without weights."""

    async def manifest(self) -> Manifest:
        return Manifest(())

    async def address(self) -> None:
        return None

    async def send(self, plan: SendPlan) -> SendReport:
        return SendReport()

    async def abort(self, session: str) -> None: ...


class InstantRelay:
    """Answers every call at once."""

    async def make(self, calls: Sequence[Call]) -> list[Answer]:
        return [Answer(call.number, ANSWERS.get(call.name), None) for call in calls]

    async def rest(self, numbers: Sequence[int]) -> list[Answer]:
        return []


@ray.remote(num_cpus=0)
class InstantReplica:
    def __init__(self) -> None:
        import asyncrl.param_sync.session  # noqa: F401 (what the first call brings would be imported within its deadline)

    async def sync(self, call: str, *args: Any) -> Any:
        return ANSWERS.get(call)


class Counted:
    """A relay, and the number of its calls."""

    def __init__(self, relay: Any) -> None:
        self._relay, self.calls = relay, 0

    def make(self, calls: Sequence[Call]) -> Any:
        self.calls += 1
        return self._relay.make(calls)

    def rest(self, numbers: Sequence[int]) -> Any:
        self.calls += 1
        return self._relay.rest(numbers)


class SessionTimes(NamedTuple):
    seconds: float
    cpu_s: float
    calls: int


async def session_times(relays: Sequence[Any], rounds: int) -> SessionTimes:
    """Medians over ``rounds`` sessions of `ON_MACHINE` replicas behind each relay."""
    fleet, counted = Fleet(), [Counted(relay) for relay in relays]
    for i, relay in enumerate(counted):
        sessions = RelayedSessions(relay)
        for replica in range(ON_MACHINE):
            name = f"replica/{i * ON_MACHINE + replica}"
            fleet.add(name, sessions.session(name, cast(ReplicaSession, None)))
    found = []
    for number in range(rounds + 1):
        calls, began_s, cpu_s = sum(relay.calls for relay in counted), time.perf_counter(), time.process_time()
        await SyncSession({"trainer/0": Sender()}, fleet, ParamSyncConfig(pause="abort")).run(PolicyVersion(0, number))
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        found.append((took_s, cpu_s, sum(relay.calls for relay in counted) - calls + 3))  # and three to the rank
    seconds, cpu, counts = zip(*found[1:], strict=True)  # after a warm-up
    return SessionTimes(statistics.median(seconds), statistics.median(cpu), max(counts))


async def real_session_times(rounds: int) -> SessionTimes:
    relays = []
    replicas = [InstantReplica.remote() for _ in range(REAL)]  # type: ignore[attr-defined]
    await asyncio.gather(*(replica.sync.remote("up") for replica in replicas))  # minutes, on two cores
    for i in range(REAL // ON_MACHINE):
        relay = ActorClient(RelayActor.options(num_cpus=0).remote(f"relay/{i}"), f"relay/{i}")  # type: ignore[attr-defined]
        for replica in range(ON_MACHINE):
            number = i * ON_MACHINE + replica
            await relay.register(f"replica/{number}", replicas[number])
        relays.append(relay)
    return await session_times(relays, rounds)


def sessions(replicas: int, rounds: int = 7) -> dict[str, float]:
    own = {
        count: asyncio.run(session_times([InstantRelay() for _ in range(count // ON_MACHINE)], rounds))
        for count in (REAL, replicas)
    }
    with tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as folder:
        start_ray(num_cpus=2, object_store_memory=128 * 1024 * 1024, logging_level="ERROR", _temp_dir=folder)
        try:
            real = asyncio.run(real_session_times(rounds))
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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 128, 1024])
    args = parser.parse_args()
    if any(replicas % ON_MACHINE for replicas in args.replicas):
        parser.error(f"--replicas: expected multiples of {ON_MACHINE}, found {args.replicas}")
    found: dict[str, float] = {}
    print(f"{'replicas':>8} {'samples':>8} {'control, us/sample':>19} {'real s':>7} {'virtual s':>10} {'of ideal':>9}")
    for replicas in args.replicas:
        began_s = time.perf_counter()
        seconds, run = control_cpu_s(replicas)
        found[f"control_cpu_us_per_sample_{replicas}"] = seconds * 1e6
        took_s, virtual_s = time.perf_counter() - began_s, run.steps[-1].at_s
        ideal = run.figures()["fraction_of_ideal"]
        samples = len(run.steps) * run.samples_per_step
        print(
            f"{replicas:>8} {samples:>8} {seconds * 1e6:>19.0f} {took_s:>7.1f} {virtual_s:>10.1f} {ideal:>9.2f}",
            flush=True,
        )
    least, most = min(args.replicas), max(args.replicas)
    per_sample = {n: found[f"control_cpu_us_per_sample_{n}"] for n in (least, most)}
    found[f"control_cpu_us_per_sample_{most}_over_{least}"] = per_sample[most] / per_sample[least]
    found["samples_per_s_per_shard"] = 1e6 / per_sample[most]
    found |= sessions(most)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
