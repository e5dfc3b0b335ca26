"""Measures throughput, latency and cost of the sample queue. The last line is JSON.

    python -m benchmarks.sample_queue

- ``speedup_over_per_call``: groups per second, from samples in the producer to arrays in the consumer, through the Ray
  actor with everything on disk, over those of an actor that moves one pickled sample per call and keeps nothing on
  disk, as other trainers do. Producer and consumer are separate processes; samples and the number in flight are the
  same. The sample queue takes each group through all its transitions (issue, put, lease, trained, publish, and
  periodically covered), with one call of each kind at a time, as in a run; the other side keeps many calls in flight at
  both ends. The sides take turns; the figure is the median of the windows' ratios. ``…_group_call`` compares with one
  pickled group per call.
- ``latency_p99_ms``: at a quarter of full load, with random arrivals. The larger of two: from a group's arrival at the
  producer until it is acknowledged, hence durable; from the arrival of a batch's last group until the consumer can read
  the batch. The time that a batch takes to fill does not depend on the queue; the table shows it as well. Each is the
  median of the windows' percentiles.
- ``ledger_cpu_share``: CPU seconds of spool, ledger and leases over those of all processes of a quickstart run, Ray's
  included. They run in two threads of the queue's process, the journal's writer and the loop that serves the calls,
  which count whole (``perf/ledger_cpu_s``); the thread that stores snapshots does not. ``ledger_cpu_ms_per_group``:
  these seconds for each group of that run. ``queue_process_cpu_share``: the whole process, with its start and Ray's own
  threads.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.processes.actor_client import ActorClient, start_ray
from asyncrl.rollouter.batching_sender import BatchingSender
from asyncrl.rollouter.held_queue import HeldQueue
from asyncrl.run.cluster import CALLS_AT_ONCE
from asyncrl.run.placement import OBJECT_STORE_BYTES
from asyncrl.sample_queue.actor import SampleQueueActor
from asyncrl.sample_queue.messages import ONLY, Ticket
from asyncrl.trainer.actors import SampleQueueClient
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks import quickstart
from benchmarks.cpu_seconds import CpuSeconds

SAMPLES, TOKENS, PROMPT_TOKENS = 8, 512, 128
GROUPS_PER_STEP, STALENESS_THRESHOLD = 32, 2
GROUPS_IN_FLIGHT = (1 + STALENESS_THRESHOLD) * GROUPS_PER_STEP
COVERED_EVERY_STEPS = 16
CALLS_IN_FLIGHT = 64  # at each end of the per-call queue; neither 16 nor 256 is faster


def samples_of_a_group() -> tuple[np.ndarray, list[Sample]]:
    """A prompt and its samples; each spans two versions."""
    rng = np.random.default_rng(0)
    spans = [VersionSpan(0, PolicyVersion(0, 0)), VersionSpan(TOKENS // 2, PolicyVersion(0, 1))]
    samples = [
        Sample.single(
            index,
            tokens=rng.integers(0, 150_000, TOKENS).astype(np.int32),
            logprobs=-rng.random(TOKENS, dtype=np.float32),
            loss_mask=np.ones(TOKENS, np.bool_),
            spans=spans,
            finish=FinishReason.STOP,
            reward=float(index % 2),
        )
        for index in range(SAMPLES)
    ]
    return rng.integers(0, 150_000, PROMPT_TOKENS).astype(np.int32), samples


# -- the sample queue ----------------------------------------------------------------------------------------------


def start_sample_queue(run_dir: Path) -> Any:
    """Start the actor as a run does, admitting `GROUPS_IN_FLIGHT`."""
    actor = SampleQueueActor.options(max_concurrency=CALLS_AT_ONCE, num_cpus=0)  # type: ignore[attr-defined]
    threshold, endless = (STALENESS_THRESHOLD, 1), 1_000_000_000
    queue = actor.remote(run_dir, GROUPS_PER_STEP, threshold, endless, "fifo", "wait", 150_000, 3, 1, driver_epoch=1)
    ray.get(queue.start.remote())
    return queue


@ray.remote(num_cpus=0)
class Producer:
    """Rollouter side: starts as many groups as admitted; one call hands over all groups that are waiting."""

    def __init__(self, queue: Any) -> None:
        self._queue = HeldQueue(ActorClient(queue, "queue"), ONLY)
        self._prompt, self._samples = samples_of_a_group()
        self._issued = 0

    async def produce(self, groups: int, per_s: float | None = None) -> list[float]:
        """Put ``groups``, with random arrivals ``per_s`` times a second, or as soon as they may start.

        Returns the seconds from each group's arrival until it was acknowledged."""
        acknowledged: list[float] = []

        async def put(arrivals: list[tuple[float, bytes]]) -> None:
            refused, _ = await self._queue.put_and_issue([payload for _, payload in arrivals], (), 0)
            if refused:
                raise RuntimeError(f"expected the queue to accept all groups, found {refused[0]}")
            at_s = now_s()
            acknowledged.extend(at_s - arrived_s for arrived_s, _ in arrivals)

        started: asyncio.Queue[str] = asyncio.Queue()
        sender, gaps, arrived_s = BatchingSender(put), np.random.default_rng(self._issued), now_s()
        async with asyncio.TaskGroup() as tasks:
            carrier = tasks.create_task(sender.run())
            tasks.create_task(self._issue(groups, started))
            for _ in range(groups):
                uid = await started.get()
                if per_s is None:
                    arrived_s = now_s()
                else:
                    arrived_s += gaps.exponential(1 / per_s)
                    await asyncio.sleep(arrived_s - now_s())
                sender.add((arrived_s, self._payload(uid, arrived_s)))
            await sender.drained()
            carrier.cancel()
        return acknowledged

    async def _issue(self, groups: int, started: asyncio.Queue[str]) -> None:
        end = self._issued + groups
        while self._issued < end:
            rows = range(self._issued, min(self._issued + GROUPS_IN_FLIGHT, end))
            tickets = [Ticket(f"0/{row}", str(row), 0, row) for row in rows]
            admitted = await self._queue.issue(tickets, len(tickets))
            self._issued = admitted.issued
            for uid in admitted.started:
                started.put_nowait(uid)

    def _payload(self, uid: str, arrived_s: float) -> bytes:
        times = {"arrived": arrived_s}
        return Group.from_samples(uid, uid, 0, self._prompt, self._samples, times).to_bytes()


