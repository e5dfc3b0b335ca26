"""Holds `asyncrl simulate` against published and real runs, and times it. The last line is JSON.

    python -m benchmarks.simulate

- ``verl_table_error``: largest error of the predicted seconds of a step against the published ones of verl's fully
  asynchronous trainer, Qwen2.5-Math-7B on 128 H20, 64 of which train (docs/advance/fully_async.md there). Its engine is
  calibrated with two figures: the generation of a step on 128 GPUs, 177.85 s, and the end of generation at a threshold
  of 0 on 64. Its trainer takes the mean of the published updates, its sync what they leave of a step. A quarter of all
  that is simulated: samples, GPUs for generation, and the trainer's speed.
- ``async_over_sync_tail``: how much faster the same GPUs train the long tail of `benchmarks.long_tail` at a threshold
  of 1 than synchronously with all of them in turn generating and training.
- ``virtual_over_real_N``: virtual seconds for each real one, with N replicas of `benchmarks.scale`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

from asyncrl.config.load import load_config
from asyncrl.simulation.profile import (
    EngineFigures,
    GroupFigures,
    Profile,
    SampleFigures,
    SyncFigures,
    TrainerFigures,
    Turn,
)
from asyncrl.simulation.simulate import simulate
from benchmarks import scale
from benchmarks.long_tail import LIMIT, length

ROOT = Path(__file__).parent.parent

#: of 128 GPUs: seconds of a step of 512 prompts of 16 samples that generates and trains in turn, and of its generation
SYNCHRONOUS_S, GENERATION_S = 356.30, 177.85
#: threshold → seconds of a step, of waiting for samples, and of the update, with 64 GPUs for each pool
PUBLISHED = {
    "0": (231.34, 128.47, 98.77),
    "0.1": (171.30, 58.17, 109.12),
    "0.3": (146.11, 38.88, 103.22),
    "0.5": (150.63, 33.14, 113.16),
}
PROMPTS, SAMPLES, GPUS = 512 // 4, 16, 64 // 4
UPDATES = 4  # train steps between syncs
LONGEST = 28_000  # tokens
MEDIAN = LONGEST / LIMIT


def tail_groups(count: int = 2 * PROMPTS) -> tuple[GroupFigures, ...]:
    """Groups of the long tail, up to `LONGEST` tokens."""
    sample = lambda group, index: SampleFigures((Turn(length(MEDIAN, group, index)),), float(index % 2))
    return tuple(GroupFigures(200, tuple(sample(str(g), i) for i in range(SAMPLES))) for g in range(count))


def verl_profile() -> Profile:
    groups = tail_groups()
    mean = statistics.fmean(s.turns[0].sampled for g in groups for s in g.samples)
    updates = statistics.fmean(update for _, _, update in PUBLISHED.values())
    rest = statistics.fmean(step - wait - update for step, wait, update in PUBLISHED.values())
    # all samples of a step at once: 64 on each of 128 GPUs end after 177.85 s, 128 on each of 64 when the trainer has
    # waited for all of them, before it trains the last of four parts
    step, _, update = PUBLISHED["0"]
    ended_s = step - rest - update / UPDATES
    rows = PROMPTS * SAMPLES / GPUS
    row_s = (ended_s - GENERATION_S) / (rows / 2 * mean)
    engine = EngineFigures((ended_s - rows * mean * row_s) / LONGEST, row_s, 0.0, 0.0, 0.2)
    tokens = PROMPTS * SAMPLES * (mean + 200)
    trainer = TrainerFigures(ranks=GPUS, step_s=0.0, part_s=0.0, token_s=updates / tokens, stage_s=0.0)
    sync = SyncFigures(1, 1 / rest, *([0.0] * 8))
    return Profile(engine, trainer, sync, groups, reward_s=0.1, flush_s=0.003)


def step_s(profile: Profile, *options: str) -> float:
    """Seconds of `PROMPTS` prompts."""
    config = load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [
            "model.path=none",
            "data.train_files=[none]",
            f"rollout.n={SAMPLES}",
            f"rollout.replicas={GPUS}",
            "rollout.engine.slots=256",
            f"rollout.max_response_tokens={LONGEST}",
            f"rollout.engine.max_context_tokens={LONGEST + 200}",
            f"trainer.ranks={GPUS}",
            f"trainer.mini_batch_groups={PROMPTS // UPDATES}",
            f"async_training.trigger_parameter_sync_step={UPDATES}",
            f"trainer.total_steps={8 * UPDATES}",
            "checkpoint.every_steps=0",
            "param_sync.pause=abort",
            *options,
        ],
    )
    steps = simulate(config, profile).steps
    skipped = 3 * UPDATES
    return (steps[-1].at_s - steps[skipped - 1].at_s) / (len(steps) - skipped) * UPDATES


def verl_table() -> Mapping[str, float]:
    """Threshold → predicted seconds of a step. As theirs, the trainer takes a quarter of a step at once, and whatever
    is finished first."""
    profile = verl_profile()
    print(f"engine: {profile.engine.step_s * 1e3:.2f} ms a decode step, {profile.engine.row_s * 1e6:.0f} us a request")
    theirs = ("algorithm.advantage=benchmarks.overlap:WHOLE_BATCH", "async_training.queue_policy=ready_first")
    return {
        threshold: step_s(profile, f"async_training.staleness_threshold={threshold}", *theirs)
        for threshold in PUBLISHED
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    found: dict[str, float] = {}
    predicted = verl_table()
    print(f"{'threshold':>9} {'published':>10} {'predicted':>10} {'error':>7} {'faster than in turn':>20}")
    for threshold, (published, *_) in PUBLISHED.items():
        error, faster = predicted[threshold] / published - 1, SYNCHRONOUS_S / predicted[threshold]
        print(f"{threshold:>9} {published:>10.1f} {predicted[threshold]:>10.1f} {error:>+7.1%} {faster:>20.2f}")
    found["verl_table_error"] = max(abs(predicted[t] / PUBLISHED[t][0] - 1) for t in PUBLISHED)
    for replicas in (64, 1024):
        began_s = time.perf_counter()
        _, run = scale.control_cpu_s(replicas)
        found[f"virtual_over_real_{replicas}"] = run.steps[-1].at_s / (time.perf_counter() - began_s)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
