"""Holds every item of the algorithms against its formula, every option against having no effect, and trains with each.

    python -m benchmarks.algorithms [--steps 16] [--recipes grpo gspo …] [--staleness 0 2] [--all]

1. *Parity*: the largest error of any item in float32, relative to the largest value of its case, against float64 loops
   written from the papers (`tests.support.formulas`), over random steps with masks, versions and several sequences.
2. *Effects*: options whose alternatives (`tests.support.option_effects`) give the same gradient, on random batches or
   on groups of a real run, from its first to its last, scored with that run's final weights.
3. *Learning*: each of configs/algorithms/ on the quickstart's task for ``--steps`` train steps; it has learned if its
   held-out accuracy grows by a third. ``--all``: 48 steps at staleness 0 and 2, about 70 minutes.

The last line is JSON: ``items``, ``parity_max_error``, ``inert_options``, ``algorithms``, ``learned``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from asyncrl.algorithms.batch_view import BatchView
from asyncrl.algorithms.items import ADVANTAGES, CORRECTIONS, SURROGATES
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.models.checkpoint import load_decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.sample_queue.spool import Spool
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.segments import RowSegments
from asyncrl.types.groups import Group
from benchmarks.quickstart import ROOT, ensure_inputs, run
from tests.support import formulas
from tests.support.formulas import Case
from tests.support.option_effects import CHANGES_THE_GRADIENT, effects, gradient, random_batch

CASES = 200
RECIPES = sorted(path.stem for path in (ROOT / "configs/algorithms").glob("*.yaml"))
LEAST_EFFECT = 1e-6  # of a gradient, relative
RECORDED = {"steps": 12, "groups": 24, "max_tokens": 32}
TEMPERATURE = 1.5  # of the recorded run: at 1 the lengths of a group hardly differ
GAIN = 4 / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES)
    parser.add_argument("--staleness", type=int, nargs="+", default=[2])
    parser.add_argument("--all", action="store_true", help="48 steps at staleness 0 and at 2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)

    errors = dict(parity())
    for item, error in errors.items():
        print(f"parity      {item:<28} {error:.1e}", flush=True)
    inert = inert_options(recorded_batch(checkpoint, data))
    print(f"effects     {len(CHANGES_THE_GRADIENT)} options, without any: {', '.join(inert) or 'none'}", flush=True)

    steps, thresholds = (48, [0, 2]) if args.all else (args.steps, args.staleness)
    learned = dict.fromkeys(args.recipes, True)
    print(f"{'algorithm':<16} staleness  steps  accuracy before  after  seconds", flush=True)
    for staleness in thresholds:
        for recipe in args.recipes:
            options = [f"trainer.total_steps={steps}", f"async_training.staleness_threshold={staleness}"]
            with tempfile.TemporaryDirectory(prefix="asyncrl-algorithms-") as folder:
                config = ROOT / "configs/algorithms" / f"{recipe}.yaml"
                summary = run(0, checkpoint, data, Path(folder), options, config)
            before, after = summary["accuracy_before"], summary["accuracy_after"]
            learned[recipe] &= after >= GAIN * before
            row = f"{staleness:>9}  {summary['steps']:>5}  {before:>15.3f}  {after:.3f}  {summary['duration_s']:>7.1f}"
            print(f"{recipe:<16} {row}", flush=True)
    print(
        json.dumps(
            {
                "items": len(errors),
                "parity_max_error": max(errors.values()),
                "inert_options": len(inert),
                "algorithms": len(learned),
                "learned": sum(learned.values()),
            }
        )
    )


def parity() -> Iterator[tuple[str, float]]:
    """Each registered item, and its largest error in float32."""
    for name in ADVANTAGES.names():
        yield f"advantage {name}", max(_advantage_error(name, Case.random(seed)) for seed in range(CASES))
    for name in SURROGATES.names():
        yield f"surrogate {name}", max(_surrogate_error(name, Case.random(seed), seed) for seed in range(CASES))
    for name in CORRECTIONS.names():
        yield f"correction {name}", max(_correction_error(name, Case.random(seed)) for seed in range(CASES))


def _columns(case: Case) -> tuple[np.ndarray, ...]:
    """Row offsets and trained; then current, anchor and behaviour logprobs."""
    sequence, trained, current, anchor, behaviour, _ = map(np.array, zip(*case.tokens, strict=True))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=len(case.sequences)))])
    return offsets, trained, current, anchor, behaviour


def _error(found: np.ndarray, expected: list[float] | np.ndarray) -> float:
    expected = np.asarray(expected, dtype=np.float64)
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6)) if len(expected) else 0.0


def _advantage_error(name: str, case: Case) -> float:
    options, (offsets, trained, *_) = AlgorithmConfig(advantage=name), _columns(case)
    counted = np.isin(np.arange(len(case.rewards)), case.trained_samples())
    rewards = np.array(case.rewards, np.float32)
    sample, penalty = np.array(case.sequences), np.zeros(len(trained))
    view = BatchView(rewards, np.array(case.group), counted, sample, offsets, trained, penalty, 0 * penalty)
    found = ADVANTAGES.find(name).compute(view, options)
    return _error(found[trained], np.array(formulas.ADVANTAGES[name](case, vars(options)))[trained])


def _surrogate_error(name: str, case: Case, seed: int) -> float:
    """Of values and gradients."""
    options, (offsets, trained, current, anchor, _) = AlgorithmConfig(surrogate=name), _columns(case)
    advantages = np.random.default_rng(seed).normal(size=len(case.sequences))[[token[0] for token in case.tokens]]
    logprobs = torch.tensor(current, dtype=torch.float32, requires_grad=True)
    others = (torch.tensor(values, dtype=torch.float32) for values in (anchor, advantages))
    segments = RowSegments(offsets, torch.tensor(trained))
    loss, _ = SURROGATES.find(name).loss(logprobs, *others, segments, options)
    loss[torch.tensor(trained)].sum().backward()
    expected = formulas.SURROGATES[name](case, advantages.tolist(), vars(options))
    values, slopes = np.array(list(expected.values())).T
    assert logprobs.grad is not None
    return max(_error(loss.detach().numpy()[trained], values), _error(logprobs.grad.numpy()[trained], slopes))


def _correction_error(name: str, case: Case) -> float:
    options, (offsets, trained, _, anchor, behaviour) = AlgorithmConfig(corrections=[name]), _columns(case)
    segments = RowSegments(offsets, torch.tensor(trained))
    ratio = torch.tensor(anchor - behaviour, dtype=torch.float32)
    weights, _ = CORRECTIONS.find(name).weights(ratio, segments, options)
    return _error(weights.numpy()[trained], list(formulas.CORRECTIONS[name](case, vars(options)).values()))


def inert_options(recorded: tuple[TrainBatch, np.ndarray, np.ndarray, float]) -> list[str]:
    """Options of which any two alternatives give the same gradient on a random batch, or all of them on the recorded
    one, where some have none (with one sequence per sample, a mean over sequences is one over samples)."""
    batch, current, entropy, version = recorded
    inert = []
    for option in CHANGES_THE_GRADIENT:
        if min(effects(option, lambda o: gradient(o, *random_batch(), 7, version=3.0))) < LEAST_EFFECT:
            inert.append(f"{option} (random)")
        made = effects(option, lambda o: gradient(o, batch, current, entropy, RECORDED["max_tokens"], version))
        if max(made) < LEAST_EFFECT:
            inert.append(f"{option} (recorded)")
    return inert


def recorded_batch(checkpoint: Path, data: Path) -> tuple[TrainBatch, np.ndarray, np.ndarray, float]:
    """Groups of a whole short run, with logprobs under its first weights as the reference and halfway between
    behaviour and final weights as the proximal policy; logprobs and entropies [R] under the final weights, and their
    position in versions."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-algorithms-") as name:
        folder, steps = Path(name), RECORDED["steps"]
        options = [f"trainer.total_steps={steps}", f"rollout.max_response_tokens={RECORDED['max_tokens']}"]
        options += [f"rollout.temperature={TEMPERATURE}", "trainer.mini_batch_groups=16", "checkpoint.export_hf=final"]
        run(0, checkpoint, data, folder, options)
        shutil.copytree(folder / "seed-0/spool", folder / "spool")  # opening one writes to it
        spool = Spool(folder / "spool")
        every = [Group.from_buffer(payload) for _, payload in spool.records()]
        groups = every[:: len(every) // RECORDED["groups"]]
        spool.close()
        (final,) = (folder / "seed-0/checkpoints").glob(f"step_{steps:06d}/hf*")
        batch = build_batch(groups)
        current, entropy = _scores(final, batch)
        reference, _ = _scores(checkpoint, batch)
    behaviour = batch.columns["behaviour_logprobs"]
    batch.columns["reference_logprobs"] = reference
    batch.columns["proximal_logprobs"] = ((behaviour + current) / 2).astype(np.float32)
    return batch, current, entropy, float(steps - 1)


@torch.no_grad()
def _scores(model_path: Path, batch: TrainBatch) -> tuple[np.ndarray, np.ndarray]:
    """float32 [R] each: logprobs and entropies under a checkpoint."""
    model, logprobs, entropies = load_decoder(model_path), [], []
    for b, (first, end) in enumerate(zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False)):
        tokens = torch.tensor(batch.tokens[first:end]).long()
        logits = model.logits(tokens, PackedLayout.from_lengths(np.array([len(tokens)]))).float()
        every = (logits / TEMPERATURE).log_softmax(-1)
        rows = slice(batch.row_offsets[b], batch.row_offsets[b + 1])
        here = every[torch.tensor(batch.rows[rows] - first)]
        logprobs.append(here.gather(1, torch.tensor(batch.targets[rows]).long()[:, None]).squeeze(1))
        entropies.append(-(here.exp() * here).sum(-1))
    return torch.cat(logprobs).numpy(), torch.cat(entropies).numpy()


if __name__ == "__main__":
    main()