@dataclass(frozen=True)
class BatchRead:
    """Arrival times of a batch's groups, and the time at which all could be read."""

    arrived_s: list[float]
    read_s: float


@ray.remote(num_cpus=0)
class Consumer:
    """Trainer side: leases a batch, reads it, and publishes a version after every step."""

    def __init__(self, queue: Any) -> None:
        self._queue = SampleQueueClient(queue, "queue")
        self._step = 0

    async def start(self) -> None:
        await self._queue.publish(PolicyVersion(0, 0))
        await self._queue.announce(PolicyVersion(0, 1))  # each sample spans both

    async def consume(self, groups: int) -> list[BatchRead]:
        batches = []
        for _ in range(groups // GROUPS_PER_STEP):
            self._step += 1
            _, payload = await self._queue.lease(self._step, GROUPS_PER_STEP)
            found = [Group.from_buffer(buffer) for buffer in await payload]
            batches.append(BatchRead([group.times["arrived"] for group in found], now_s()))
            assert all(len(group.tokens) == len(group.logprobs) == SAMPLES * TOKENS for group in found)
            await self._queue.trained(self._step)
            await self._queue.publish(PolicyVersion(0, self._step))
            if self._step % COVERED_EVERY_STEPS == 0:
                await self._queue.covered(self._step)
        return batches


# -- one pickled object per call -----------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)
class PerCallQueue:
    """Bounded in-memory queue."""

    def __init__(self, size: int) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(size)

    async def put_sample(self, sample: bytes) -> None:
        await self._queue.put(sample)

    async def get_sample(self) -> bytes:
        return await self._queue.get()


@ray.remote(num_cpus=0)
class PerCallEnd:
    """Producer or consumer of lists of ``samples_per_call`` samples."""

    def __init__(self, queue: Any, samples_per_call: int) -> None:
        self._queue = queue
        prompt, samples = samples_of_a_group()
        columns = [
            {
                "uid": str(s.index),
                "prompt_tokens": prompt,
                "tokens": s.sequences[0].tokens,
                "logprobs": s.sequences[0].logprobs,
                "loss_mask": s.sequences[0].loss_mask,
                "version_starts": np.array([span.start for span in s.sequences[0].spans], np.int32),
                "versions": np.array([span.version for span in s.sequences[0].spans], np.int64),
                "reward": s.reward,
            }
            for s in samples
        ]
        self._objects = [columns[i : i + samples_per_call] for i in range(0, SAMPLES, samples_per_call)]

    async def produce(self, groups: int) -> None:
        async def put(samples: list[dict[str, Any]]) -> None:
            await self._queue.put_sample.remote(cloudpickle.dumps(samples))

        await self._for_each_object(groups, put)

    async def consume(self, groups: int) -> None:
        async def get(_: list[dict[str, Any]]) -> None:
            samples = cloudpickle.loads(await self._queue.get_sample.remote())
            assert all(len(sample["tokens"]) == len(sample["logprobs"]) == TOKENS for sample in samples)

        await self._for_each_object(groups, get)

    async def _for_each_object(self, groups: int, call: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> None:
        objects = iter(self._objects * groups)

        async def carry() -> None:
            for item in objects:
                await call(item)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CALLS_IN_FLIGHT):
                tasks.create_task(carry())


# -- throughput and latency ----------------------------------------------------------------------------------------

Move = Callable[[int], float]  # moves this many groups from end to end, returns the seconds taken


def timed(producer: Any, consumer: Any) -> Move:
    def move(groups: int) -> float:
        started_s = time.perf_counter()
        ray.get([producer.produce.remote(groups), consumer.consume.remote(groups)])
        return time.perf_counter() - started_s

    return move


def per_call(samples_per_call: int) -> Move:
    in_flight = GROUPS_IN_FLIGHT * SAMPLES // samples_per_call
    queue = PerCallQueue.remote(in_flight - CALLS_IN_FLIGHT)  # type: ignore[attr-defined]
    producer, consumer = (PerCallEnd.remote(queue, samples_per_call) for _ in range(2))  # type: ignore[attr-defined]
    return timed(producer, consumer)


def whole_steps(groups: float) -> int:
    return math.ceil(groups / GROUPS_PER_STEP) * GROUPS_PER_STEP


def rates(sides: Mapping[str, Move], windows: int, window_s: float) -> dict[str, list[float]]:
    """Groups per second of each side in each of ``windows``, in turns, after a warm-up."""
    groups = {}
    for name, move in sides.items():
        move(GROUPS_PER_STEP)
        groups[name] = whole_steps(window_s * 4 * GROUPS_PER_STEP / move(4 * GROUPS_PER_STEP))
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(windows):
        for name, move in sides.items():
            found[name].append(groups[name] / move(groups[name]))
    return found


def latencies_ms(producer: Any, consumer: Any, per_s: float, windows: int, window_s: float) -> dict[str, np.ndarray]:
    """50th and 99th percentile and maximum over a window's arrivals, medians over ``windows``: [3] by name."""
    groups = whole_steps(per_s * window_s)
    found: dict[str, list[np.ndarray]] = {"durable": [], "readable": [], "readable_with_fill": []}
    for _ in range(windows):
        acknowledged, batches = ray.get([producer.produce.remote(groups, per_s), consumer.consume.remote(groups)])
        seconds = {
            "durable": acknowledged,
            "readable": [batch.read_s - max(batch.arrived_s) for batch in batches],
            "readable_with_fill": [batch.read_s - arrived_s for batch in batches for arrived_s in batch.arrived_s],
        }
        for name, values in seconds.items():
            found[name].append(np.percentile(values, [50, 99, 100]) * 1e3)
    return {name: np.median(values, axis=0) for name, values in found.items()}


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """Context with a Ray cluster."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-ray-", ignore_cleanup_errors=True) as folder:
        start_ray(
            num_cpus=1,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="ERROR",
            _temp_dir=folder,
        )
        try:
            yield
        finally:
            ray.shutdown()


def sync_ms(folder: Path) -> float:
    """Time to flush one MiB to the disk of ``folder``; near zero means that the figures involve no disk."""
    times_s = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(20):
            file.write(bytes(1 << 20))
            started_s = time.perf_counter()
            os.fdatasync(file.fileno())
            times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s) * 1e3


# -- share of a run's CPU time -------------------------------------------------------------------------------------

QUEUE_PROCESS = "ray::SampleQueueActor"


def quickstart_cpu(steps: int, checkpoint: Path, data: Path) -> tuple[CpuSeconds, float, float]:
    """CPU seconds of a quickstart of ``steps``: all processes, and the queue's two threads; and its groups.

    Raises SystemExit if the queue's process was not found or the run failed."""
    quickstart.ensure_inputs(checkpoint, data)
    # little validation: it costs the queue nothing, and runs only twice whatever the number of steps
    overrides = [f"trainer.total_steps={steps}", "validation.max_prompts=64"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as name, CpuSeconds(QUEUE_PROCESS) as cpu:
        summary = quickstart.run(0, checkpoint, data, Path(name), overrides)
    if math.isnan(cpu.process_s):
        raise SystemExit(f"expected a process named {QUEUE_PROCESS}, found none")
    return cpu, summary["perf/ledger_cpu_s"], summary["count/issued"]


# -- the report ----------------------------------------------------------------------------------------------------


def measure_queue(windows: int, window_s: float, latency_window_s: float) -> dict[str, float]:
    """Measure throughput and latency, and print their tables. Returns the figures of the last line."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as folder, ray_cluster():
        disk_ms = sync_ms(Path(folder))
        queue = start_sample_queue(Path(folder) / "run")
        producer, consumer = Producer.remote(queue), Consumer.remote(queue)  # type: ignore[attr-defined]
        ray.get(consumer.start.remote())
        sides = {
            "the sample queue, durable": timed(producer, consumer),
            "one pickled sample per call, in memory": per_call(1),
            "one pickled group per call, in memory": per_call(SAMPLES),
        }
        found = rates(sides, windows, window_s)
        ours, per_sample, per_group = found.values()
        full_load = statistics.median(ours)
        print(
            f"{os.cpu_count()} cores; groups of {SAMPLES} samples of {TOKENS} tokens, {GROUPS_IN_FLIGHT} in flight\n"
            f"medians of {windows} windows of {window_s:g} s; fdatasync of 1 MiB: {disk_ms:.2f} ms\n"
        )
        print(f"{'':54}{'groups/s':>10}{'samples/s':>11}{'from':>10}{'to':>8}")
        for name, values in found.items():
            median = statistics.median(values)
            print(f"{name:54}{median:10.0f}{median * SAMPLES:11.0f}{min(values):10.0f}{max(values):8.0f}")
        latencies = latencies_ms(producer, consumer, full_load / 4, windows, latency_window_s)
    rows = {
        "a group's arrival until it is durable": "durable",
        "a batch's last arrival until the batch is readable": "readable",
        "a group's arrival until its batch is readable": "readable_with_fill",
    }
    load = f"at {full_load / 4:.0f} groups/s, batches of {GROUPS_PER_STEP}"
    print(f"\n{load:54}{'p50 ms':>10}{'p99 ms':>11}{'max ms':>10}")
    for name, key in rows.items():
        p50, p99, most = latencies[key]
        print(f"{name:54}{p50:10.1f}{p99:11.1f}{most:10.1f}", flush=True)
    p99_ms = {key: float(latencies[key][1]) for key in ("durable", "readable")}
    return {
        "speedup_over_per_call": statistics.median(a / b for a, b in zip(ours, per_sample)),
        "latency_p99_ms": max(p99_ms.values()),
        "speedup_over_per_group_call": statistics.median(a / b for a, b in zip(ours, per_group)),
        "groups_per_s": full_load,
        "durable_p99_ms": p99_ms["durable"],
        "readable_p99_ms": p99_ms["readable"],
    }


def measure_cpu(steps: int, checkpoint: Path, data: Path) -> dict[str, float]:
    """Measure CPU seconds of a quickstart, and print their table. Returns the figures of the last line."""
    cpu, ledger_s, groups = quickstart_cpu(steps, checkpoint, data)
    rows = {
        "all processes": cpu.all_s,
        "spool, ledger and leases": ledger_s,
        "the queue's process, with its start and Ray's threads": cpu.process_s,
    }
    print(f"\n{f'a quickstart of {steps} steps':54}{'CPU s':>10}{'share':>11}")
    for name, seconds in rows.items():
        print(f"{name:54}{seconds:10.2f}{seconds / cpu.all_s:11.2%}")
    return {
        "ledger_cpu_share": ledger_s / cpu.all_s,
        "ledger_cpu_ms_per_group": ledger_s / groups * 1e3,
        "queue_process_cpu_share": cpu.process_s / cpu.all_s,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument("--latency-window-s", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=24, help="steps of the quickstart; 0: skip it")
    parser.add_argument("--checkpoint", type=Path, default=quickstart.ROOT / "checkpoints/arith-mimo")
    parser.add_argument("--data", type=Path, default=quickstart.ROOT / "data/arithmetic")
    args = parser.parse_args(arguments)
    figures = measure_queue(args.windows, args.window_s, args.latency_window_s)
    if args.steps:
        figures |= measure_cpu(args.steps, args.checkpoint, args.data)
    print("\n" + json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
