"""Runs whose processes are killed, and the audit of their ledgers."""

import itertools
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import asyncrl.cli.ledger
from asyncrl.config.load import load_config
from asyncrl.data.load import load_run_prompts
from asyncrl.data.order import PromptOrder
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from tests.support.tiny import overrides
from tests.test_run import Run, processes_of

ACTORS = {"replica": "EngineReplica", "rank": "TrainerRank", "rollouter": "Rollouter", "queue": "SampleQueue"}
NAMES = {"replica": "replica/0", "rank": "trainer/0", "rollouter": "rollouter", "queue": "queue"}
#: of runs with agents besides
ENDPOINT = "endpoint"
#: of machines with many replicas besides
RELAY = "relay"
KILLED = -signal.SIGKILL
CRASH_SITE = Path(__file__).parent / "crash_site"

#: in addition to those of `tests.support.tiny`
OPTIONS = (
    "async_training.staleness_threshold=1",
    "checkpoint.every_steps=3",
    "checkpoint.export_hf=none",
    "data.validation_files=[]",
    "reporting.report=false",
    "reporting.wandb.mode=disabled",
    "supervision.backoff_s=0.1",
    "supervision.max_backoff_s=0.1",
    "supervision.max_restarts=100",
)


class FaultyRun(Run):
    """A run on its own Ray cluster whose state can be inspected and whose processes can be killed.

    A tiny run over ``inputs``, or a run of ``config``; resumed if ``folder`` holds one. ``kwargs``: of `Run`."""

    def __init__(self, inputs: Path | None, folder: Path, *more: str, config: str | None = None, **kwargs: Any) -> None:
        self.folder, self.ray_dir = folder, tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        if inputs is not None:
            options = overrides(inputs, folder, *OPTIONS)
        else:
            options = ["--config", str(config), f"run_dir={folder}"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(
            ["--resume", "auto", *options, f"ray.temp_dir={self.ray_dir}", *more],
            folder.parent / f"{Path(self.ray_dir).name}.log",
            **kwargs,
        )

    def actor(self, kind: str) -> psutil.Process:
        """A process of this kind; waits for the next one if the last has just died."""
        self.until(lambda: self.actors(kind), f"had a {kind}")
        return self.actors(kind)[0]

    def actors(self, kind: str) -> list[psutil.Process]:
        shown = {**ACTORS, ENDPOINT: "Endpoint", RELAY: "Relay"}[kind]
        return [p for p in self.below() if _name(p).startswith(f"ray::{shown}")]

    def below(self) -> list[psutil.Process]:
        """Processes that the run has started."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self, kind: str) -> None:
        """``kill -9`` a process of this kind, and wait until the run has noticed."""
        noticed = f"supervision: {NAMES.get(kind, kind).split('/')[0]}"  # any of several
        before = self.text.count(noticed)
        self.actor(kind).kill()
        self.until(lambda: self.text.count(noticed) > before, f"noticed the death of the {kind}")

    def column(self, metric: str) -> list[float]:
        """All values of a metric, in the order of logging."""
        return [row[metric] for row in read_jsonl(self.folder / METRICS_FILE) if metric in row]

    def until_trained(self, step: int, timeout_s: float = 120) -> None:
        self.until(lambda: trained_steps(self.folder) >= step, f"trained step {step}", timeout_s)

    def until(self, condition, what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"never {what}:\n{self.text}")
            time.sleep(0.02)

    def close(self) -> None:
        """Kill every process of the run; fails the test if one outlives the run by 30 s."""
        over = self.process.poll() is not None
        if not over:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        deadline = time.monotonic() + 30
        while (left := processes_of(self.ray_dir)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            process.kill()
        shutil.rmtree(self.ray_dir, ignore_errors=True)
        assert not left


@contextmanager
def starting(inputs: Path, folder: Path, *options: str) -> Iterator[Callable[..., FaultyRun]]:
    """Yields a function that starts a run in ``folder`` with these options and more; kills all runs on exit."""
    with ExitStack() as stack:

        def begin(*more: str) -> FaultyRun:
            run = FaultyRun(inputs, folder, *options, *more)
            stack.callback(run.close)
            return run

        yield begin


def run_through(
    inputs: Path, folder: Path, *more: str, points: Sequence[str] = (), monkeypatch: pytest.MonkeyPatch
) -> list[FaultyRun]:
    """Run to the end through all crash ``points`` (see crash_site), resuming whenever the driver dies."""
    marks = crash_at(points, folder.parent, monkeypatch)
    runs: list[FaultyRun] = []
    while not runs or runs[-1].process.returncode == KILLED:
        runs.append(run := FaultyRun(inputs, folder, *more))
        status = run.wait(300)
        run.close()
        assert status in (0, KILLED), run.text
    reached = len(list(marks.iterdir()))
    assert reached == len(points), f"never reached {points[reached]}:\n{runs[-1].text}"
    return runs


def crash_at(points: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set crash points for all processes started from now on; returns the folder with a mark per point reached."""
    marks = folder / "marks"
    marks.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(CRASH_SITE), prepend=os.pathsep)
    monkeypatch.setenv("CRASH_POINTS", ",".join(points))
    monkeypatch.setenv("CRASH_MARKS", str(marks))
    return marks


