"""A replica of two vLLM workers, each of which holds half of every projection, or half of the layers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

from transformers import Qwen2ForCausalLM

from asyncrl.config.schema import MTPConfig
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.param_sync.manifest import ManifestError
from tests.support.engine_contract import PROMPT, changed, error_of
from tests.support.engine_replica import request
from tests.support.vllm_replica import Replica, replica_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2, "mtp": MTPConfig(enable_rollout=True)},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
    ],
    ids=["tensor", "pipeline", "data"],
)
async def test_each_worker_receives_the_sync_and_logprobs_equal_hugging_face_s(tmp_path, options):
    checkpoint = make_checkpoint(tmp_path, seed=0, warm_start_steps=0)
    initial = read_tensors(checkpoint)
    reference = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    replica = await Replica.start(replica_config(checkpoint, **options))
    try:
        for seed in (1, 2):
            weights = changed(initial, seed)
            report = await replica.sync(weights)
            assert not report.evicted
            assert await replica.session._receiver.ask("received_bytes") == [report.nbytes] * 2  # each reads all of it
            assert {role: await replica.engine.digest(role) for role in report.digests} == report.digests
            if "pipeline_parallel_size" in options:
                continue  # vLLM's CPU runner loads weights into pipeline stages, but cannot generate with them
            await replica.engine.submit([request(f"{seed}/{i}", PROMPT, 12) for i in range(4)])
            if "data_parallel_size" in options:
                assert len(set(replica.engine._llm.engine_core.reqs_in_flight.values())) == 2  # each has some
            for answer in (await replica.collect({f"{seed}/{i}" for i in range(4)})).values():
                assert set(answer.versions) == {replica.version}
                assert error_of(reference, weights, PROMPT, answer) < 1e-4
        with pytest.raises(ManifestError, match=r"qkv_proj\.weight lacks v_proj"):
            await replica.sync({n: t for n, t in initial.items() if n != "model.layers.0.self_attn.v_proj.weight"})
        with pytest.raises(ManifestError, match=r"model\.surprise"):
            await replica.sync(initial | {"model.surprise": torch.zeros(2)})
        for name, shape, clash in (
            ("model.layers.0.self_attn.k_proj.weight", (32, 128), r"do not fill .*qkv_proj\.weight\[256, 128\]"),
            ("model.layers.0.mlp.up_proj.weight", (383, 128), r"do not fill .*gate_up_proj\.weight\[768, 128\]"),
            ("model.layers.0.mlp.down_proj.weight", (128, 192), r"sent as float32\[128, 192\], .*holds .*\[128, 384\]"),
            ("model.layers.0.input_layernorm.weight", (64,), r"sent as float32\[64\], .* holds .*\[128\]"),
            ("lm_head.weight", (8, 128), r"lm_head\.weight: sent as float32\[8, 128\], lm_head\.weight holds"),
        ):
            with pytest.raises(ManifestError, match=clash):
                await replica.sync(initial | {name: torch.zeros(shape)})
            assert not replica.engine.paused
    finally:
        await replica.close()
