"""What the sample queue costs: `python -m benchmarks.sample_queue`. Ends with one line of JSON.

- ``speedup_over_per_call``: groups per second from the samples in the producer's hands to the arrays in the consumer's,
  through the Ray actor with everything durable, over those of a queue actor that moves one pickled sample per call and
  keeps nothing on disk, as other trainers have it. Both have a producer and a consumer in processes of their own, the
  same samples, and at most as many of them in flight; ours goes through the whole life of a group as in a run
  (issue, put, lease, trained, publish, and covered now and then), and the other keeps many calls under way on each
  side. They take turns; medians of all windows. A third row moves a whole pickled group per call, also without a disk.
- ``latency_p99_ms``: the same queue at a quarter of its full load, groups that arrive at random. From a group's arrival
  to the acknowledgement that it is durable, and to the moment when the consumer can read it; the larger of both.
- ``ledger_cpu_share``: CPU seconds that the queue's process takes in a quickstart run, from the opening of the ledger to
  the end, over those of all processes of the run. An upper bound for spool, ledger and leases: Ray's part of that
  process is in it too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray import cloudpickle

from asyncrl.ray_client import ActorClient
from asyncrl.rollouter.outbox import Outbox
from asyncrl.sample import FinishReason, Group, PolicyVersion, Sample, VersionSpan
from asyncrl.sample_queue.actor import SampleQueueActor
from asyncrl.sample_queue.core import Ticket
from asyncrl.telemetry.recorder import now_s
from asyncrl.trainer.actors import QueueOfRay
from benchmarks import quickstart

SAMPLES, TOKENS, PROMPT_TOKENS = 8, 512, 128
GROUPS_PER_STEP, THRESHOLD = 32, 2  # as in configs/quickstart.yaml
IN_FLIGHT = (1 + THRESHOLD) * GROUPS_PER_STEP
COVERED_EVERY = 16  # steps
CALLS_AT_ONCE = 1000  # of one actor, as in asyncrl.cluster


def samples_of_a_group() -> tuple[np.ndarray, list[Sample]]:
    """A prompt and the samples that answer it, the second half of each sampled under a newer version."""
    rng = np.random.default_rng(0)
    spans = [VersionSpan(0, PolicyVersion(0, 0)), VersionSpan(TOKENS // 2, PolicyVersion(0, 1))]
    samples = [
        Sample(
            index,
            rng.integers(0, 150_000, TOKENS).astype(np.int32),
            -rng.random(TOKENS, dtype=np.float32),
            np.ones(TOKENS, np.bool_),
            spans,
            FinishReason.STOP,
            reward=float(index % 2),
        )
        for index in range(SAMPLES)
    ]
    return rng.integers(0, 150_000, PROMPT_TOKENS).astype(np.int32), samples


# -- the sample queue ----------------------------------------------------------------------------------------------


def start_sample_queue(run_dir: Path) -> Any:
    """The actor that a run starts, with a staleness budget of `IN_FLIGHT` groups."""
    actor = SampleQueueActor.options(max_concurrency=CALLS_AT_ONCE, num_cpus=0)  # type: ignore[attr-defined]
    return actor.remote(run_dir, GROUPS_PER_STEP, (THRESHOLD, 1), 1_000_000_000)


@ray.remote(num_cpus=0)
class Producer:
    """The rollouter's side: issues as many groups as it may, and puts whatever is finished with one call."""

    def __init__(self, queue: Any) -> None:
        self._queue = ActorClient(queue, "queue")
        self._prompt, self._samples = samples_of_a_group()
        self._made = 0

    async def produce(self, groups: int, per_s: float | None) -> list[float]:
        """``groups`` of them, at random moments ``per_s`` times a second or at once when admitted. Returns the seconds
        from each one's arrival until it was acknowledged."""
        acknowledged: list[float] = []

        async def put(finished: list[tuple[bytes, float]]) -> None:
            await self._queue.put([payload for payload, _ in finished], now_s())
            at_s = now_s()
            acknowledged.extend(at_s - arrived_s for _, arrived_s in finished)

        outbox, gaps = Outbox(put), np.random.default_rng(self._made)
        admitted: asyncio.Queue[str] = asyncio.Queue()

        async def issue() -> None:
            issued = 0
            while issued < groups:
                wanted = min(IN_FLIGHT, groups - issued)
                tickets = [Ticket(f"0/{self._made + i}", f"{self._made + i}", 0) for i in range(wanted)]
                count = await self._queue.issue(tickets)
                for ticket in tickets[:count]:
                    admitted.put_nowait(ticket.uid)
                issued += count
                self._made += count

        async with asyncio.TaskGroup() as tasks:
            carrier = tasks.create_task(outbox.run())
            tasks.create_task(issue())
            due_s = now_s()
            for _ in range(groups):
                uid = await admitted.get()
                if per_s:
                    due_s += gaps.exponential(1 / per_s)
                    await asyncio.sleep(due_s - now_s())
                else:
                    due_s = now_s()
                outbox.add((self._group(uid, due_s), due_s))
            await outbox.emptied()
            carrier.cancel()
        return acknowledged

    def _group(self, uid: str, arrived_s: float) -> bytes:
        times = {"arrived": arrived_s}
        return Group.from_samples(uid, uid, 0, self._prompt, self._samples, times).to_bytes()


