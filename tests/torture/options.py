"""``python -m tests.torture.options SEED [--runs N]``: whole runs with options drawn at random, whose processes die.

Combinations of options meet that no test names. What a run refuses is left out until it would start. It must then
finish, though a process is killed, with a ledger that passes the audit; go on with others of the options that may
change; and be evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.config.checks import derive
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.resume import may_change
from asyncrl.config.schema import Config
from asyncrl.run.preflight import preflight
from tests.support.faults import ACTORS, KILLED, OPTIONS, FaultyRun, audit
from tests.support.tiny import make_inputs, overrides

ROOT = Path(__file__).parents[2]
STEPS, MORE = 8, 4  # of a run, and of its second part
DRAWN = 14  # choices of a run
WAIT_S = 300.0

#: choices, each with its alternatives to the default: one option, or several that belong together
CHOICES: Sequence[Sequence[str]] = (
    ("model.lora.rank=1", "model.lora.rank=4 model.lora.target_modules=[q_proj,v_proj]"),
    ("param_sync.adapters=merged",),
    ("checkpoint.export_lora=merged",),
    ("mtp.enable_train=true", "mtp.enable_train=true mtp.loss=cross_entropy mtp.detach_encoder=false"),
    ("mtp.passes=2", "mtp.learning_rate=1e-3"),
    ("mtp.enable_rollout=true", "mtp.enable_rollout=true mtp.num_speculative_tokens=3 mtp.guard=false"),
    ("rollout.engine.dtype=bfloat16", "rollout.engine.deterministic=true"),
    ("rollout.engine.slots=3", "rollout.engine.slots=16"),
    ("rollout.engine.prefill_chunk_tokens=4",),
    (
        "rollout.replicas=2 ray.cpus_per_replica=0.25",
        "rollout.replicas=2 ray.cpus_per_replica=0.25 rollout.shards=2",
        "rollout.autoscale.max=2 ray.cpus_per_replica=0.25",
    ),
    ("rollout.n=2", "rollout.n=5"),
    ("rollout.pacing=false",),
    ("rollout.max_concurrent_groups=2",),
    ("rollout.temperature=0.7",),
    ("rollout.max_sample_tokens=10",),
    (
        "rollout.agent.path=tests.support.agents:dialogue reward.function=none reward.on_failure=value "
        "rollout.max_response_tokens=64 rollout.engine.max_context_tokens=128",
    ),
    ("rollout.agent.processes=2", "rollout.max_turns=2"),
    ("trainer.ranks=2 ray.cpus_per_rank=0.25",),
    ("trainer.mini_batch_groups=3",),
    ("trainer.max_tokens_per_micro_batch=64",),
    ("trainer.logprob_chunk_tokens=7", "trainer.activation_checkpointing=true"),
    ("trainer.mixed_precision=bfloat16", 'trainer.mixed_precision="no"'),
    ("algorithm.advantage=rloo", "algorithm.advantage=reinforce_pp", "algorithm.advantage=pass_at_k"),
    ("algorithm.surrogate=gspo", "algorithm.surrogate=cispo", "algorithm.surrogate=sapo"),
    ("algorithm.anchor=proximal", "algorithm.anchor=loglinear"),
    ("algorithm.corrections=[tis]", "algorithm.corrections=[mis]", "algorithm.corrections=[reject]"),
    ("algorithm.loss_aggregation=sequence_mean", "algorithm.loss_aggregation=constant"),
    ("algorithm.kl_coef=0.01", "algorithm.kl_reward_coef=0.01"),
    ("algorithm.entropy_coef=0.01", "algorithm.entropy_target=1.0"),
    ("algorithm.epochs=2",),
    ("algorithm.overlong=mask", "algorithm.overlong=penalize"),
    ("algorithm.filter_success_low=0.1",),
    ("async_training.staleness_threshold=0", "async_training.staleness_threshold=0.5"),
    ("async_training.staleness_threshold=2",),
    ("async_training.trigger_parameter_sync_step=2",),
    ("async_training.require_batches=2",),
    ("async_training.partial_rollout=false",),
    ("async_training.queue_policy=ready_first",),
    ("async_training.overdue=mask", "async_training.overdue=drop"),
    ("param_sync.transport=gloo",),
    ("param_sync.staging=full", "param_sync.staging=full param_sync.rollout_update=rolling"),
    ("param_sync.pause=keep param_sync.kv=keep", "param_sync.kv=recompute"),
    ("param_sync.bucket_bytes=4096", "param_sync.checksum=false"),
    ("validation.every_versions=1", "validation.every_versions=1 validation.hold_s=0 validation.temperature=0"),
    ("checkpoint.every_steps=1", "checkpoint.every_steps=2 checkpoint.asynchronous=false"),
    ("checkpoint.export_hf=all", "checkpoint.export_hf=final"),
    ("data.shuffle=false",),
)


class Options:
    """Draws options that a run in ``folder`` over ``inputs`` starts with."""

    def __init__(self, draw: random.Random, inputs: Path, folder: Path) -> None:
        self._draw = draw
        self._base = overrides(inputs, folder, *OPTIONS, f"data.validation_files=[{inputs / 'heldout.jsonl'}]")

    def drawn(self, kept: Sequence[str] = (), steps: int = STEPS) -> list[str]:
        """``kept``: options of the run to resume, beside which others that may change are drawn. Raises AssertionError
        for a refusal that none of the drawn ones explains."""
        choices = [self._draw.choice(choice).split() for choice in self._draw.sample(CHOICES, DRAWN)]
        fixed = [*kept, f"trainer.total_steps={steps}"]
        if kept:
            choices = [c for c in choices if all(may_change(_key(o)) for o in c)]
        while (refusal := self._refusal([*fixed, *(o for c in choices for o in c)])) is not None:
            print(f"  left out: {refusal.splitlines()[0]}", flush=True)
            assert choices, f"refused without any drawn option: {refusal}"
            named = [c for c in choices if any(_key(o) in refusal for o in c)]
            choices.remove(self._draw.choice(named or choices))
        return [*fixed, *(o for c in choices for o in c)]

    def config(self, options: Sequence[str]) -> Config:
        return load_config(None, [*self._base, *options])

    def _refusal(self, options: Sequence[str]) -> str | None:
        try:
            preflight(self.config(options), cpus=2)
        except ConfigError as e:
            return str(e)
        return None


def _key(option: str) -> str:
    return option.partition("=")[0]


def storm(seed: int) -> None:
    """One run, resumed with other options. Raises AssertionError or pytest's failure for what went wrong."""
    draw, scratch = random.Random(seed), Path(tempfile.mkdtemp(prefix="options-"))
    inputs, folder = make_inputs(scratch), scratch / "run"
    source, validation = Options(draw, inputs, folder), f"data.validation_files=[{inputs / 'heldout.jsonl'}]"
    first = source.drawn()
    print(f"seed {seed}: {' '.join(first)} ({scratch})", flush=True)
    _through(inputs, folder, [validation, *first], draw.choice([*ACTORS, "driver"]), draw.randint(1, STEPS // 2))
    before = source.config(first)
    _audit(folder, [before], [STEPS])

    second = source.drawn(first, STEPS + MORE)
    print(f"  then {' '.join(second)}", flush=True)
    _through(inputs, folder, [validation, *second])
    _audit(folder, [before, source.config(second)], [STEPS, MORE])
    command = [sys.executable, "-m", "asyncrl.cli.main", "eval", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(scratch)


def _through(inputs: Path, folder: Path, options: Sequence[str], victim: str = "", step: int = 0) -> None:
    """To the end of the run; a process of it is killed after a step."""
    run = FaultyRun(inputs, folder, *options)
    try:
        if victim == "driver":
            run.until_trained(step)
            run.process.kill()
            assert run.wait() in (KILLED, 0)  # it may just have ended
            run.close()
            run = FaultyRun(inputs, folder, *options)
        elif victim:
            run.until_trained(step)
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in run.actors(victim)[:1]:
                    process.kill()
        assert run.wait(WAIT_S) == 0, run.text
        assert victim or "Traceback" not in run.text, run.text
    finally:
        run.close()


def _audit(folder: Path, parts: Sequence[Config], steps: Sequence[int]) -> None:
    """``parts``: configs of the run, each for so many steps."""
    # of a masked group, what is older than the bound is not trained
    masks = any(c.async_training.overdue == "mask" for c in parts)
    sizes = [c.trainer.mini_batch_groups * c.async_training.require_batches for c in parts]
    with contextlib.redirect_stdout(io.StringIO()):  # it prints the ledger's figures
        audit(
            folder,
            [size for size, count in zip(sizes, steps, strict=True) for _ in range(count)],
            sum(steps) if masks else max(derive(c).staleness_bound for c in parts),
            in_order=all(c.async_training.queue_policy == "fifo" for c in parts),
            steps_per_version=parts[0].async_training.trigger_parameter_sync_step if len(parts) == 1 else None,
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    failed = []
    for seed in range(args.seed * 1000, args.seed * 1000 + args.runs):
        try:
            storm(seed)
        except BaseException as e:  # pytest's failures are no Exceptions
            if isinstance(e, (KeyboardInterrupt, SystemExit)):
                raise
            traceback.print_exc()
            failed.append(seed)
    print(f"{args.runs} runs, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
