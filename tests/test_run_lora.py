"""Whole runs with LoRA on Ray: only adapters are sent, and restarted actors get base and adapter again."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.config import DecoderConfig
from asyncrl.models.lora import linear_shapes
from tests.support.faults import FaultyRun, audit, restores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 14
OPTIONS = (
    "model.lora.rank=8",
    "trainer.optimizer.lr=1e-2",
    f"trainer.total_steps={STEPS}",
    "trainer.mini_batch_groups=4",
    "async_training.staleness_threshold=0",
    "rollout.replicas=2",
    "ray.cpus_per_replica=0.25",
    "checkpoint.export_hf=final",
)


def audit_lora(run: FaultyRun, inputs: Path, exact_steps: int) -> None:
    """Check the ledger, that rewards rose, and that in the last steps every sample came from the policy of its step."""
    audit(run.folder, [4] * STEPS, staleness_bound=0)
    ratios = run.column("actor/ratio_max")[-exact_steps:] + run.column("actor/ratio_min")[-exact_steps:]
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3
    rewards = run.column("critic/rewards/mean")
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1, rewards


def test_a_run_learns_and_a_killed_replica_gets_base_and_adapter_again(start, inputs):
    run = start()
    run.until_trained(4)
    run.kill("replica")
    assert run.wait(400) == 0, run.text
    audit_lora(run, inputs, exact_steps=STEPS)
    sent, whole = run.column("param_sync/bytes"), sum(t.nbytes for t in read_tensors(inputs / "checkpoint").values())
    assert sent[0] > whole
    assert sent[1] == min(sent) < whole / 2
    assert 1 <= sum(nbytes > whole for nbytes in sent) <= 2  # a second time if the new replica joined at a version
    pairs = load_file(run.folder / "checkpoints" / "final" / "hf" / "adapter_model.safetensors")
    assert len(pairs) == 2 * len(linear_shapes(DecoderConfig.load(inputs / "checkpoint")))


def test_a_run_that_lost_its_ranks_and_then_its_driver_resumes_with_its_adapters(start, inputs):
    """The second run sends merged weights: what is synced may change, since the state is the same."""
    run = start()
    run.until_trained(4)
    run.kill("rank")
    run.until_trained(7)
    run.process.kill()
    run.close()
    again = start("param_sync.adapters=merged", "checkpoint.export_lora=merged")
    assert again.wait(400) == 0, again.text
    assert restores(again.folder) == 2
    audit_lora(again, inputs, exact_steps=4)
    exported = again.folder / "checkpoints" / "final" / "hf"
    assert read_tensors(exported).keys() == read_tensors(inputs / "checkpoint").keys()
