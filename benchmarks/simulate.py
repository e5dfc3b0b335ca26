"""Holds `asyncrl simulate` against published and real runs, and times it. The last line is JSON.

    python -m benchmarks.simulate [--steps 12]

- ``worst_error``: of the predictions of `RUNS`, real runs on this machine, from the profile of another one, `MEASURED`,
  whose engines are slowed down to share its cores (`benchmarks.rate_limited`). Relative for steps per second, absolute
  for the pools' idle shares and the mean staleness in versions. Lengths and waits for tools are those of the same
  groups, given, not measured.
- ``verl_table_error``: largest error of the predicted seconds of a step against the published ones of verl's fully
  asynchronous trainer, Qwen2.5-Math-7B on 128 H20, 64 of which train (docs/advance/fully_async.md there). Its engine is
  calibrated by simulations of two figures: the generation of a step on 128 GPUs, 177.85 s, and a step at a threshold of
  0, which is not predicted. Its trainer takes the mean of the published updates, by tokens; its sync what they leave of
  a step. A quarter of all that is simulated: samples, GPUs for generation, and the trainer's speed.
- ``async_over_sync_tail``: how much faster the same GPUs, best divided, train the long tail of `benchmarks.long_tail`
  than synchronously, with all of them in turn generating and training: at the best of `TAIL_THRESHOLDS`; ``…_1``: at a
  threshold of 1. At a threshold of s the groups of 1 + s versions are in flight, so a version takes at least the time
  of the longest answers over 1 + s.
- ``virtual_over_real_N``: virtual seconds for each real one, with N replicas and as many ranks that train this tail at
  a threshold of 1, a step of 128 samples for each replica, but of at most `MOST_GROUPS` prompts.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.load import load_config
from asyncrl.observability.sinks.jsonl import METRICS_FILE, read_jsonl
from asyncrl.processes.garbage import collect_rarely
from asyncrl.simulation.profile import GroupFigures, Profile, SampleFigures, Turn
from asyncrl.simulation.simulate import Simulation, simulate
from benchmarks import quickstart, scale
from benchmarks.long_tail import LIMIT, length, without_end
from benchmarks.quickstart import ROOT
from benchmarks.rate_limited import turns_of, waited_s

CHECKPOINT, DATA = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"

#: of 128 GPUs: seconds of a step of 512 prompts of 16 samples that generates and trains in turn, and of its generation
SYNCHRONOUS_S, GENERATION_S = 356.30, 177.85
#: threshold → seconds of a step, of waiting for samples, and of the update, with 64 GPUs for each pool
PUBLISHED = {
    "0": (231.34, 128.47, 98.77),
    "0.1": (171.30, 58.17, 109.12),
    "0.3": (146.11, 38.88, 103.22),
    "0.5": (150.63, 33.14, 113.16),
}
UPDATE_S = statistics.fmean(update for _, _, update in PUBLISHED.values())
REST_S = statistics.fmean(step - wait - update for step, wait, update in PUBLISHED.values())
PROMPTS, SAMPLES, GPUS = 512 // 4, 16, 64 // 4
UPDATES = 4  # train steps between syncs
LONGEST = 28_000  # tokens
TAIL_THRESHOLDS = (1, 2)
MOST_GROUPS = 2048  # of a step of a thousand replicas: a run holds the tokens of two, here 10 GB
MEDIAN = LONGEST / LIMIT
#: as theirs, the trainer takes a quarter of a step at once, and whatever is finished first
THEIRS = ["algorithm.advantage=benchmarks.overlap:WHOLE_BATCH", "async_training.queue_policy=ready_first"]
WHOLE_STEPS = [f"trainer.mini_batch_groups={PROMPTS}", "async_training.trigger_parameter_sync_step=1"]


def tail_groups(count: int = 2 * PROMPTS) -> tuple[GroupFigures, ...]:
    """Groups of the long tail, up to `LONGEST` tokens."""
    sample = lambda group, index: SampleFigures((Turn(length(MEDIAN, group, index)),), float(index % 2))
    return tuple(GroupFigures(200, tuple(sample(str(g), i) for i in range(SAMPLES))) for g in range(count))


def verl_profile(decode_s: float, row_s: float) -> Profile:
    """``decode_s``, ``row_s``: of a decode step, and what each running request adds."""
    groups = tail_groups()
    tokens = PROMPTS * SAMPLES * (statistics.fmean(s.turns[0].sampled for g in groups for s in g.samples) + 200)
    base = scale.profile()
    return replace(
        base,
        engine=replace(base.engine, step_s=decode_s, row_s=row_s, prefill_token_s=0.0),
        trainer=replace(base.trainer, ranks=GPUS, step_s=0.0, token_s=UPDATE_S / tokens),
        sync=replace(base.sync, nbytes=1, bytes_per_s=1 / REST_S),
        groups=groups,
    )


@functools.cache
def calibrated() -> Profile:
    """What each running request adds to a decode step makes half of the GPUs slower by as much as was published."""
    decode_s = GENERATION_S / LONGEST

    def with_row(row_s: float) -> Profile:
        scale_by = GENERATION_S / generated_s(decode_s, row_s, 2 * GPUS)
        return verl_profile(scale_by * decode_s, scale_by * row_s)

    low, high = 0.0, decode_s / 16
    for _ in range(7):
        middle = (low + high) / 2
        faster = step_s(with_row(middle), *THEIRS, "async_training.staleness_threshold=0") < PUBLISHED["0"][0]
        low, high = (middle, high) if faster else (low, middle)
    return with_row(low)


def generated_s(decode_s: float, row_s: float, replicas: int) -> float:
    """Seconds to generate a step's samples, all at once: the mean over three steps that nobody trains."""
    profile = verl_profile(decode_s, row_s)
    untrained = replace(profile, trainer=replace(profile.trainer, token_s=0.0), sync=scale.profile().sync)
    whole = [*WHOLE_STEPS, f"rollout.replicas={replicas}", "async_training.staleness_threshold=0"]
    steps = simulated(untrained, *whole, "trainer.total_steps=4").steps
    return (steps[-1].at_s - steps[0].at_s) / (len(steps) - 1)


