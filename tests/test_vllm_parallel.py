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
from tests.support.engine_replica import request
from tests.support.vllm_replica import Replica, replica_config

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize(
    "options",
    [{"tensor_parallel_size": 2, "mtp": MTPConfig(enable_rollout=True)}, {"pipeline_parallel_size": 2}],
    ids=["tensor", "pipeline"],
)
async def test_each_worker_takes_the_sync_and_logprobs_are_those_of_hugging_face(tmp_path, options):
    checkpoint = make_checkpoint(tmp_path, seed=0, warm_start_steps=0)
    initial = read_tensors(checkpoint)
    reference = Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    replica = await Replica.start(replica_config(checkpoint, **options))
    try:
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            weights = {n: t + 0.05 * torch.randn(t.shape, generator=generator) for n, t in initial.items()}
            report = await replica.sync(weights)
            assert not report.evicted
            assert await replica.endpoint._intake.ask("received_bytes") == [report.nbytes] * 2  # each reads it all
            assert {role: await replica.engine.digest(role) for role in report.digests} == report.digests
            if "pipeline_parallel_size" in options:
                continue  # vLLM's CPU runner takes weights in stages, but cannot generate in them
            (answer,) = (await replica.generate([request(f"{seed}", PROMPT, 12)])).values()
            assert set(answer.versions) == {replica.version}
            reference.load_state_dict({name: t for name, t in weights.items() if "mtp" not in name})
            with torch.no_grad():
                logits = reference(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
            found = torch.log_softmax(logits, -1)[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
            assert (found - torch.tensor(answer.logprobs)).abs().max() < 1e-4
        with pytest.raises(ManifestError, match=r"qkv_proj\.weight lacks v_proj"):
            await replica.sync({n: t for n, t in initial.items() if n != "model.layers.0.self_attn.v_proj.weight"})
        with pytest.raises(ManifestError, match=r"model\.surprise"):
            await replica.sync(initial | {"model.surprise": torch.zeros(2)})
    finally:
        await replica.close()
