"""A run with the Megatron trainer: two tensor parallel ranks, the native engine, drafts, and a resume."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from asyncrl.models.checkpoint import is_draft, read_tensors
from tests.support.tiny import make_inputs, overrides

pytestmark = [pytest.mark.megatron, pytest.mark.slow]
ROOT = Path(__file__).parent.parent


LORA = ("model.lora.rank=4", "trainer.optimizer.lr=1e-2", "checkpoint.export_lora=merged")


@pytest.mark.parametrize("more", [(), LORA], ids=["whole", "lora"])
def test_a_run_with_two_tensor_parallel_ranks_trains_policy_and_draft_and_resumes(more, tmp_path):
    inputs, folder = make_inputs(tmp_path / "inputs"), tmp_path / "run"
    ray_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the sockets in it must stay below 108 characters
    options = overrides(
        inputs,
        folder,
        f"ray.temp_dir={ray_dir}",
        "trainer.backend=megatron",
        "trainer.ranks=2",
        "trainer.megatron.tensor_model_parallel_size=2",
        "mtp.enable_train=true",
        "mtp.enable_rollout=true",
        "checkpoint.every_steps=2",
        "async_training.staleness_threshold=1",
        "reporting.wandb.mode=disabled",
        "ray.cpus_per_rank=0.25",
        *more,
    )

    def run(*flags, steps):
        main = [sys.executable, "-m", "asyncrl.fully_async_main"]
        command = [*main, *flags, *options, f"trainer.total_steps={steps}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run(steps=5)
        run("--resume", "auto", steps=7)
    finally:
        shutil.rmtree(ray_dir, ignore_errors=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7]
    # engine and trainer agree on every logprob of the first version
    assert steps[0]["actor/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert all(row["mtp/loss_1"] > 0 for row in steps)
    sent = [row["param_sync/bytes"] for row in rows if "param_sync/bytes" in row]
    assert (sent[1] < sent[0]) == bool(more), "the base is sent once"
    before, after = read_tensors(inputs / "checkpoint"), read_tensors(folder / "checkpoints/final/hf")
    assert before.keys() == after.keys()
    for kind in (True, False):
        name = next(name for name in before if is_draft(name) == kind and name.endswith("down_proj.weight"))
        assert not torch.equal(before[name], after[name]), name
