"""Trains the quickstart's task on one device without Ray, once undisturbed and once through kills. The last line is
JSON.

    python -m benchmarks.gpu_run [--device cuda|cpu] [--no-kills] [--steps N] [key.path=value ...]

A trainer rank and a native engine are plain processes that share the GPU; weights travel over CUDA IPC, with
``--device cpu`` over shared memory. The parent process holds the sample queue with its journal on disk, the rollout
loop with its reward workers, and the train loop. All of these are the parts of a real run, as is the code of syncs,
validation and checkpoints. Ray's actors are replaced by `benchmarks.remote.Remote`, and what imports Ray by small
classes here: `Rank`, `Replica` and `RolloutPool` for the actors' shells, `Ranks` and `Engine` for supervision (at most
one restart each), `Figures` for the monitor. Queue and rollouter are not separate processes, so they are not killed.

The second run kills each process once by ``kill -9``, in the middle of a train step: the rank restarts from its last
checkpoint, the engine by a sync of all weights. Each checkpoint also lists the groups in its weights, written by the
rank itself; at the end the last list is compared with the ledger and with the order of the prompts.

``accuracy``, ``accuracy_with_kills``: share of held-out problems with a correct sampled answer after training (T = 1).
``seconds``: from the first version to the last step of the undisturbed run; ``tokens_per_s``: tokens trained in them.
``sync_s``: median of its syncs. ``lost``: groups issued in either run that are neither in the weights nor still queued,
leased or in flight. ``trained_twice``: groups that are in the weights more than once, or that the ledger would train
again. Both must be 0; otherwise the exit status is 1.

In the table, ``steps_undone`` were lost with the rank and trained again; ``tokens_moved`` were left to generate when
the engine was killed.

Needs torch, transformers, pydantic, xxhash, omegaconf and aiohttp. The checkpoint and the problems are those of the
quickstart; if they are missing they are made, on one core in four minutes, so bring them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from signal import SIGKILL
from typing import Any, TypeVar

import torch

from asyncrl.config.checks import Derived, derive
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.cpu.priority import never_interrupt
from asyncrl.data.load import load_run_prompts
from asyncrl.data.order import PromptOrder
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.coordinator import ParameterSyncCoordinator
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport, answer, remote_session
from asyncrl.processes.tasks import end_of_first, within
from asyncrl.rollouter.answering import Answering
from asyncrl.rollouter.engine_lease import LeasedEngine
from asyncrl.rollouter.held_queue import HeldQueue
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.pacing import GenerationPacer
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.rollouter.validation import Validation
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import reading
from asyncrl.sample_queue.messages import Holder
from asyncrl.sample_queue.records import DROPPED, TRAINED
from asyncrl.trainer.checkpoints import CheckpointStore
from asyncrl.trainer.loop import TrainLoop
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.trainer.progress import Progress
from asyncrl.trainer.validation import ValidationSchedule
from asyncrl.types.groups import Group
from asyncrl.types.prompts import Prompt
from benchmarks.quickstart import ROOT, ensure_inputs
from benchmarks.remote import Remote

T = TypeVar("T")

RANK, REPLICA = "trainer/0", "replica/0"
HOLDER = 1  # fencing token of the only rollouter
GROUPS_FILE = "groups.json"  # in a checkpoint: uids of the groups in its weights, in the order of training
RUN_S = 1800.0  # for each of the two runs
START_S = 120.0  # for a process
NOTICE_S = 10.0  # from a failed call to the notice that its process has died
MID_STEP_S = 0.02  # from the start of a train step to a kill in it
#: with a GPU: few large micro-batches and wide decoding
CUDA_OPTIONS = (
    "param_sync.transport=cuda_ipc",
    "trainer.max_tokens_per_micro_batch=32768",
    "rollout.engine.slots=128",
    "rollout.engine.cpu_priority=normal",
)
CPU_OPTIONS = ("param_sync.transport=shared_memory",)


# -- in the rank's process and in the engine's -------------------------------------------------------------------------


class Rank:
    """A trainer rank with its sender, as in `asyncrl.trainer.actors`: one thread computes, another writes checkpoints.
    Keeps the uids of the groups in its weights, and writes them into each checkpoint."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._thread, self._writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._in_weights: list[str] = []
        self._staged: list[str] = []

    async def start(self) -> None:
        def build() -> None:
            from asyncrl.param_sync.sender import Sender
            from asyncrl.param_sync.transports.choose import make_writer
            from asyncrl.trainer.rank import TrainerRank

            torch.set_num_threads(self._config.trainer.threads)
            sync = self._config.param_sync
            self._core = TrainerRank(self._config, 0, 1, None, Recorder(RANK))
            self._sender = Sender(RANK, make_writer(sync.transport, 0, sync.bucket_bytes, "127.0.0.1"))

        await _in(self._thread, build)

    async def alive(self) -> None:
        await asyncio.Event().wait()

    async def train(
        self, step: int, payload: Sequence[bytes], mask_before: int | None, version: float, part: int, parts: int
    ) -> tuple[dict[str, float], list[SamplerKL]]:
        train = lambda: self._core.train(step, payload, mask_before, version, part, parts)
        metrics = await _in(self._thread, train)
        self._in_weights += [Group.from_buffer(buffer).uid for buffer in payload]
        return metrics, self._core.sampler_kl

    async def stage(self) -> None:
        await _in(self._thread, lambda: self._core.stage())
        self._staged = list(self._in_weights)

    async def write(self, path: Path) -> None:
        await _in(self._writer, lambda: self._core.write(path))
        (path.parent / GROUPS_FILE).write_text(json.dumps(self._staged))

    async def load(self, path: Path) -> None:
        await _in(self._thread, lambda: self._core.load(path))
        self._in_weights = json.loads((path.parent / GROUPS_FILE).read_text())

    # the sending side of a sync session, see `asyncrl.param_sync.session_protocol.SenderSession`

    async def offer(self) -> Offer:
        return Offer(self._core.manifest(), self._sender.address)

    async def send(self, plan: SendPlan) -> SendReport:
        def export_and_send() -> SendReport:
            self._sender.open(plan)
            return self._sender.send(self._core.export(plan.manifest.sends_base))

        return await _in(self._thread, export_and_send)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)


