"""What does watching a run cost it: spans, counters, metrics, trace, trajectories, and wandb offline?

    python -m benchmarks.observability [--steps 48] [key.path=value ...]

Runs configs/quickstart.yaml as a user would and counts CPU seconds:

- ``recorders``: inside every call of a `Recorder` in any process, by that thread's clock (see `benchmarks.observed`;
  reading the clock is in it, so that this comes out too large);
- ``driver``: in the driver, inside the rounds in which it fetches what actors recorded, and inside every sink's call;
- ``wandb``: the whole of wandb's service process, and its threads in the driver;
- ``answers``: those of the actors when they are asked: rounds × actors × what one such call costs an actor here.

``cpu_share``: the sum of these by the CPU seconds of all processes of the run, Ray's own included. The report, made
after the run, is told beside.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.telemetry.recorder import Recorder
from benchmarks.cpu_seconds import CpuSeconds
from benchmarks.observed import FOLDER
from benchmarks.quickstart import ROOT, ensure_inputs, run

WANDB_PROCESS = "wandb-core"
CALLS = 300


def answer_s() -> float:
    """CPU seconds that one fetched batch costs the actor that answers, Ray's part included."""
    import psutil
    import ray

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self) -> None:
            self._recorder = Recorder("actor")

        async def drain(self) -> Any:
            return self._recorder.drain()

        async def pid(self) -> int:
            return os.getpid()

    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR")  # type: ignore[arg-type]
    try:
        actor = Actor.remote()  # type: ignore[attr-defined]
        process = psutil.Process(ray.get(actor.pid.remote()))
        before = sum(process.cpu_times()[:2])
        for _ in range(CALLS):
            ray.get(actor.drain.remote())
        return (sum(process.cpu_times()[:2]) - before) / CALLS
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)
    per_answer_s = answer_s()
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as name:
        folder, told = Path(name), Path(name) / "observed"
        told.mkdir()
        before = os.environ.get("PYTHONPATH", "")
        os.environ |= {"PYTHONPATH": f"{ROOT / 'benchmarks/observed'}{os.pathsep}{before}", FOLDER: str(told)}
        options = [f"trainer.total_steps={args.steps}", "reporting.wandb.mode=offline", *args.overrides]
        with CpuSeconds(WANDB_PROCESS, since=folder / "seed-0") as cpu:
            run(0, checkpoint, data, folder, options)
        seconds: Counter[str] = Counter()
        for file in told.iterdir():
            seconds.update(json.loads(file.read_text()))
    rows = {
        "recorders, in all processes": seconds["recorder"],
        "driver: rounds and sinks": seconds["driver"],
        "wandb: its service and threads": cpu.process_s + seconds["wandb_threads"],
        "answers of the actors": seconds["answers"] * per_answer_s,
    }
    print(f"a quickstart of {args.steps} steps, CPU seconds of all processes: {cpu.all_s:.1f}")
    for name, value in rows.items():
        print(f"{name:34}{value:8.2f}{value / cpu.all_s:9.2%}")
    print(f"{'beside: the report, once':34}{seconds['report']:8.2f}{seconds['report'] / cpu.all_s:9.2%}")
    print(json.dumps({"cpu_share": sum(rows.values()) / cpu.all_s, "all_cpu_s": cpu.all_s, **dict(seconds)}))


if __name__ == "__main__":
    main()
