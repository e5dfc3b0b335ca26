"""Checks that nothing grows over hundreds of parameter syncs and thousands of groups: memory, descriptors, sync time,
disk.

    python -m benchmarks.soak [--versions 300] [--groups 10000] [--folder DIR] [key.path=value ...]

Runs configs/quickstart.yaml as a user would, with a random model of one layer, two replicas, short answers, staleness 1
and a sync per step. `PageLoop` attaches `PAGE_BYTES` to each sample, so that payloads fill the spool's segments many
times over. Processes and disk are read once a second. The run is divided into tenths of its steps. The second one is
compared with the last; during the first one allocators and caches fill.

- ``rss_growth``: a process's own memory in the last tenth over the second, medians; of the process where it is largest.
  Own memory is anonymous memory, swapped pages included. Pages of files and of shared memory are left out: a process
  adds those of Ray's object store to its RSS as it first touches them, and every reader counts the same ones.
- ``fds_growth``: open descriptors in the last tenth minus those in the second, of the process where the difference is
  largest. The fewest within a tenth count, because files are open for moments; a leak raises the fewest, too.
- ``sync_growth``: median duration of the syncs in the last tenth over those in the second.
- ``spool_bytes_over_live``: bytes on disk in ``spool/`` and the snapshots' file, beyond two segments, over the bytes of
  live payloads: groups queued, leased and provisionally trained, and snapshots of groups in flight. The largest ratio
  of the run; 0 while two segments hold everything.

``rss_growth`` and ``fds_growth`` cover asyncrl's processes. The table has those of Ray and wandb, too, and
``others_rss_growth`` is the largest growth among them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from asyncrl.rollouter.agents.base import Generate
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import LedgerError, reading
from asyncrl.sample_queue.snapshots import FILE as SNAPSHOTS
from asyncrl.sample_queue.spool import SEGMENT_BYTES
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample
from benchmarks.overlap import steps_of
from benchmarks.quickstart import ensure_inputs, run

PAGE_BYTES = 32 * 1024
SAMPLES = 4  # per group
READ_EVERY_S = 1.0
MIB = 2**20

MAKE_CHECKPOINT = [sys.executable, "-m", "asyncrl.models.make_checkpoint", "--warm-start-steps", "0", "--layers", "1"]

#: asyncrl's processes: role → its command line
ROLES = {
    "driver": r"-m asyncrl\.fully_async_main ",
    "rank": r"^ray::TrainerRankActor",
    "replica": r"^ray::EngineReplicaActor",
    "rollouter": r"^ray::RollouterActor",
    "queue": r"^ray::SampleQueueActor",
    "reward worker": r"-m asyncrl\.rollouter\.rewards\.keeper ",
}

OPTIONS = [
    "name=soak",
    "rollout.agent_loop=benchmarks.soak:PageLoop",
    f"rollout.n={SAMPLES}",
    "rollout.replicas=2",
    "rollout.max_response_tokens=8",
    "rollout.engine.slots=8",
    "rollout.engine.max_context_tokens=64",
    "rollout.engine.cpu_priority=low",
    "reward.function=benchmarks.soak:variety",
    "trainer.optimizer.lr=1e-5",
    "async_training.staleness_threshold=1",
    "validation.every_versions=10",
    "validation.max_prompts=8",
    "checkpoint.every_steps=10",
    "ray.cpus_per_rank=0.5",
    "ray.cpus_per_replica=0.5",
]


class PageLoop(SingleTurn):
    """With a page of `PAGE_BYTES` in its state and in the sample, as a tool leaves."""

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        if (page := generate.state) is None:
            page = bytes(PAGE_BYTES)
            generate.save(page)
        sample = await super().run(prompt, index, generate)
        sample.sequences[0].extras["page"] = np.frombuffer(page, np.uint8)
        return sample


def variety(prompt: Prompt, response: str) -> float:
    """Reward that a random model can earn: share of different characters."""
    return len(set(response)) / max(len(response), 1)


# -- readings of a run -------------------------------------------------------------------------------------------------


class ProcessReading(NamedTuple):
    """A process at one moment, in Unix seconds. ``role``: one of `ROLES`, or the program's name."""

    time: float
    pid: int
    role: str
    own_bytes: int  # anonymous memory, swapped pages included
    fds: int
    threads: int


