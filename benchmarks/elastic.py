"""Replicas join and leave a run, and two of them die: what that costs. The last line is JSON.

    python -m benchmarks.elastic [--seconds 40]

One run on real Ray whose engines are slowed down so that replicas share the cores (`benchmarks.rate_limited`), and
whose generation binds, because equal rewards leave the trainer hardly anything to compute: 1 → 4 → 2 replicas by
``asyncrl scale``, then both are killed, one after the other.

- ``regained``: tokens per second of 4 replicas over 4 times those of one, once all four serve.
- ``join_s``: from the request until the first step that ended with all four serving.
- ``lost_groups``: groups that were issued and are neither trained, queued, in flight nor filtered at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from asyncrl.cli.ledger import balance
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from asyncrl.run.scaling import ask
from asyncrl.sample_queue.ledger import FILE as LEDGER
from asyncrl.sample_queue.ledger import reading
from asyncrl.types.prompts import Prompt
from benchmarks import quickstart
from benchmarks.long_tail import without_end
from benchmarks.quickstart import ROOT
from benchmarks.simulate import CHECKPOINT, COMMON, DATA

TOKENS = 40  # of every answer: stragglers would measure the staleness budget
WAIT_S = 240.0
#: each replica reserves little: the cores are shared
OPTIONS = [
    *COMMON,
    f"rollout.max_response_tokens={TOKENS}",
    "reward.function=benchmarks.elastic:equal",
    "algorithm.filter_zero_variance=false",
    "rollout.replicas=1",
    "async_training.staleness_threshold=3",  # the budget is enough for four
    "trainer.mini_batch_groups=8",
    "trainer.total_steps=100000",
    "supervision.backoff_s=0.1",
]


def equal(prompt: Prompt, response: str) -> float:
    return 1.0


class ElasticRun:
    def __init__(self, folder: Path) -> None:
        self.run_dir, self._log = folder / "run", (folder / "log").open("w+")
        inputs = [f"model.path={without_end(CHECKPOINT, folder / 'checkpoint')}", f"run_dir={self.run_dir}"]
        inputs += [f"data.train_files=[{DATA / 'train.jsonl'}]", *OPTIONS]
        command = [sys.executable, "-m", "asyncrl.fully_async_main", "--config", "configs/quickstart.yaml", *inputs]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=self._log, stderr=subprocess.STDOUT)

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in read_jsonl(self.run_dir / METRICS_FILE) if "perf/step_s" in row]

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"the run never {what}:\n{self._log.read()[-4000:]}")
            time.sleep(0.1)

    def serving(self) -> int:
        """Replicas that the newest step's sync gave a version."""
        steps = self.steps()
        return int(steps[-1].get("param_sync/replicas", 0)) if steps else 0

    def tokens_per_s(self, seconds: float) -> float:
        """Generated over the steps of about this time from now on."""
        first, until_s = len(self.steps()) + 1, time.monotonic() + seconds
        self.until(lambda: time.monotonic() > until_s and len(self.steps()) > first + 2, "trained")
        rows = self.steps()[first:]
        time_s = sum(row["perf/step_s"] for row in rows)
        return sum(row["perf/rollout_tokens_per_s"] * row["perf/step_s"] for row in rows) / time_s

    def idle(self, pool: str) -> float:
        return statistics.fmean(row[f"fully_async/{pool}/idle_ratio"] for row in self.steps()[-5:])

    def replicas(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in below if " ".join(p.cmdline()).startswith("ray::EngineReplicaActor")]

    def end(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(WAIT_S)


def lost_groups(run_dir: Path) -> int:
    with reading(run_dir / LEDGER, thorough=False) as db:
        by_reason = "SELECT COUNT(*) FROM groups WHERE state = 'dropped' AND reason != 'zero_variance'"
        return balance(db)["missing"] + int(db.execute(by_reason).fetchone()[0])


def measure(folder: Path, seconds: float) -> dict[str, float]:
    run = ElasticRun(folder)
    try:
        run.until(lambda: len(run.steps()) >= 3, "trained three steps")

        def told(what: str) -> float:
            rate = run.tokens_per_s(seconds)
            print(f"{what:34} {rate:8.0f} {run.idle('trainer'):13.2f} {run.idle('rollouter'):15.2f}", flush=True)
            return rate

        print(f"{'replicas':34} {'tokens/s':>8} {'trainer idle':>13} {'rollouter idle':>15}")
        one = told("1")
        began_s = time.monotonic()
        for line in ask(run.run_dir, 4):
            print(f"  {line}", flush=True)
        run.until(lambda: run.serving() == 4, "was served by four replicas")
        join_s = time.monotonic() - began_s
        four = told("4")
        for line in ask(run.run_dir, 2):
            print(f"  {line}", flush=True)
        told("2")
        for left in (1, 0):
            [victim, *_] = run.replicas()
            victim.kill()
            print(f"  killed one of two, {left} more", flush=True)
            run.until(lambda v=victim: not v.is_running() and len(run.replicas()) == 2, "had two replicas again")  # type: ignore[misc]
        run.until(lambda: run.serving() == 2, "was served by two replicas")
        told("2, after both were killed")
        run.end()
        return {"lost_groups": lost_groups(run.run_dir), "regained": four / one / 4, "join_s": join_s}
    finally:
        if run.process.poll() is None:
            run.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="of each measurement (default: %(default)s)")
    args = parser.parse_args()
    quickstart.ensure_inputs(CHECKPOINT, DATA)
    with tempfile.TemporaryDirectory(prefix="asyncrl-elastic-") as folder:
        print(json.dumps(measure(Path(folder), args.seconds)))


if __name__ == "__main__":
    main()