def trained_steps(folder: Path) -> int:
    """Newest step in the weights; 0 without a ledger."""
    try:
        return _query(folder, "SELECT MAX(step) FROM groups WHERE state = 'trained'")[0][0] or 0
    except sqlite3.OperationalError:
        return 0


def audit(
    folder: Path,
    batches: Sequence[int],
    staleness_bound: int = 1,
    journal: Path | None = None,
    in_order: bool = True,
    steps_per_version: int | None = 1,
) -> None:
    """Check the ledger of a finished run whose steps trained ``batches`` groups each.

    The groups issued are the first prompts of the order, each once. Each is dropped, or trained once, within the
    staleness bound and, unless ``in_order`` is false, in the order of issue. ``journal``: folder of the ledger, if not
    ``folder``. ``steps_per_version``: None if their number or size has changed, after which a version starts over."""
    run, folder = folder, journal or folder
    assert asyncrl.cli.ledger.main([str(folder)]) == 0
    columns = "uid, state, step, final, trained_number - oldest_number"
    groups = _query(folder, f"SELECT {columns} FROM groups ORDER BY seq")

    config = load_config(run / "config.yaml")
    data = config.data
    order = PromptOrder(load_run_prompts(data).train, config.seed, data.shuffle, mixture=data.mixture)
    assert [uid for uid, *_ in groups] == [prompt.uid for prompt in itertools.islice(order, len(groups))]

    kept = [group for group in groups if group[1] != "dropped"]
    if not in_order:
        kept.sort(key=lambda group: group[2] or 0)
    steps = [step for step, count in enumerate(batches, start=1) for _ in range(count)]
    assert [(state, step, final) for _, state, step, final, _ in kept] == [("trained", step, 1) for step in steps]
    assert max(staleness for *_, staleness in kept) <= staleness_bound

    for which in ("oldest", "newest"):
        known = f"({which}_lineage, {which}_number) IN (SELECT lineage, number FROM versions)"
        assert _query(folder, f"SELECT uid FROM groups WHERE {which}_number NOT NULL AND NOT {known}") == []
    versions = _query(folder, "SELECT lineage, number FROM versions WHERE published_s NOT NULL ORDER BY published_s")
    assert versions == sorted(set(versions))
    if steps_per_version is not None:
        assert [number for _, number in versions][-1] == (len(batches) - 1) // steps_per_version


def restores(folder: Path) -> int:
    """Number of restores to a checkpoint or to the start."""
    return _query(folder, "SELECT MAX(lineage) FROM versions")[0][0]


def dropped(folder: Path, reason: str) -> int:
    """Number of groups dropped for this reason."""
    return _query(folder, f"SELECT COUNT(*) FROM groups WHERE state = 'dropped' AND reason = '{reason}'")[0][0]


def _query(folder: Path, query: str) -> list[tuple]:
    with closing(sqlite3.connect(f"{(folder / 'ledger.sqlite').as_uri()}?mode=ro", uri=True)) as db:
        return db.execute(query).fetchall()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:  # the process has just ended
        return ""