def simulated(profile: Profile, *options: str) -> Simulation:
    """Steps of `PROMPTS` prompts, a quarter at once."""
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
            "rollout.pacing=false",
            *options,
        ],
    )
    return simulate(config, profile)


def step_s(profile: Profile, *options: str) -> float:
    """Seconds of `PROMPTS` prompts."""
    run = simulated(profile, *options)
    steps, skipped = run.steps, 3 * UPDATES
    each_s = (steps[-1].at_s - steps[skipped - 1].at_s) / (len(steps) - skipped)
    return each_s * PROMPTS / run.config.trainer.mini_batch_groups


def virtual_over_real(replicas: int) -> float:
    pools = [f"rollout.replicas={replicas}", f"trainer.ranks={replicas}", "async_training.staleness_threshold=1"]
    groups = min(PROMPTS * replicas // GPUS, MOST_GROUPS)
    step = [f"trainer.mini_batch_groups={groups}", "async_training.trigger_parameter_sync_step=1"]
    profile, began_s = calibrated(), time.perf_counter()
    run = simulated(profile, *pools, *step, "trainer.total_steps=4")
    return run.steps[-1].at_s / (time.perf_counter() - began_s)


def verl_table() -> Mapping[str, float]:
    """Threshold → predicted seconds of a step."""
    profile = calibrated()
    print(f"engine: {profile.engine.step_s * 1e3:.2f} ms a decode step, {profile.engine.row_s * 1e6:.0f} us a request")
    return {
        threshold: step_s(profile, *THEIRS, f"async_training.staleness_threshold={threshold}")
        for threshold in PUBLISHED
    }


def tail_table() -> Mapping[int, Mapping[int, float]]:
    """Threshold → ranks of the trainer → how much faster a step is than in turn; the same GPUs, of the same speed."""
    profile, whole = calibrated(), "algorithm.advantage=benchmarks.overlap:WHOLE_BATCH"
    all_of = [f"rollout.replicas={2 * GPUS}", f"trainer.ranks={2 * GPUS}", "async_training.staleness_threshold=0"]
    in_turn = step_s(profile, *WHOLE_STEPS, whole, *all_of)
    print(f"synchronous: {in_turn:.1f} s a step")
    split = lambda ranks: [f"trainer.ranks={ranks}", f"rollout.replicas={2 * GPUS - ranks}"]
    return {
        threshold: {
            ranks: in_turn / step_s(profile, f"async_training.staleness_threshold={threshold}", *split(ranks))
            for ranks in range(GPUS, 2 * GPUS - 3, 2)
        }
        for threshold in TAIL_THRESHOLDS
    }


# -- real runs ---------------------------------------------------------------------------------------------------------

MEDIAN_TOKENS, WAIT_S = 20, 2.0
COMMON = [
    "trainer.optimizer.lr=1e-12",
    "trainer.mini_batch_groups=8",
    "rollout.engine.name=benchmarks.rate_limited:ENGINE",
    "rollout.engine.slots=16",
    "rollout.max_response_tokens=800",
    "rollout.engine.max_context_tokens=1024",
    "reward.function=benchmarks.long_tail:reward",
    "checkpoint.every_steps=0",
    "reporting.report=false",
    "reporting.wandb.mode=disabled",
    "data.validation_files=[]",
    "ray.cpus_per_replica=0.2",
]


def tail(median: int) -> list[str]:
    return ["rollout.agent_loop=benchmarks.long_tail:LongTail", f"rollout.agent_loop_args.median={median}"]


WAITS = [
    "rollout.agent_loop=benchmarks.rate_limited:Waits",
    f"rollout.agent_loop_args.median={MEDIAN_TOKENS}",
    f"rollout.agent_loop_args.wait_s={WAIT_S}",
]


def pools(replicas: int, threshold: str) -> list[str]:
    return [f"rollout.replicas={replicas}", f"async_training.staleness_threshold={threshold}"]


MEASURED = [*pools(1, "0"), *tail(MEDIAN_TOKENS)]
RUNS = {
    "2 replicas": [*pools(2, "0"), *tail(MEDIAN_TOKENS)],
    "4 replicas, 0.5": [*pools(4, "0.5"), *tail(MEDIAN_TOKENS)],
    "2 replicas, 1": [*pools(2, "1"), *tail(MEDIAN_TOKENS)],
    "twice the length": [*pools(2, "0.5"), *tail(2 * MEDIAN_TOKENS)],
    "tools": [*pools(2, "0.5"), *WAITS],
    "tools, 4 replicas, 1": [*pools(4, "1"), *WAITS],
}


class Figures(NamedTuple):
    steps_per_s: float
    trainer_idle: float
    rollouter_idle: float
    staleness: float

    def errors(self, real: Figures) -> dict[str, float]:
        differ = {name: abs(a - b) for name, a, b in zip(self._fields, self, real, strict=True)}
        return differ | {"steps_per_s": differ["steps_per_s"] / real.steps_per_s}


def real_run(checkpoint: Path, options: Sequence[str], steps: int, out: Path) -> Figures:
    out.mkdir()
    quickstart.run(0, checkpoint, DATA, out, [*COMMON, *options, f"trainer.total_steps={steps}"])
    rows = [row for row in read_jsonl(out / "seed-0" / METRICS_FILE) if "actor/loss" in row][2:]
    passed_s = sum(row["perf/step_s"] for row in rows)
    idle_s = lambda pool: sum(row["perf/step_s"] * row[f"fully_async/{pool}/idle_ratio"] for row in rows)
    ages = statistics.fmean(row["fully_async/staleness/mean"] for row in rows)
    return Figures(len(rows) / passed_s, idle_s("trainer") / passed_s, idle_s("rollouter") / passed_s, ages)


def predicted_run(checkpoint: Path, options: Sequence[str], steps: int, profile: Profile) -> Figures:
    inputs = [f"model.path={checkpoint}", f"data.train_files=[{DATA / 'train.jsonl'}]"]
    config = load_config(
        str(ROOT / "configs/quickstart.yaml"), [*inputs, *COMMON, *options, f"trainer.total_steps={steps}"]
    )
    of = simulate(config, profile, prompts=len((DATA / "train.jsonl").read_text().splitlines())).figures()
    return Figures(1 / of["step_s"], of["trainer_idle"], of["rollouter_idle"], of["staleness_mean"])


@dataclass(frozen=True)
class SameSamples(Profile):
    """A measured profile with the samples that a run with these ``options`` has under the same names."""

    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, measured: Profile, options: Sequence[str]) -> SameSamples:
        return cls(**{field.name: getattr(measured, field.name) for field in fields(measured)}, options=tuple(options))

    def group(self, uid: str) -> GroupFigures:
        return _group(self.options, round(statistics.fmean(g.prompt_tokens for g in self.groups)), uid)


