"""Runs that lose processes on the way, and the audit of what they leave behind."""

import itertools
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import asyncrl.ledger
from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from tests.support.tiny import overrides
from tests.test_run import Run, processes_of

ACTORS = {"replica": "EngineReplica", "rank": "TrainerRank", "rollouter": "Rollouter", "queue": "SampleQueue"}
NAMES = {"replica": "replica/0", "rank": "trainer/0", "rollouter": "rollouter", "queue": "queue"}
KILLED = -signal.SIGKILL
CRASH_SITE = Path(__file__).parent / "crash_site"

#: beside those of `tests.support.tiny`
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
    """A run in ``folder`` on a Ray cluster of its own, with more ways to look at it and to harm it."""

    def __init__(self, inputs: Path, folder: Path, *more: str, resume: str | None = "auto") -> None:
        self.folder, self.ray_dir = folder, tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        flags = [] if resume is None else ["--resume", resume]
        options = overrides(inputs, folder, f"ray.temp_dir={self.ray_dir}", *OPTIONS, *more)
        super().__init__([*flags, *options], folder.parent / f"{Path(self.ray_dir).name}.log")

    def process(self, kind: str, index: int = 0) -> psutil.Process:
        below = psutil.Process(self.process_id).children(recursive=True)
        return [p for p in below if _name(p).startswith(f"ray::{ACTORS[kind]}")][index]

    @property
    def process_id(self) -> int:
        return self.driver.pid

    def kill(self, kind: str) -> None:
        """``kill -9`` one process of a kind, and wait until the run has noticed it."""
        noticed = f"supervision: {NAMES[kind]} "
        before = self.text.count(noticed)
        self.process(kind).kill()
        self.until(lambda: self.text.count(noticed) > before, f"noticed the death of the {kind}")

    def until_trained(self, step: int, timeout_s: float = 120) -> None:
        self.until(lambda: trained_steps(self.folder) >= step, f"trained step {step}", timeout_s)

    def until(self, condition, what: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.driver.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"never {what}:\n{self.text}")
            time.sleep(0.02)

    def close(self) -> None:
        """Nothing of the run lives when this returns; fails the test if something did, 30 s after its end."""
        over = self.driver.poll() is not None
        if not over:
            os.killpg(self.driver.pid, signal.SIGKILL)
            self.driver.wait()
        deadline = time.monotonic() + 30
        while (left := processes_of(self.ray_dir)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            process.kill()
        shutil.rmtree(self.ray_dir, ignore_errors=True)
        assert not left