class Replica:
    """An engine with its lease and its end of sync sessions, as in `asyncrl.rollouter.actors`."""

    def __init__(self, config: Config) -> None:
        never_interrupt()
        self._config = config
        self._lease: Any = None

    async def start(self) -> None:
        from asyncrl.param_sync.replica_session import EngineSession
        from asyncrl.rollouter.engine_lease import EngineLease
        from asyncrl.rollouter.engines.base import ENGINES

        torch.set_num_threads(self._config.rollout.engine.threads)
        engine = await ENGINES.find(self._config.rollout.engine.name).start(self._config, Recorder(REPLICA))
        receiver = engine.weight_receiver(REPLICA, self._config.param_sync.transport)
        self._session = EngineSession(REPLICA, engine, receiver)
        self._lease = EngineLease(engine)

    async def alive(self) -> None:
        await asyncio.Event().wait()

    async def sync(self, call: str, *args: Any) -> Any:
        return await answer(self._session, call, *args)

    def __getattr__(self, call: str) -> Any:
        return getattr(self._lease, call)


async def _in(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)


# -- in the parent: clients of the two processes -----------------------------------------------------------------------


class ProcessDied(RuntimeError):
    """A process ended while it was called, or before."""


class Client:
    """One process, from its start to its end. ``await client.method(…)`` raises ProcessDied if it ends meanwhile."""

    def __init__(self, name: str, make: Callable[[Config], Any], config: Config) -> None:
        self.name, self._remote = name, Remote(make, config)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            try:
                return await getattr(self._remote, method)(*args)
            except OSError:  # of its pipe, or raised in the process
                if not await asyncio.to_thread(wait, [self._remote.process.sentinel], NOTICE_S):
                    raise
                raise ProcessDied(f"{self.name} died") from None

        return call

    async def started(self) -> None:
        await within(START_S, self.start(), f"the start of {self.name}")

    def kill(self) -> None:
        self._remote.signal(SIGKILL)

    def end(self) -> None:
        self._remote.end()


