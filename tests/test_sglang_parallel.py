"""An SGLang server of two workers, each of which holds half of every projection and receives every sync."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from transformers import Qwen2ForCausalLM

from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from tests.support.engine_contract import PROMPT, changed, error_of
from tests.support.engine_replica import Replica, request
from tests.support.sglang_replica import replica_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("delivery", ["memory", "gloo"])
async def test_each_worker_receives_the_sync_and_logprobs_equal_hugging_face_s(tmp_path, delivery):
    checkpoint = make_checkpoint(tmp_path, seed=0, warm_start_steps=0)
    initial = read_tensors(checkpoint)
    reference = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    replica = await Replica.start(replica_config(checkpoint, tensor_parallel_size=2, delivery=delivery))
    try:
        seen = set()
        for seed in (1, 2):
            weights = changed(initial, seed)
            report = await replica.sync(weights)
            assert {role: await replica.engine.digest(role) for role in report.digests} == report.digests
            live = await replica.receiver.live_checksums("target")
            assert len({name.split(": ")[0] for name in live}) == 2  # of each worker
            halves = {value for name, value in live.items() if name.endswith("qkv_proj.weight")}
            assert not seen & halves
            seen |= halves
            for temperature in (1.0, 0.7):
                asked = [request(f"{seed}/{temperature}", PROMPT, 12, temperature=temperature)]
                (answer,) = (await replica.generate(asked)).values()
                assert error_of(reference, weights, PROMPT, answer, temperature) < 1e-4
    finally:
        await replica.close()
