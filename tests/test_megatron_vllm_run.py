"""A run over three Python environments: the driver's, Megatron's and vLLM's."""

import json
import math
import os
from pathlib import Path

import pytest
from safetensors.torch import save_file

from asyncrl.models.checkpoint import is_draft, read_tensors
from tests.support.delta_nets import make_delta_net
from tests.support.engine_contract import perfect_draft
from tests.support.faults import FaultyRun, audit
from tests.support.tiny import make_inputs

ROOT = Path(__file__).parent.parent
#: relative to the project's root
PYTHONS = {"trainer.python": ".venv-megatron/bin/python", "rollout.engine.python": ".venv-vllm/bin/python"}

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all((ROOT / python).exists() for python in PYTHONS.values()),
        reason="needs both environments: make venv-megatron venv-vllm",
    ),
]


def test_megatron_trains_linear_attention_that_vllm_generates_with(tmp_path, monkeypatch):
    """A model that the native decoder does not support, with experts and Gated DeltaNet layers; vLLM's CPU kernel for
    these takes only bfloat16."""
    monkeypatch.setenv("ASYNCRL_PYTHON", os.environ.get("ASYNCRL_PYTHON", str(ROOT / ".venv/bin/python")))
    inputs = make_inputs(tmp_path / "inputs")
    folder = inputs / "checkpoint"
    raw = json.loads((folder / "config.json").read_text())
    kept = {name: raw[name] for name in ("vocab_size", "max_position_embeddings", "eos_token_id") if name in raw}
    make_delta_net(folder, "qwen3_next", linear_key_head_dim=128, linear_value_head_dim=128, std=0.2, **kept)
    run = FaultyRun(
        inputs,
        tmp_path / "run",
        "trainer.backend=megatron",
        "rollout.engine.name=vllm",
        *(f"{option}={ROOT / python}" for option, python in PYTHONS.items()),
        "trainer.mixed_precision=bfloat16",
        "rollout.engine.dtype=bfloat16",
        "async_training.staleness_threshold=0",
        "checkpoint.export_hf=final",
        "ray.placement_timeout_s=120",
        "supervision.answer_s=300",
    )
    try:
        assert run.wait(800) == 0, run.text
        audit(run.folder, [2] * 5, staleness_bound=0)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "actor/loss" in row]
        assert len(steps) == 5
        # transformers' own difference between bfloat16 and float32 is 0.006; with the rows of one matrix of a DeltaNet
        # shifted by one it is 0.4 to 1.4
        assert max(row["actor/kl_behaviour"] for row in steps) < 0.03
        assert all(row["actor/entropy"] < 0.85 * math.log(raw["vocab_size"]) for row in steps)
        before, after = read_tensors(folder), read_tensors(run.folder / "checkpoints/final/hf")
        assert before.keys() == after.keys()
        assert not any((before[name] == after[name]).all() for name in before if "linear_attn" in name)
    finally:
        run.close()


def test_megatron_trains_policy_and_draft_and_vllm_generates_with_both(tmp_path, monkeypatch):
    """vLLM's behaviour logprobs of fresh samples equal Megatron's, so each version's weights are the trainer's; and the
    draft that Megatron trains speculates in vLLM. It predicts the next token from a token's embedding, as the policy
    does: if the halves of its projection were swapped on the way, it would read the hidden state instead, and few
    drafted tokens would be accepted."""
    monkeypatch.setenv("ASYNCRL_PYTHON", os.environ.get("ASYNCRL_PYTHON", str(ROOT / ".venv/bin/python")))
    inputs = make_inputs(tmp_path / "inputs")
    before = perfect_draft(read_tensors(inputs / "checkpoint"), sharpness=4.0)
    save_file(before, inputs / "checkpoint/model.safetensors")
    run = FaultyRun(
        inputs,
        tmp_path / "run",
        "trainer.backend=megatron",
        "rollout.engine.name=vllm",
        *(f"{option}={ROOT / python}" for option, python in PYTHONS.items()),
        "mtp.enable_train=true",
        "mtp.enable_rollout=true",
        "trainer.optimizer.lr=1e-5",
        "async_training.staleness_threshold=0",
        "checkpoint.export_hf=final",
        "ray.placement_timeout_s=120",
        "supervision.answer_s=300",
    )
    try:
        assert run.wait(800) == 0, run.text
        audit(run.folder, [2] * 5, staleness_bound=0)
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "actor/loss" in row]
        assert len(steps) == 5
        assert max(abs(row["actor/ratio_max"] - 1) for row in steps) < 1e-3
        assert all(row["mtp/loss_1"] > 0 for row in steps)
        rates = [row["rollout/spec_accept_rate"] for row in rows if "rollout/spec_accept_rate" in row]
        assert rates
        assert min(rates) > 0.6  # vLLM drafts the likeliest token, which has three quarters of the mass here
        after = read_tensors(run.folder / "checkpoints/final/hf")
        assert before.keys() == after.keys()
        for draft in (True, False):
            name = next(n for n in before if is_draft(n) == draft and n.endswith("down_proj.weight"))
            assert not (before[name] == after[name]).all(), name
    finally:
        run.close()