class Ranks:
    """The train loop's only rank."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._kills: dict[int, Callable[[], None]] = {}  # by step
        self.senders: dict[str, Any] = {}
        self.rank: Any = None
        self.restarts = 0

    async def start(self) -> None:
        self.rank = self.senders[RANK] = Client(RANK, Rank, self._config)
        await self.rank.started()

    def __getattr__(self, call: str) -> Any:
        return getattr(self.rank, call)

    def kill_in(self, step: int, kill: Callable[[], None]) -> None:
        """Call ``kill`` once, in the middle of the step."""
        self._kills[step] = kill

    async def train(self, step: int, *args: Any) -> Any:
        training = asyncio.ensure_future(self.rank.train(step, *args))
        if (kill := self._kills.pop(step, None)) is not None:
            await asyncio.sleep(MID_STEP_S)
            kill()
        return await training

    async def lost(self, error: BaseException) -> str | None:
        """Why the rank is dead; None if it lives, also after `NOTICE_S`: a sync may fail before its death is known."""
        if isinstance(error, SyncError) and error.who == RANK:
            self.rank.kill()
        try:
            await asyncio.wait_for(self.rank.alive(), NOTICE_S)
        except ProcessDied as died:
            return str(died)
        except TimeoutError:
            pass
        return None

    async def restart(self, why: str) -> None:
        self.restarts += 1
        if self.restarts > 1:
            raise RuntimeError(f"{why}: expected one death of the rank")
        self.rank.end()
        await self.start()


class RolloutPool:
    """Rollout loop, router, reward workers and validation, as in `asyncrl.rollouter.actors`, in this process."""

    def __init__(self, config: Config, derived: Derived, queue: SampleQueue) -> None:
        self._config, self._derived = config, derived
        self._queue = HeldQueue(queue, Holder(token=HOLDER))
        self._recorder = Recorder("rollouter")
        self._prompts, held_out = load_run_prompts(config.data)
        self._held_out = held_out[: config.validation.max_prompts or None]
        is_death = lambda error: isinstance(error, ProcessDied)
        max_prompt_tokens = config.rollout.engine.max_context_tokens - config.rollout.max_response_tokens
        self._answering = Answering(
            config, PromptTokenizer.of(config), max_prompt_tokens, {}, is_death, None, self._recorder
        )
        self.router = self._answering.router
        self._validation = Validation(config, derived.slots, self._answering.maker, self._recorder)
        self._loop: RolloutLoop | None = None
        self._may_start = asyncio.Event()

    def order(self) -> PromptOrder:
        data = self._config.data
        return PromptOrder(self._prompts, self._config.seed, data.shuffle, data.epochs, data.mixture, data.curriculum)

    async def start(self) -> None:
        await self._answering.start()

    def start_groups(self) -> None:
        self._may_start.set()

    async def run(self) -> None:
        """Serve requests from now on, and roll out after `start_groups`, through every `reset`."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._answering.run())
            await self._may_start.wait()
            while True:
                self._rolling_out = tasks.create_task(self._roll_out())
                await asyncio.wait({self._rolling_out})

    async def reset(self) -> None:
        """Snapshot the in-flight groups and re-admit them under the restored version."""
        if self._loop is not None:
            loop, self._loop = self._loop, None
            await loop.park()
            self._rolling_out.cancel()
            await asyncio.wait({self._rolling_out})

    async def validate(self) -> dict[str, float]:
        return await self._validation.run(self._held_out)

    async def set_validation_first(self, first: bool) -> None:
        self.router.set_validation_first(first)

    async def close(self) -> None:
        await self._answering.close()

    async def _roll_out(self) -> None:
        recovery = await self._queue.recover()
        maker = self._answering.maker
        pacer = GenerationPacer(self._config.rollout.engine.slots, self.router.set_max_running_requests)
        slots, queue = self._derived.slots, self._queue
        self._loop = RolloutLoop(self._config, slots, self.order(), maker, queue, self._recorder, pacer)
        await self._loop.run(recovery)
        await asyncio.Event().wait()  # a rollback may reopen the queue


