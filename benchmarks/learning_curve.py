"""Accuracy of the quickstart's task over time and steps: runs of asyncrl, evaluated after their end."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from benchmarks.quickstart import ROOT, run

TARGET = 0.85
STEPS, EVERY = 40, 4  # steps that count, and how many lie between evaluations
CONFIG = ROOT / "configs/quickstart.yaml"
CHECKPOINT, DATA = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
_SAMPLES = 2  # answers to each held-out problem
_PROCESSES = 2  # that evaluate at a time


@dataclass(frozen=True)
class Curve:
    """Of one run. ``seconds``: of training until the end of each step; ``accuracy``: after some of them; ``age``: mean
    staleness of the trained groups, in versions."""

    seconds: Mapping[int, float]
    accuracy: Mapping[int, float]
    age: float = 0.0

    @property
    def step_s(self) -> float:
        return self.seconds[STEPS] / STEPS

    def crossing(self) -> tuple[float, float]:
        """Seconds and steps until accuracy, interpolated between evaluations, first reaches `TARGET`; infinite if it
        never does."""
        steps = sorted(self.accuracy)
        if self.accuracy[steps[0]] >= TARGET:
            return 0.0, 0.0
        for low, high in itertools.pairwise(steps):
            before, after = self.accuracy[low], self.accuracy[high]
            if before < TARGET <= after:
                share = (TARGET - before) / (after - before)
                seconds = self.seconds[low] + share * (self.seconds[high] - self.seconds[low])
                return seconds, low + share * (high - low)
        return float("inf"), float("inf")

    def row(self) -> str:
        seconds, steps = self.crossing()
        accuracies = " ".join(f"{self.accuracy[step]:.2f}" for step in sorted(self.accuracy))
        return f"{seconds:>8.1f} {steps:>6.1f} {self.step_s:>7.2f}  {accuracies}"


HEAD = f"{'seconds':>8} {'steps':>6} {'step_s':>7}  accuracy every {EVERY} steps"


def evaluated_steps() -> range:
    return range(EVERY, STEPS + 1, EVERY)


def evaluate(folders: Mapping[int, Path], out: Path) -> dict[int, float]:
    """Share of held-out problems with a correct answer, sampled at temperature 1, with the weights of the Hugging Face
    folders, by step, and with those before the first."""
    folders = {0: CHECKPOINT, **folders}
    shares = [dict(itertools.islice(folders.items(), first, None, _PROCESSES)) for first in range(_PROCESSES)]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        found = pool.map(_evaluated, shares, (out / f"answers-{share}" for share in range(_PROCESSES)))
        return {step: accuracy for share in found for step, accuracy in share.items()}


def _evaluated(folders: Mapping[int, Path], out: Path) -> dict[int, float]:
    command = [sys.executable, "-m", "asyncrl.cli.main", "eval", *map(str, folders.values())]
    options = [
        f"data.validation_files=[{DATA / 'heldout.jsonl'}]",
        f"validation.samples={_SAMPLES}",
        "rollout.engine.threads=1",
        "rollout.engine.slots=64",
    ]
    command += ["--config", str(CONFIG), "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the evaluation exited {done.returncode}\n{done.stderr[-2000:]}")
    figures = json.loads((out / "figures.json").read_text())  # in the order of the folders
    return {step: of[f"mean@{_SAMPLES}"] for step, of in zip(folders, figures.values(), strict=True)}


def run_asyncrl(seed: int, out: Path, overrides: Sequence[str]) -> Curve:
    """One run of the quickstart with ``overrides``; the time in which it writes weights counts."""
    options = [
        f"checkpoint.every_steps={EVERY}",
        "checkpoint.keep_last=0",
        "checkpoint.export_hf=all",
        "reporting.report=false",
        "reporting.wandb.mode=disabled",
        "data.validation_files=[]",
    ]
    run(seed, CHECKPOINT, DATA, out, [*options, *overrides])
    folder = out / f"seed-{seed}"
    rows = [row for row in read_jsonl(folder / METRICS_FILE) if "actor/loss" in row]
    seconds = {0: 0.0}
    for row in rows:
        seconds[row["step"]] = seconds[row["step"] - 1] + row["perf/step_s"]
    age = statistics.fmean(row["fully_async/staleness/mean"] for row in rows)
    weights = {step: folder / f"checkpoints/step_{step:06}/hf" for step in evaluated_steps()}
    return Curve(seconds, evaluate(weights, out), age)