@ray.remote(num_cpus=0)
class Consumer:
    """The trainer's side: leases a batch, reads it, and publishes a version after each step."""

    def __init__(self, queue: Any) -> None:
        self._queue = QueueOfRay(queue, "queue")
        self._step = 0

    async def start(self) -> None:
        await self._queue.publish(PolicyVersion(0, 0))

    async def consume(self, groups: int) -> list[float]:
        """Returns the seconds from each group's arrival until it could be read."""
        handed_over: list[float] = []
        while len(handed_over) < groups:
            self._step += 1
            _, payload = await self._queue.lease(self._step, GROUPS_PER_STEP, now_s())
            batch = [Group.from_buffer(buffer) for buffer in await payload]
            at_s = now_s()
            assert all(len(group.tokens) == len(group.logprobs) == SAMPLES * TOKENS for group in batch)
            handed_over += [at_s - group.times["arrived"] for group in batch]
            await self._queue.trained(self._step)
            await self._queue.publish(PolicyVersion(0, self._step))
            if self._step % COVERED_EVERY == 0:
                await self._queue.covered(self._step)
        return handed_over


# -- one pickled object per call -----------------------------------------------------------------------------------


@ray.remote(num_cpus=0, max_concurrency=4 * CALLS_AT_ONCE)
class PerCallQueue:
    """A bounded queue in memory, one object per call."""

    def __init__(self, size: int) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(size)

    async def put_sample(self, sample: bytes) -> None:
        await self._queue.put(sample)

    async def get_sample(self) -> bytes:
        return await self._queue.get()


async def keep_under_way(calls: int, count: int, call: Callable[[], Awaitable[None]]) -> None:
    """``count`` calls in all, up to ``calls`` of them at a time."""
    left = iter(range(count))

    async def carry() -> None:
        for _ in left:
            await call()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(calls, count)):
            tasks.create_task(carry())


@ray.remote(num_cpus=0)
class PerCallEnd:
    def __init__(self, queue: Any, samples_per_call: int, calls: int) -> None:
        self._queue, self._calls = queue, calls
        prompt, samples = samples_of_a_group()
        fields = [
            {
                "uid": f"0/{s.index}",
                "prompt_tokens": prompt,
                "tokens": s.tokens,
                "logprobs": s.logprobs,
                "loss_mask": s.loss_mask,
                "versions": np.repeat([span.version.number for span in s.spans], TOKENS // len(s.spans)).astype(np.int32),
                "reward": s.reward,
            }
            for s in samples
        ]
        self._objects: list[Any] = fields if samples_per_call == 1 else [fields]

    async def produce(self, groups: int) -> None:
        objects = iter(self._objects * groups)

        async def put() -> None:
            await self._queue.put_sample.remote(cloudpickle.dumps(next(objects)))

        await keep_under_way(self._calls, groups * len(self._objects), put)

    async def consume(self, groups: int) -> None:
        async def get() -> None:
            found = cloudpickle.loads(await self._queue.get_sample.remote())
            for sample in found if isinstance(found, list) else [found]:
                assert len(sample["tokens"]) == len(sample["logprobs"]) == TOKENS

        await keep_under_way(self._calls, groups * len(self._objects), get)

def proc():
    me=os.getpid()
    out={}
    for p in psutil.Process(me).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            t=p.cpu_times(); out[p.name()[:25]+str(p.pid)]=t.user+t.system
    t=time.process_time(); out["driver"]=t
    return out

def main():
    tmp=tempfile.mkdtemp(prefix="asyncrl-")
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", _temp_dir=tmp+"/ray", object_store_memory=512*1024*1024)
    q=start_sample_queue(Path(tmp)/"run")
    p=Producer.remote(q); c=Consumer.remote(q)
    ray.get(c.start.remote())
    def ours(n, rate=None):
        s=time.perf_counter()
        a,b=ray.get([p.produce.remote(n,rate), c.consume.remote(n)])
        return time.perf_counter()-s,a,b
    ours(64)
    for n in (2048,4096,4096):
        b=proc(); el,_,_=ours(n); a=proc()
        print("ours",n/el, {k:round(v-b.get(k,0),2) for k,v in a.items() if v-b.get(k,0)>.02}, el)
    for r in (200,400,600):
        el,a,b=ours(r*4//32*32,r)
        print("lat",r,r*4/el,np.percentile(a,[50,99])*1e3,np.percentile(b,[50,99])*1e3)
    sides={}
    for spc,calls in ((1,16),(1,64),(1,256),(1,768),(8,96)):
        pq=PerCallQueue.remote(IN_FLIGHT*SAMPLES//spc)
        pp=PerCallEnd.remote(pq,spc,calls); pc=PerCallEnd.remote(pq,spc,calls)
        def go(n):
            s=time.perf_counter()
            ray.get([pp.produce.remote(n), pc.consume.remote(n)])
            return n/(time.perf_counter()-s)
        go(32)
        b=proc(); v=[go(256 if spc==1 else 1024) for _ in range(3)]; a=proc()
        print(spc,calls,v, {k:round(v-b.get(k,0),2) for k,v in a.items() if v-b.get(k,0)>.02})
    ray.shutdown(); shutil.rmtree(tmp)
if __name__=="__main__": main()
