"""A run without Ray and models, in one process: the project's own queue, journal, run folder, checkpoints and training
loop, with a simulated rollouter and simulated ranks that take no time.

The ranks' weights are the digest of all groups trained, in order, so a group that is lost, trained twice or trained in
another order shows in them. What must survive any fault goes to a record outside of the run's disk.
"""

import asyncio
import contextlib
import json
import os
import random
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import xxhash

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.run.run_folder import RunFolder
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.group_state import QueueError
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.messages import Admitted, Holder, Refusal, Snapshot, Ticket
from asyncrl.trainer.loop import TrainLoop
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

VOCAB, TOKENS = 1000, 40
SEGMENT_BYTES = 16 * 1024


@dataclass(frozen=True)
class Setting:
    """Of a whole storm. ``batch``: groups per step; ``shards``: rollouters, at most."""

    steps: int = 40
    batch: int = 2
    staleness: str = "1"
    policy: str = "fifo"
    overdue: str = "wait"
    journal_dir: bool = False
    shards: int = 1

    def options(self, folder: Path) -> list[str]:
        journal = [f"journal_dir={folder / 'local'}"] if self.journal_dir else []
        return [
            f"run_dir={folder / 'run'}",
            "name=torture",
            "model.path=none",
            "reward.function=arithmetic",
            f"trainer.total_steps={self.steps}",
            f"trainer.mini_batch_groups={self.batch}",
            "rollout.n=8",  # enough for a batch to come in parts
            f"async_training.staleness_threshold={self.staleness}",
            f"async_training.queue_policy={self.policy}",
            f"async_training.overdue={self.overdue}",
            "checkpoint.every_steps=3",
            "checkpoint.export_hf=none",
            "supervision.max_restarts=1000",
            *journal,
        ]