class Engine:
    """The only replica. ``run()`` starts it again when it dies; it serves after its first sync."""

    def __init__(self, config: Config, pool: RolloutPool, sync: ParameterSyncCoordinator) -> None:
        self._config, self._pool, self._sync = config, pool, sync
        self.replica: Any = None
        self.restarts = 0
        self.unfinished_tokens = 0  # when it was killed

    async def start(self) -> None:
        """Returns when it may be synced."""
        self.replica = Client(REPLICA, Replica, self._config)
        await self.replica.started()
        self._pool.router.replace(REPLICA, LeasedEngine(self.replica, HOLDER))
        self._sync.join(REPLICA, remote_session(self.replica.sync))

    async def run(self) -> None:
        while True:
            try:
                await self.replica.alive()
            except ProcessDied as died:
                self.restarts += 1
                if self.restarts > 1:
                    raise RuntimeError("expected one death of the engine") from died
            await self._sync.leave(REPLICA)
            self.replica.end()
            await self.start()

    def kill(self) -> None:
        self.unfinished_tokens = sum(self._pool.router.outstanding_tokens.values())
        self.replica.kill()


class Figures:
    """The train loop's observer."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []  # also those that a restore undid
        self.accuracy: dict[str | None, float] = {}  # "before" and "after" training
        self.began_s = self.ended_s = 0.0

    async def on_version(self, progress: Progress) -> None:
        self.began_s = self.began_s or now_s()

    async def on_step(self, progress: Progress, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self.steps.append(metrics)
        self.ended_s = now_s()
        return metrics

    async def on_end(self, progress: Progress, queue: Mapping[str, float]) -> None: ...

    def on_validation(self, progress: Progress, metrics: Mapping[str, float], when: str | None) -> None:
        self.accuracy[when] = metrics["validation/accuracy"]


# -- a run -------------------------------------------------------------------------------------------------------------


async def run(config: Config, folder: Path, kills: bool) -> dict[str, Any]:
    """Train to the end; returns the run's figures."""
    derived, steps = derive(config), config.trainer.total_steps
    admission = Admission(derived.groups_per_version, derived.staleness_threshold, derived.total_groups)
    journal = Journal(folder)
    policy, recorder = config.async_training, Recorder("driver")
    vocab_size, attempts = ModelConfig.load(config.model.path).vocab_size, config.rollout.max_attempts
    queue: Any = SampleQueue(admission, journal, policy.queue_policy, policy.overdue, vocab_size, attempts)
    pool, figures = RolloutPool(config, derived, queue), Figures()
    checkpoints = CheckpointStore(folder / "checkpoints", config.checkpoint)
    ranks = Ranks(config)
    pause = replace(config.param_sync, pause=derived.pause)
    sync = ParameterSyncCoordinator(pause, ranks.senders, {}, pool.router.set_routable, recorder)
    engine = Engine(config, pool, sync)
    if kills:
        ranks.kill_in(steps // 3 + 1, lambda: ranks.rank.kill())
        ranks.kill_in(steps // 2 + 1, engine.kill)
    validation = ValidationSchedule(config, pool, checkpoints, recorder, figures.on_validation)
    trainer = TrainLoop(config, derived, queue, ranks, sync, pool, validation, figures, recorder, checkpoints)

    async def train() -> None:
        await trainer.begin(None)
        pool.start_groups()
        await trainer.run()

    async def start_and_train() -> None:
        async with asyncio.TaskGroup() as starting:
            for part in (ranks, engine, pool):
                starting.create_task(part.start())
        never_interrupt()  # like a run's queue and rollouter; ranks must not inherit it
        await end_of_first(train(), pool.run(), engine.run(), validation.run())

    try:
        await within(RUN_S, start_and_train(), "the run")
    finally:
        for client in filter(None, (ranks.rank, engine.replica)):
            client.end()
        await pool.close()
        await journal.close()

    restarts = ranks.restarts, engine.restarts
    if restarts != (int(kills), int(kills)):
        raise SystemExit(f"expected {int(kills)} restart of rank and engine each, found {restarts}")
    newest = checkpoints.newest_intact()
    assert newest is not None
    in_weights = json.loads((newest.path / GROUPS_FILE).read_text())
    if len(in_weights) != derived.total_groups:
        raise SystemExit(f"expected {derived.total_groups} groups in the weights, found {len(in_weights)}")
    lost, trained_twice = audit(folder / LEDGER, in_weights, pool.order())
    seconds = figures.ended_s - figures.began_s
    return {
        "accuracy_before": figures.accuracy["before"],
        "accuracy": figures.accuracy["after"],
        "steps": steps,
        "seconds": seconds,
        "tokens_per_s": sum(metrics["trainer/trained_tokens"] for metrics in figures.steps) / seconds,
        "sync_s": statistics.median(m["param_sync/total_s"] for m in figures.steps if "param_sync/total_s" in m),
        "steps_undone": len(figures.steps) - steps,
        "tokens_moved": engine.unfinished_tokens,
        "lost": lost,
        "trained_twice": trained_twice,
    }


def audit(ledger: Path, in_weights: Sequence[str], order: Iterable[Prompt]) -> tuple[int, int]:
    """Number of groups lost and of groups trained twice, see the module's docstring."""
    with reading(ledger) as db:
        states: dict[str, str] = dict(db.execute("SELECT uid, state FROM groups"))
        (issued,) = db.execute("SELECT MAX(seq) FROM groups").fetchone()
    waiting = {uid for uid, state in states.items() if state not in (TRAINED, DROPPED)}
    weights = Counter(in_weights)
    lost = {prompt.uid for prompt in islice(order, issued)} - weights.keys() - waiting
    repeated = weights.total() - len(weights)
    return len(lost), repeated + sum(states.get(uid) != TRAINED for uid in weights)


def make_config(args: argparse.Namespace, run_dir: Path) -> Config:
    options = [
        f"run_dir={run_dir}",
        f"model.path={args.checkpoint}",
        f"data.train_files=[{args.data / 'train.jsonl'}]",
        f"data.validation_files=[{args.data / 'heldout.jsonl'}]",
        f"trainer.device={args.device}",
        f"rollout.engine.device={args.device}",
        f"trainer.total_steps={args.steps}",
        f"checkpoint.every_steps={min(10, max(1, args.steps // 5))}",
        "checkpoint.export_hf=none",
        "reporting.wandb.mode=disabled",
        *(CUDA_OPTIONS if args.device == "cuda" else CPU_OPTIONS),
        *args.overrides,
    ]
    return load_config(ROOT / "configs/quickstart.yaml", options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-kills", action="store_true", help="only the undisturbed run")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/arith-mimo")
    parser.add_argument("--data", type=Path, default=ROOT / "data/arithmetic")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    if args.steps < 4:
        raise SystemExit(f"--steps: expected at least 4, for kills in two steps between others; found {args.steps}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; expected one, or --device cpu")
    ensure_inputs(args.checkpoint, args.data)
    columns = (
        ("accuracy_before", 3), ("accuracy", 3), ("steps", 0), ("seconds", 1), ("tokens_per_s", 0), ("sync_s", 4),
        ("steps_undone", 0), ("tokens_moved", 0), ("lost", 0), ("trained_twice", 0),
    )  # fmt: skip
    print("run          " + "  ".join(f"{name:>15}" for name, _ in columns), flush=True)
    runs: dict[str, dict[str, Any]] = {}
    for name in ["undisturbed", *([] if args.no_kills else ["with kills"])]:
        with tempfile.TemporaryDirectory(prefix="asyncrl-gpu-run-") as folder:
            config = make_config(args, Path(folder))
            runs[name] = found = asyncio.run(run(config, Path(folder), name == "with kills"))
        print(f"{name:<13}" + "  ".join(f"{found[column]:>15.{digits}f}" for column, digits in columns), flush=True)
    plain = runs["undisturbed"]
    counts = {count: sum(found[count] for found in runs.values()) for count in ("lost", "trained_twice")}
    result = {
        "accuracy": round(plain["accuracy"], 4),
        "accuracy_with_kills": None if args.no_kills else round(runs["with kills"]["accuracy"], 4),
        "seconds": round(plain["seconds"], 2),
        "steps": plain["steps"],
        "tokens_per_s": round(plain["tokens_per_s"], 1),
        "sync_s": round(plain["sync_s"], 5),
        **counts,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    }
    print(json.dumps(result))
    return 1 if any(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