class DiskReading(NamedTuple):
    """``held_bytes`` on disk in spool and snapshots, ``live_bytes`` of payloads that a run may still need."""

    held_bytes: int
    live_bytes: int
    segments: int  # written so far


class Readings:
    """Reads all descendants of this process, and the disk of ``run_dir``, once a second while its context is open."""

    def __init__(self, run_dir: Path) -> None:
        self.processes: list[ProcessReading] = []
        self.disk: list[DiskReading] = []
        self._run_dir = run_dir
        self._done = threading.Event()
        self._reading = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Readings:
        self._reading.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._reading.join()

    def _run(self) -> None:
        while not self._done.wait(READ_EVERY_S):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                    self.processes.append(read_process(process))
            with contextlib.suppress(LedgerError, sqlite3.OperationalError):  # the queue has not created its files yet
                self.disk.append(read_disk(self._run_dir))


def read_process(process: psutil.Process) -> ProcessReading:
    """Raises psutil.Error or OSError if it has ended."""
    command = " ".join(process.cmdline()) + " "
    role = next((role for role, pattern in ROLES.items() if re.search(pattern, command)), process.name())
    lines = (line.split() for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    status = {line[0]: line[1] for line in lines if len(line) > 1}
    own_bytes = 1024 * (int(status["RssAnon:"]) + int(status["VmSwap:"]))
    fds = len(os.listdir(f"/proc/{process.pid}/fd"))
    return ProcessReading(time.time(), process.pid, role, own_bytes, fds, int(status["Threads:"]))


def read_disk(run_dir: Path) -> DiskReading:
    """The live payloads are those of groups whose state in the ledger needs them, whatever else the queue kept.

    Raises LedgerError or sqlite3.OperationalError before the queue has created its files."""
    with reading(run_dir / LEDGER, thorough=False) as db:
        payloads = (
            "SELECT TOTAL(length) FROM payloads JOIN groups USING (uid) "
            "WHERE state IN ('queued', 'leased', 'trained') AND NOT final"
        )
        live_bytes = int(db.execute(payloads).fetchone()[0])
        attempts = dict(db.execute("SELECT uid, attempt FROM groups WHERE state = 'in_flight'"))
    with closing(sqlite3.connect(f"{(run_dir / SNAPSHOTS).resolve().as_uri()}?mode=ro", uri=True)) as db:
        parts = db.execute("SELECT uid, attempt, SUM(LENGTH(data)) FROM parts GROUP BY uid, attempt").fetchall()
    live_bytes += sum(size for uid, attempt, size in parts if attempts.get(uid) == attempt)
    segments = list((run_dir / "spool").glob("*.seg"))
    held_bytes = 0
    for path in (*segments, run_dir / SNAPSHOTS, run_dir / f"{SNAPSHOTS}-wal"):
        with contextlib.suppress(FileNotFoundError):  # a segment that has just been deleted
            held_bytes += path.stat().st_size
    return DiskReading(held_bytes, live_bytes, max((int(path.stem) for path in segments), default=0))


# -- figures -----------------------------------------------------------------------------------------------------------


class Course(NamedTuple):
    """A process over the tenths of a run, from the second to the last: median memory, fewest descriptors and
    threads."""

    role: str
    own_bytes: list[float]
    fds: list[int]
    threads: list[int]

    @property
    def growth(self) -> float:
        return self.own_bytes[-1] / self.own_bytes[0]


Window = tuple[float, float]  # Unix seconds


def tenths(rows: Sequence[Mapping[str, float]]) -> list[Window]:
    """Windows of time from the second to the last tenth of a run's steps. ``rows``: of metrics.jsonl, one per step."""
    reported_s = {row["step"]: row["time"] for row in rows}
    ends = [reported_s[round(n * len(rows) / 10)] for n in range(1, 11)]
    return list(itertools.pairwise(ends))


def courses(readings: Iterable[ProcessReading], windows: Sequence[Window]) -> list[Course]:
    """Of all processes that were read in each window."""
    of_process = defaultdict(list)
    for r in readings:
        of_process[r.role, r.pid].append(r)
    found = []
    for (role, _), all_readings in sorted(of_process.items()):
        parts = [[r for r in all_readings if since_s < r.time <= until_s] for since_s, until_s in windows]
        if all(parts):
            own_bytes = [statistics.median(r.own_bytes for r in part) for part in parts]
            fds, threads = ([min(getattr(r, name) for r in part) for part in parts] for name in ("fds", "threads"))
            found.append(Course(role, own_bytes, fds, threads))
    return found


def sync_growth(rows: Sequence[Mapping[str, float]], windows: Sequence[Window]) -> float:
    """Median sync in the last window over that in the first."""
    first, last = (
        statistics.median(row["param_sync/total_s"] for row in rows if since_s < row["time"] <= until_s)
        for since_s, until_s in (windows[0], windows[-1])
    )
    return last / first


def spool_bytes_over_live(disk: Iterable[DiskReading]) -> float:
    """Largest ratio of the bytes beyond two segments to the live ones."""
    return max(max(0, r.held_bytes - 2 * SEGMENT_BYTES) / max(r.live_bytes, 1) for r in disk)


def figures(readings: Readings, rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Prints the table and returns the figures. Raises SystemExit unless each of `ROLES` lived through the run."""
    windows = tenths(rows)
    found = courses(readings.processes, windows)
    if missing := ROLES.keys() - {course.role for course in found}:
        raise SystemExit(f"expected each role in every tenth of the run, found no process of {', '.join(missing)}")
    ours = [course for course in found if course.role in ROLES]
    others = [course for course in found if course.role not in ROLES]
    columns = "".join(f"{n:>7}" for n in range(2, 11, 2))
    print(f"{'own memory, MiB, in tenth':28}{columns}{'growth':>9}{'descriptors':>13}{'threads':>9}")
    for course in (*ours, *others):
        memory = "".join(f"{value / MIB:7.1f}" for value in course.own_bytes[::2])
        pairs = [f"{values[0]}→{values[-1]}" for values in (course.fds, course.threads)]
        print(f"{course.role:28}{memory}{course.growth:9.3f}{pairs[0]:>13}{pairs[1]:>9}")
    most_held, segments = max(r.held_bytes for r in readings.disk), max(r.segments for r in readings.disk)
    most_live = max(r.live_bytes for r in readings.disk)
    print(f"{segments} segments written; at most {most_held / MIB:.0f} MiB on disk, {most_live / MIB:.0f} MiB live")
    return {
        "rss_growth": max(course.growth for course in ours),
        "fds_growth": max(course.fds[-1] - course.fds[0] for course in ours),
        "sync_growth": sync_growth(rows, windows),
        "spool_bytes_over_live": spool_bytes_over_live(readings.disk),
        "others_rss_growth": max((course.growth for course in others), default=1.0),
        "syncs": sum("param_sync/total_s" in row for row in rows),
        "groups": sum(row["trainer/groups"] for row in rows),
        "run_s": rows[-1]["time"] - rows[0]["time"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--versions", type=int, default=300, help="parameter syncs, at least 50")
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, help="keep the run here (default: a temporary folder)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-soak-")))
        checkpoint, data = folder / "checkpoint", folder / "data"
        make = [*MAKE_CHECKPOINT, "--out", str(checkpoint)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        ensure_inputs(checkpoint, data)
        per_version = -(-args.groups // args.versions)
        size = [f"trainer.total_steps={args.versions}", f"trainer.mini_batch_groups={per_version}"]
        with Readings(folder / "seed-0") as readings:
            run(0, checkpoint, data, folder, [*OPTIONS, *size, *args.overrides])
        found = figures(readings, steps_of(folder / "seed-0"))
    print(json.dumps({name: round(value, 4) for name, value in found.items()}))


if __name__ == "__main__":
    main()