@functools.cache
def _group(options: tuple[str, ...], prompt_tokens: int, uid: str) -> GroupFigures:
    def turns(index: int) -> tuple[Turn, ...]:
        if options[-3:] != tuple(WAITS):
            return (Turn(length(int(options[-1].partition("=")[2]), uid, index)),)
        first, second = turns_of(MEDIAN_TOKENS, uid, index)
        return Turn(first, 8, waited_s(WAIT_S, uid, index)), Turn(second)

    return GroupFigures(prompt_tokens, tuple(SampleFigures(turns(i), float(i % 2)) for i in range(8)))


def against_reality(steps: int) -> dict[str, float]:
    quickstart.ensure_inputs(CHECKPOINT, DATA)
    worst = 0.0
    print(f"{'run':22} {'steps/s':>15} {'trainer idle':>13} {'rollouter idle':>15} {'age':>11}   real, predicted")
    with tempfile.TemporaryDirectory(prefix="asyncrl-simulate-") as folder:
        checkpoint = without_end(CHECKPOINT, Path(folder) / "checkpoint")
        real_run(checkpoint, MEASURED, steps, Path(folder) / "measured")
        profile = Profile.read(Path(folder) / "measured/seed-0/profile.json")
        for i, (name, options) in enumerate(RUNS.items()):
            found = real_run(checkpoint, options, steps, Path(folder) / str(i))
            guess = predicted_run(checkpoint, options, steps, SameSamples.of(profile, options))
            worst = max(worst, *guess.errors(found).values())
            pairs = [f"{a:.2f}, {b:.2f}" for a, b in zip(found, guess, strict=True)]
            print(f"{name:22} {pairs[0]:>15} {pairs[1]:>13} {pairs[2]:>15} {pairs[3]:>11}", flush=True)
    return {"worst_error": worst}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="of each real run (default: %(default)s)")
    args = parser.parse_args()
    collect_rarely()  # as `asyncrl simulate` does
    found = against_reality(args.steps)
    predicted = verl_table()
    print(f"{'threshold':>9} {'published':>10} {'predicted':>10} {'error':>7} {'faster than in turn':>20}")
    for threshold, (published, *_) in PUBLISHED.items():
        error, faster = predicted[threshold] / published - 1, SYNCHRONOUS_S / predicted[threshold]
        print(f"{threshold:>9} {published:>10.1f} {predicted[threshold]:>10.1f} {error:>+7.1%} {faster:>20.2f}")
    found["verl_table_error"] = max(abs(predicted[t] / PUBLISHED[t][0] - 1) for t in PUBLISHED if t != "0")
    best: dict[int, float] = {}
    for threshold, table in tail_table().items():
        cells = ", ".join(f"{ranks} → {faster:.2f}" for ranks, faster in table.items())
        print(f"long tail at a threshold of {threshold}; trainer's ranks, of {2 * GPUS}: {cells}")
        best[threshold] = max(table.values())
    found["async_over_sync_tail"], found["async_over_sync_tail_1"] = max(best.values()), best[1]
    for replicas in (64, 1024):
        found[f"virtual_over_real_{replicas}"] = virtual_over_real(replicas)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
