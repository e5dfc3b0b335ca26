"""Measures the CPU cost of observability: spans, counters, metrics, trace, trajectories, and offline wandb.

    python -m benchmarks.observability [--steps 40] [key.path=value ...]

Runs configs/quickstart.yaml as a user would and counts CPU seconds:

- ``recorders``: in `Recorder` calls of all processes, by the thread's CPU clock (see `benchmarks.observed`; an upper
  bound, since it includes the time to read the clock);
- ``driver``: in the driver's drain rounds and sink calls;
- ``wandb``: in wandb's service process, and in its threads in the driver;
- ``answers``: in the actors' answers to drain calls: rounds × actors × the cost of one answer, measured here.

``cpu_share``: their sum, divided by the CPU seconds of all processes of the run, including Ray's. The report, written
after the run, is listed separately.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from asyncrl.observability.telemetry.recorder import Recorder
from benchmarks.cpu_seconds import CpuSeconds
from benchmarks.observed import FOLDER
from benchmarks.quickstart import ROOT, ensure_inputs, run

WANDB_PROCESS = "wandb-core"
CALLS = 300


def answer_s() -> float:
    """CPU seconds that one drain call costs an actor, Ray's share included."""
    import psutil
    import ray

    from asyncrl.processes.actor_client import start_ray

    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self) -> None:
            self._recorder = Recorder("actor")

        async def drain(self) -> Any:
            return self._recorder.drain()

        async def pid(self) -> int:
            return os.getpid()

    start_ray(num_cpus=1, logging_level="ERROR")
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
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    args = parser.parse_args()
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)
    per_answer_s = answer_s()
    with tempfile.TemporaryDirectory(prefix="asyncrl-") as name:
        folder, observed = Path(name), Path(name) / "observed"
        observed.mkdir()
        before = os.environ.get("PYTHONPATH", "")
        os.environ |= {"PYTHONPATH": f"{ROOT / 'benchmarks/observed'}{os.pathsep}{before}", FOLDER: str(observed)}
        options = [f"trainer.total_steps={args.steps}", "reporting.wandb.mode=offline", *args.overrides]
        with CpuSeconds(WANDB_PROCESS) as cpu:
            run(0, checkpoint, data, folder, options)
        seconds: Counter[str] = Counter()
        for file in observed.iterdir():
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
    print(f"{'not included: the report, once':34}{seconds['report']:8.2f}{seconds['report'] / cpu.all_s:9.2%}")
    print(json.dumps({"cpu_share": sum(rows.values()) / cpu.all_s, "all_cpu_s": cpu.all_s, **dict(seconds)}))


if __name__ == "__main__":
    main()
