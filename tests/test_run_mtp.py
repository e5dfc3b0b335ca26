"""Whole runs with multi-token prediction on Ray: the draft learns with the policy, is synced with it and speculates."""

import numpy as np
import pytest
import torch

from asyncrl.models.checkpoint import is_draft, read_tensors
from tests.support.faults import audit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 24
OPTIONS = (
    "mtp.enable_train=true",
    "mtp.enable_rollout=true",
    "mtp.num_speculative_tokens=2",
    "mtp.guard=false",
    "mtp.learning_rate=1e-2",
    f"trainer.total_steps={STEPS}",
    "trainer.mini_batch_groups=4",
    "async_training.staleness_threshold=0",
    "rollout.replicas=2",
    "ray.cpus_per_replica=0.25",
    "checkpoint.export_hf=final",
)


def test_the_draft_of_a_run_learns_is_synced_and_reaches_a_restarted_replica(start, inputs):
    run = start()
    run.until_trained(STEPS // 2)
    run.kill("replica")
    assert run.wait(400) == 0, run.text
    audit(run.folder, [4] * STEPS, staleness_bound=0)
    # speculation keeps the policy's distribution: the trainer's logprobs of fresh samples equal the engine's
    ratios = run.column("actor/ratio_max") + run.column("actor/ratio_min")
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3
    accepted = run.column("rollout/spec_accept_rate")
    assert np.mean(accepted[-4:]) > np.mean(accepted[:4]) + 0.1
    assert run.column("mtp/loss_1")[-1] < run.column("mtp/loss_1")[0]
    before, after = read_tensors(inputs / "checkpoint"), read_tensors(run.folder / "checkpoints" / "final" / "hf")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert {is_draft(name) for name in changed} == {True, False}