class Survivors:
    """What the world has been told to be safe, appended to a file that no fault touches."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *entry) -> None:
        os.write(self._fd, (json.dumps(entry) + "\n").encode())


def uid_of(number: int) -> str:
    return f"g{number:06d}"


def weights_after(batches, before: str = "") -> str:
    for uids in batches:
        before = xxhash.xxh3_64_hexdigest(f"{before} {' '.join(uids)}".encode())
    return before


class RankDied(RuntimeError):
    pass


class World:
    """One incarnation of the run's processes. ``chaos`` decides what happens when."""

    def __init__(self, folder: Path, setting: Setting, survivors: Survivors, chaos: random.Random, disk) -> None:
        self.setting, self.survivors, self.chaos = setting, survivors, chaos
        config = load_config(None, setting.options(folder))
        self.config, self.derived = config, derive(config)
        self.folder = RunFolder.open(config, "auto", SimpleNamespace(prompts_fingerprint="torture"))
        self.journal = Journal(
            self.folder.journal,
            {"prompts": "torture"},
            driver_epoch=self.folder.epoch.number,
            segment_bytes=SEGMENT_BYTES,
            disk=disk,
        )
        total = self.derived.total_groups
        admission = Admission(self.derived.groups_per_version, Fraction(setting.staleness), total)
        self._shards = 1 + self.folder.epoch.number % setting.shards  # another number after each resume
        self.queue = SampleQueue(admission, self.journal, setting.policy, setting.overdue, VOCAB, shards=self._shards)
        for group in self.journal.recover().groups:
            if group.state != "in_flight":
                assert Group.from_buffer(self.journal.read(group.uid)).uid == group.uid
        self.weights, self.staged, self.deaths = "", "", 0
        self._uids: list[str] = []  # of the parts of a step
        self.served = PolicyVersion(0, 0)
        self._holder = self.folder.epoch.number * 1000
        self._rolling: dict[int, asyncio.Task] = {}  # by shard
        self._late: set[asyncio.Task] = set()  # calls of rollouters, which outlive them

    async def run(self) -> None:
        recorder, config = Recorder("driver"), self.config
        checkpoints, copy = self.folder.checkpoints, self.folder.journal_copy
        loop = TrainLoop(config, self.derived, self, self, self, self, self, self, recorder, checkpoints, copy)
        await loop.begin(self.folder.checkpoint)
        await self.reset()
        nemesis = asyncio.create_task(self._nemesis())
        training = asyncio.create_task(loop.run())
        done, _ = await asyncio.wait([training, nemesis], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        nemesis.cancel()
        self.folder.epoch.check()
        self.folder.epoch.end()
        await self.journal.close()

    async def _nemesis(self) -> None:
        """Replaces rollouters at any time; their calls arrive late."""
        while True:
            await asyncio.sleep(self.chaos.expovariate(1 / 0.05))
            self._roll_out(self.chaos.randrange(self._shards) if self._shards > 1 else 0)

    # -- ranks ---------------------------------------------------------------------------------------------------------

    async def train(self, step, payload, mask_before, version, part, parts):
        await asyncio.sleep(0)
        if self.chaos.random() < 0.01:
            self.weights, self.deaths = "", self.deaths + 1
            raise RankDied
        self._uids = [*(self._uids if part else ()), *(Group.from_buffer(data).uid for data in payload)]
        if part == parts - 1:
            self.weights = weights_after([sorted(self._uids)], self.weights)
        return {}, []

    async def stage(self):
        self.staged = self.weights

    async def write(self, path):
        path.mkdir()
        (path / "weights").write_text(self.staged)
        (path / "optimizer").write_bytes(bytes(self.chaos.randint(1, 20_000)))

    async def load(self, path):
        self.weights = (path / "weights").read_text()

    async def lost(self, error):
        return "a rank died" if isinstance(error, RankDied) else None

    async def restart(self, why):
        self.weights = ""

    # -- sync ----------------------------------------------------------------------------------------------------------

    async def __call__(self, version, on_sent):
        self.survivors.note("version", *version, self.weights)
        await asyncio.sleep(self.chaos.random() * 0.002)
        self.served = version
        return {}

    async def someone_to_join(self):
        await asyncio.Event().wait()

    def stranded(self):
        return False

    # -- validation and observer ---------------------------------------------------------------------------------------

    async def finished(self): ...
    async def validate(self, progress): ...
    async def on_version(self, progress): ...
    async def on_end(self, progress, queue): ...

    async def on_step(self, progress, metrics):
        return metrics

    # -- the queue, as the training loop calls it ----------------------------------------------------------------------

    def __getattr__(self, name):
        return getattr(self.queue, name)

    async def lease(self, *args):
        """Comes in the order of this caller's calls, but waits on after its caller has gone."""
        return await self._made(self.queue.lease(*args))

    async def copy_to(self, folder):
        await self.journal.copy_to(folder)

    async def covered(self, step):
        await self.queue.covered(step)
        self.survivors.note("covered", step)

    # -- the rollouter -------------------------------------------------------------------------------------------------

    async def reset(self):
        for shard in range(self._shards):
            self._roll_out(shard)

    def _roll_out(self, shard: int) -> None:
        """A new rollouter; the one before dies, but not the calls that it has made."""
        if shard in self._rolling:
            self._rolling[shard].cancel()
        self._holder += 1
        self._rolling[shard] = asyncio.create_task(self._rollouter(Holder(shard, self._holder)))

    async def _call(self, call, *args):
        """A call of the queue that may arrive late, and that a cancelled caller cannot take back."""

        async def later():
            await asyncio.sleep(self.chaos.choice((0, 0, 0, self.chaos.random() * 0.02)))
            return await call(*args)

        return await self._made(later())

    async def _made(self, call):
        """A call that its caller cannot take back."""
        task = asyncio.create_task(call)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return await asyncio.shield(task)

    async def _rollouter(self, holder: Holder) -> None:
        with contextlib.suppress(QueueError):  # another one has taken over
            recovery = await self._call(self.queue.recover, holder)
            waiting = {item.uid: item.attempt for item in recovery.in_flight}
            number, asking = recovery.issued, []
            async with asyncio.TaskGroup() as groups:
                groups.create_task(self._overdue(holder))
                while True:
                    while len(waiting) < 4:
                        waiting[uid_of(number)] = 0
                        number += 1
                    tickets = [Ticket(uid, uid, 0, int(uid[1:])) for uid in waiting]
                    started, passed, issued, *_ = await self._issue(tickets, asking, holder)
                    if not (started or passed):
                        return
                    number = max(number, issued)
                    for uid in passed:
                        del waiting[uid]
                    for uid in started:
                        groups.create_task(self._group(uid, waiting.pop(uid), asking, holder))

    async def _issue(self, tickets: list[Ticket], asking: list, holder: Holder) -> Admitted:
        """Asks with the next groups that end, if some do soon and leave room."""
        if self.chaos.random() < 0.5:
            request = tickets, asyncio.get_running_loop().create_future()
            asking.append(request)
            await asyncio.sleep(0.002)
            if request in asking:
                asking.remove(request)
            elif (admitted := await request[1]).started or admitted.passed:
                return admitted
        return await self._call(self.queue.issue, tickets, len(tickets), holder)

    async def _put(self, group: bytes, asking: list, holder: Holder) -> list[Refusal]:
        tickets, answer = asking.pop() if asking else ([], asyncio.Future())
        try:
            refusals, admitted = await self._call(self.queue.put_and_issue, [group], tickets, len(tickets), holder)
        except QueueError:  # another one has taken over
            answer.cancel()
            raise
        if not answer.done():  # that of a cancelled task is
            answer.set_result(admitted)
        return refusals

    async def _overdue(self, holder: Holder) -> None:
        while await self._call(self.queue.overdue, holder):
            pass

    async def _group(self, uid: str, attempt: int, asking: list, holder: Holder) -> None:
        chaos = self.chaos
        versions = [self.served]
        with contextlib.suppress(QueueError):
            for part in range(chaos.choice((0, 0, 1, 3))):
                await asyncio.sleep(chaos.random() * 0.004)
                versions.append(max(versions[-1], self.served))
                snapshot = Snapshot(uid, attempt, part, chaos.randbytes(chaos.randint(1, 3000)))
                await self._call(self.queue.snapshot, [snapshot], holder)
            if chaos.random() < 0.05:
                await self._call(self.queue.drop, [(uid, "zero_variance")], holder)
                self._note("dropped", uid)
                return
            while attempt is not None:
                bad = chaos.random() < 0.03
                refusals = await self._put(made(uid, versions, attempt, bad), asking, holder)
                if not refusals:
                    self._note("accepted", uid)
                    return
                attempt = refusals[0].attempt

    def _note(self, *entry) -> None:
        if not self.queue._over:  # which answers without doing anything
            self.survivors.note(*entry)


def made(uid: str, versions: list[PolicyVersion], attempt: int, bad: bool) -> bytes:
    """A group of one sample, with tokens of each version."""
    count = TOKENS * len(versions)
    sample = Sample.single(
        0,
        np.full(count, xxhash.xxh3_64_intdigest(uid.encode()) % VOCAB, np.int32),
        np.full(count, np.nan if bad else -1.0, np.float32),
        np.ones(count, bool),
        [VersionSpan(i * TOKENS, version) for i, version in enumerate(versions)],
        FinishReason.STOP,
        reward=0.0,
    )
    return Group.from_samples(uid, uid, 0, np.ones(3, np.int32), [sample], {}, attempt).to_bytes()
