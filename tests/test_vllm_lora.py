"""LoRA from the torch trainer to real vLLM on the CPU, over real sessions: as adapters, beside a draft, and merged.

Each class has a replica: with adapters, also with a draft that speculates, with requests that finish on their adapters,
or with merged weights. Each test of a class continues from the state that the previous one left.
"""

from __future__ import annotations

import numpy as np
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.lora.adapters import adapter_shapes
from asyncrl.param_sync.manifest import is_adapter
from tests.support.lora import ResponseCollector, requests, samples_of
from tests.support.lora_contract import *  # noqa: F403
from tests.support.lora_contract import AdapterContract, FinishingContract, ended, follow, started

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def pair(request, checkpoint):
    made = await started("vllm", checkpoint, args={"block_size": 32}, **request.param)
    yield made
    await ended(*made)


SPECULATING = {"enable_rollout": True, "num_speculative_tokens": 2}
LEARNING = {**SPECULATING, "enable_train": True, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "pair", [LEARNING, pytest.param({}, marks=pytest.mark.slow)], indirect=True, ids=["draft", "alone"]
)
class TestAdapters(AdapterContract):
    @pytest.mark.parametrize("kv", [pytest.param("recompute", marks=pytest.mark.slow), "keep"])
    async def test_kept_requests_continue_under_the_new_adapter(self, pair, kv):
        trainer, engine = pair
        await trainer.sync()
        trainer.learn(await samples_of(engine, requests(4)))
        await engine.submit(requests(2, new=800, temperature=0.7))
        collector = ResponseCollector(engine)
        await collector.of(["r0", "r1"], tokens=5)
        await trainer.sync(pause="keep", kv=kv)
        for sample in await collector.of(["r0", "r1"]):
            new = sample.sequences[0].spans[-1]
            assert (new.version, new.mixed_kv) == (trainer.version, kv == "keep")
            error = np.abs(trainer.scores([sample], 0.7) - sample.sequences[0].logprobs)[new.start :].max()
            assert (error < 1e-4) == (kv == "recompute")

    async def test_an_adapter_that_finds_no_layer_fails_the_sync(self, pair, monkeypatch):
        trainer, engine = pair
        ask = engine._receiver.ask

        async def lacking(command, *arguments):
            answers = await ask(command, *arguments)
            return [["model.elsewhere.q_proj"]] if command == "adopt" else answers

        monkeypatch.setattr(engine._receiver, "ask", lacking)
        with pytest.raises(SyncError, match=r"phase commit.*vLLM does not adapt model\.elsewhere\.q_proj"):
            await trainer.sync()
        assert not trainer.fleet.routable
        monkeypatch.setattr(engine._receiver, "ask", ask)
        await follow(trainer, engine, 1)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [SPECULATING], indirect=True)
class TestFrozenDraft:
    async def test_the_draft_is_sent_only_with_the_base(self, pair):
        trainer, engine = pair
        sent = await follow(trainer, engine, 4)
        assert sent[1:] == [trainer.rank.manifest().without_base().nbytes] * 3
        assert not trainer.rank.manifest().without_base().sends_draft


@pytest.mark.slow  # SGLang's tests cover the shared parts
@pytest.mark.parametrize("pair", [{"in_flight": "finish"}], indirect=True)
class TestFinishing(FinishingContract):
    """Some syncs send the base too, and vLLM then drops its adapters."""

    async def test_vllm_reads_the_exported_adapter_in_peft_s_format(self, pair, tmp_path):
        trainer, _ = pair
        trainer.rank.export_hf(tmp_path)
        peft = PEFTHelper.from_local_dir(str(tmp_path), None)
        spec = trainer.rank.manifest().adapter
        lora = LoRAModel.from_local_checkpoint(
            str(tmp_path), set(spec.target_modules), peft, lora_model_id=7, device="cpu", dtype=torch.float32
        )
        found = {}
        for module, weights in lora.loras.items():
            shape = (weights.lora_b.shape[0], weights.lora_a.shape[1])
            found |= dict(zip(adapter_shapes(module, shape, spec.r), (weights.lora_a, weights.lora_b), strict=True))
            assert weights.scaling == spec.alpha / spec.r
        sent = {name: tensor for name, tensor in trainer.rank.export(base=False) if is_adapter(name)}
        assert found.keys() == sent.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"workers": 2} | LEARNING], indirect=True)
class TestTwoWorkers:
    async def test_each_worker_has_its_half_of_every_adapter(self, pair):
        trainer, engine = pair
        sent = await follow(trainer, engine, 3)
        assert await engine._receiver.ask("received_bytes") == [sent[-1]] * 2  # each reads all of it


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"adapters": "merged"}], indirect=True)
class TestMerged:
    async def test_merged_weights_equal_the_policy(self, pair):
        trainer, engine = pair
        assert set(await follow(trainer, engine, 3)) == {trainer.rank.manifest().nbytes}
