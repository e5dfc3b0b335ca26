"""How many replicas one rollouter and one driver serve. The last line is JSON.

    python -m benchmarks.scale [--replicas 16 128 1024]

Simulates runs of as many replicas, each with `REQUESTS` requests at a time, in the real control plane: rollout loop,
router, queue core, admission, train loop and sync sessions, see `asyncrl.simulation`. Answers have about `TOKENS`
tokens and take half a minute.

- ``control_cpu_us_per_sample_N``: CPU time of the control plane for each trained sample with N replicas, once as many
  samples are in flight as fit; without that of the models of engines and ranks. Calls to other processes cost nothing
  here, and the journal is memory. ``…_over_16``: by how much it grows with the number of replicas.
- ``samples_per_s_per_shard``: samples for which one core would do all that.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.simulation.engine import SimulatedEngine
from asyncrl.simulation.profile import (
    EngineFigures,
    GroupFigures,
    Profile,
    SampleFigures,
    SyncFigures,
    TrainerFigures,
    Turn,
)
from asyncrl.simulation.ranks import SimulatedRanks
from asyncrl.simulation.simulate import Simulation, simulate

ROOT = Path(__file__).parent.parent
REQUESTS, TOKENS, SAMPLES = 256, 512, 8
STEPS_IN_FLIGHT = 2  # steps whose samples are in flight at a time
MEASURED = 2  # steps, after those that fill the replicas


class Meter:
    """CPU time of the methods that it measures; of nested ones, the outermost."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def metered(*args: Any) -> Any:
            if self._inside:
                return method(*args)
            self._inside, began_s = True, time.process_time()
            try:
                return method(*args)
            finally:
                self._inside = False
                self.seconds += time.process_time() - began_s

        return metered


MODELS = Meter()


class MeteredEngine(SimulatedEngine):
    _continue = MODELS(SimulatedEngine._continue)
    _due = MODELS(SimulatedEngine._due)
    _advance = MODELS(SimulatedEngine._advance)
    _batch = MODELS(SimulatedEngine._batch)
    _progress = MODELS(lambda self: list(SimulatedEngine._progress(self)))


class MeteredRanks(SimulatedRanks):
    _computed = MODELS(SimulatedRanks._computed)


def profile() -> Profile:
    """Answers of a quarter less to a quarter more than `TOKENS` tokens; the trainer takes two thirds of the time that
    generation does."""
    draw = random.Random(0)
    length = lambda: draw.randint(TOKENS * 3 // 4, TOKENS * 5 // 4)
    groups = tuple(
        GroupFigures(64, tuple(SampleFigures((Turn(length()),), float(i % 2)) for i in range(SAMPLES)))
        for _ in range(1024)
    )
    engine = EngineFigures(step_s=0.02, row_s=1e-4, context_token_s=0.0, prefill_token_s=1e-6, report_s=0.2)
    answer_s = TOKENS * (engine.step_s + engine.row_s * REQUESTS)
    trainer = TrainerFigures(ranks=1, step_s=answer_s / STEPS_IN_FLIGHT / 1.5, part_s=0, token_s=0, stage_s=0)
    sync = SyncFigures(10**9, 10**10, *(0.01 for _ in range(8)))
    return Profile(engine, trainer, sync, groups, reward_s=0.05, flush_s=0.003)


def config(replicas: int) -> Config:
    groups = replicas * REQUESTS // SAMPLES // STEPS_IN_FLIGHT
    return load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [
            "model.path=none",
            "data.train_files=[none]",
            f"rollout.n={SAMPLES}",
            f"rollout.max_response_tokens={2 * TOKENS}",
            f"rollout.engine.max_context_tokens={2 * TOKENS + 64}",
            f"rollout.engine.slots={REQUESTS}",
            f"rollout.replicas={replicas}",
            f"trainer.mini_batch_groups={groups}",
            f"trainer.total_steps={STEPS_IN_FLIGHT + MEASURED}",
            f"async_training.staleness_threshold={STEPS_IN_FLIGHT - 1}",
            "checkpoint.every_steps=0",
        ],
    )


def control_cpu_s(replicas: int) -> tuple[float, Simulation]:
    """CPU seconds of the control plane for each sample that is trained."""
    run = simulate(
        config(replicas), profile(), MeteredEngine, MeteredRanks, lambda: time.process_time() - MODELS.seconds
    )
    first, last = run.steps[-MEASURED - 1], run.steps[-1]
    return (last.cpu_s - first.cpu_s) / (MEASURED * run.samples_per_step), run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16, 128, 1024])
    args = parser.parse_args()
    found: dict[str, float] = {}
    print(f"{'replicas':>8} {'samples':>8} {'control, us/sample':>19} {'real s':>7} {'virtual s':>10} {'of ideal':>9}")
    for replicas in args.replicas:
        began_s = time.perf_counter()
        seconds, run = control_cpu_s(replicas)
        found[f"control_cpu_us_per_sample_{replicas}"] = seconds * 1e6
        took_s, virtual_s = time.perf_counter() - began_s, run.steps[-1].at_s
        ideal = run.figures()["fraction_of_ideal"]
        samples = len(run.steps) * run.samples_per_step
        print(
            f"{replicas:>8} {samples:>8} {seconds * 1e6:>19.0f} {took_s:>7.1f} {virtual_s:>10.1f} {ideal:>9.2f}",
            flush=True,
        )
    least, most = min(args.replicas), max(args.replicas)
    per_sample = {n: found[f"control_cpu_us_per_sample_{n}"] for n in (least, most)}
    found[f"control_cpu_us_per_sample_{most}_over_{least}"] = per_sample[most] / per_sample[least]
    found["samples_per_s_per_shard"] = 1e6 / per_sample[most]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
