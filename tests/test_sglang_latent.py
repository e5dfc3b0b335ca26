"""A real SGLang server on the CPU loads and syncs a DeepSeek with latent attention.

It does not generate, because the stand-ins lack the kernels with which SGLang's CPU build computes this attention. The
server's own checksums of its live parameters show that weights have arrived.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

import transformers

from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engines.sglang.delivery import SharedParcel
from tests.support.engine_contract import changed
from tests.support.engine_replica import Replica
from tests.support.sglang_replica import replica_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
#: fields of published checkpoints that transformers' config does not know
_PUBLISHED = {"architectures": ["DeepseekV3ForCausalLM"], "topk_method": "noaux_tc", "moe_layer_freq": 1}


def deepseek(folder):
    """Folder of a model with two dense layers and the tokenizer of another checkpoint."""
    other = make_checkpoint(folder / "other", seed=0, warm_start_steps=0)
    config = transformers.DeepseekV3Config(
        vocab_size=json.loads((other / "config.json").read_text())["vocab_size"],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        max_position_embeddings=1024,
        rope_parameters=_ROPE,
        dtype=torch.float32,
    )
    made = folder / "deepseek"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(made)
    for file in other.glob("*token*"):
        (made / file.name).write_bytes(file.read_bytes())
    raw = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(raw | _PUBLISHED))
    return made


async def test_the_joined_halves_of_latent_attention_arrive_in_each_sync(tmp_path):
    checkpoint = deepseek(tmp_path)
    initial = read_tensors(checkpoint)
    replica = await Replica.start(replica_config(checkpoint))
    try:
        replica.receiver._delivery.parcels = SharedParcel("cpu", 1 << 16), SharedParcel("cpu", 1 << 16)  # a few tensors
        seen = set()
        for seed in (1, 2):
            assert not (await replica.sync(changed(initial, seed))).evicted
            live = await replica.receiver.live_checksums("target")
            joined = {value for name, value in live.items() if "fused_qkv_a_proj_with_mqa" in name}
            assert len(joined) == 2
            assert not seen & joined
            seen |= joined
    finally:
        await replica.close()
