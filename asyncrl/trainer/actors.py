"""Trainer ranks as Ray actors, and the rank group that the training loop calls."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import ray

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.log import LogConfig
from asyncrl.observability.telemetry.recorder import Batch, Recorder
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.listener import count_refusals
from asyncrl.processes.actor_client import ActorBroken, ActorClient, SupervisedActor
from asyncrl.processes.device_errors import is_device_error
from asyncrl.sample_queue.messages import Lease
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.types.groups import Group

log = logging.getLogger(__name__)

T = TypeVar("T")

Drawn = tuple[float, bytes]  # a group, and the random number by which it was drawn


def draw(kept: Sequence[Drawn], groups: Sequence[bytes], count: int, seed: str) -> list[Drawn]:
    """Of all groups of a batch that comes in parts, ``count`` drawn uniformly: those of the lowest random numbers.
    ``kept``: what was drawn of the parts before."""
    numbers = random.Random(seed)
    return heapq.nsmallest(count, [*kept, *((numbers.random(), group) for group in groups)], key=itemgetter(0))


@ray.remote
class TrainerRankActor(SupervisedActor):
    """One rank. One thread does all computation, so the actor keeps answering telemetry calls; another writes
    checkpoints while training continues. ``loopback``: its sockets listen there, else at its machine's address."""

    def __init__(
        self, config: Config, rank: int, world_size: int, loopback: bool, logs: LogConfig | None = None
    ) -> None:
        super().__init__(f"trainer/{rank}", logs)
        import torch

        torch.set_num_threads(config.trainer.threads)
        self._config, self._rank, self._world_size = config, rank, world_size
        self._host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        self._recorder = Recorder(self.name)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._core: Any = None
        self._sender: Any = None
        self._store: Any = None
        self._drawn: Sequence[Drawn] = []  # groups of the last batch, for `drawn_groups`
        self._mask_before: int | None = None

    async def rendezvous(self) -> str:
        """Rendezvous address of the ranks. It listens from now on, because another program could take a free port
        before the ranks are ready."""
        from asyncrl.param_sync.transports.process_group import host_store

        self._store = host_store(self._host, shared=True)
        return f"tcp://{self._host}:{self._store.port}"

    async def start(self, init_method: str | None) -> None:
        def build() -> None:
            from asyncrl.param_sync.sender import Sender
            from asyncrl.param_sync.transports.choose import make_writer
            from asyncrl.trainer.rank import TrainerRank

            self._core = TrainerRank(self._config, self._rank, self._world_size, init_method, self._recorder)
            # the backend's export yields on rank 0, which therefore sends
            sync = self._config.param_sync
            writer = make_writer(sync.transport, 0, sync.bucket_bytes, self._host) if self._rank == 0 else None
            self._sender = Sender(self.name, writer)
            backend = self._config.trainer.backend
            log.info("training with the %s backend, rank %d of %d", backend, self._rank, self._world_size)

        await self._compute(build)

    async def train(
        self, step: int, payload: Sequence[bytes], mask_before: int | None, version: float, part: int, parts: int
    ) -> tuple[dict[str, float], list[SamplerKL]]:
        if self._rank == 0:
            kept, count = self._drawn if part else (), self._config.reporting.trajectories_per_step
            self._drawn = draw(kept, payload, count, f"{step}.{part}")
        self._mask_before = mask_before
        metrics = await self._compute(lambda: self._core.train(step, payload, mask_before, version, part, parts))
        return metrics, self._core.sampler_kl

    async def drawn_groups(self) -> list[bytes]:
        """Of rank 0: ``reporting.trajectories_per_step`` groups of the last batch, drawn uniformly, as they were
        trained, for people to read."""
        from asyncrl.trainer.batches import as_trained

        options = self._config.algorithm
        groups = (Group.from_buffer(group) for _, group in self._drawn)
        return [as_trained(group, self._mask_before, options).to_bytes() for group in groups]

    async def stage(self) -> None:
        await self._compute(lambda: self._core.stage())

    async def write(self, path: Path) -> None:
        await self._in(self._writer, lambda: self._core.write(path))

    async def load(self, path: Path) -> None:
        await self._compute(lambda: self._core.load(path))

    async def export_hf(self, path: Path) -> None:
        await self._compute(lambda: self._core.export_hf(path))

    # the sending side of a sync session, see asyncrl.param_sync.session_protocol.SenderSession

    async def offer(self) -> Offer | None:
        address = self._sender.address
        return Offer(self._core.manifest(), address) if address is not None else None

    async def send(self, plan: SendPlan) -> SendReport:
        def export_and_send() -> SendReport:
            with self._recorder.span("trainer/export", version=str(plan.version)):
                self._sender.open(plan)
                return self._sender.send(self._core.export(plan.manifest.sends_base))

        return await self._compute(export_and_send)

    async def abort(self, session: str) -> None:
        self._sender.abort(session)

    async def drain(self) -> Batch:
        count_refusals(self._recorder)
        return self._recorder.drain()

    async def _compute(self, work: Callable[[], T]) -> T:
        return await self._in(self._thread, work)

    async def _in(self, thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Result of ``work``. Raises ActorBroken if it lost the device."""
        try:
            return await asyncio.get_running_loop().run_in_executor(thread, work)
        except Exception as e:
            if not is_device_error(e):
                raise
            log.exception("lost its device")
            raise ActorBroken(self.name, f"{type(e).__name__}: {e}") from None


class SampleQueueClient(ActorClient):
    """The trainer's client of the queue actor: a lease's payload stays a reference, which the ranks resolve."""

    async def alive(self) -> None:
        """Never retried, unlike other calls to the queue: Ray would log the retry at the end of each run."""
        with self._translated():
            await self.handle.alive.options(max_task_retries=0).remote()

    async def lease(self, step: int, count: int, having: Sequence[str] = ()) -> tuple[Lease, Any]:
        lease, payload = self.handle.lease.remote(step, count, having)
        with self._translated():
            return await lease, payload


class RankGroup:
    """All ranks: each call goes to every rank at once, and the first exception is raised immediately.

    A rank answers telemetry calls while its computation hangs. One that has not ended ``train``, ``stage``, ``load`` or
    ``export_hf`` within ``limit_s`` counts as dead: raises ActorBroken."""

    def __init__(self, ranks: Sequence[ActorClient], limit_s: float | None = None) -> None:
        self._ranks, self._limit_s = list(ranks), limit_s

    async def start(self) -> None:
        init_method = await self._ranks[0].rendezvous() if len(self._ranks) > 1 else None
        await self._all(lambda rank: rank.start(init_method))

    async def train(
        self, step: int, payload: Any, mask_before: int | None, version: float, part: int = 0, parts: int = 1
    ) -> tuple[dict[str, float], list[SamplerKL]]:
        train = lambda rank: rank.train(step, payload, mask_before, version, part, parts)
        return (await self._all(train, self._limit_s))[0]

    async def drawn_groups(self) -> list[bytes]:
        return await self._ranks[0].drawn_groups()

    async def stage(self) -> None:
        """Copy the state of all ranks; training may continue after the return."""
        await self._all(lambda rank: rank.stage(), self._limit_s)

    async def write(self, path: Path) -> None:
        """Write the last staged state while the ranks train; the next `stage` must wait for the return."""
        await self._all(lambda rank: rank.write(path))

    async def load(self, path: Path) -> None:
        await self._all(lambda rank: rank.load(path), self._limit_s)

    async def export_hf(self, path: Path) -> None:
        await self._all(lambda rank: rank.export_hf(path), self._limit_s)

    async def _all(self, call: Callable[[ActorClient], Any], limit_s: float | None = None) -> list[Any]:
        calls = [asyncio.ensure_future(call(rank)) for rank in self._ranks]
        try:
            async with asyncio.timeout(limit_s) as deadline:
                return await asyncio.gather(*calls)
        except TimeoutError:
            if not deadline.expired():
                raise
            late = [rank.name for rank, made in zip(self._ranks, calls, strict=True) if made.cancelled()]
            why = f"a call has not ended for {limit_s:g} s (supervision.train_s)"
            raise ActorBroken(", ".join(late) or self._ranks[0].name, why) from None
