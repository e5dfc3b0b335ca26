"""LoRA from the torch trainer to a real SGLang server on the CPU, over real sessions."""

from __future__ import annotations

import importlib.util

import pytest
import pytest_asyncio
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from asyncrl.cpu.sglang import pinning_is_refused
from tests.support.lora_contract import *  # noqa: F403
from tests.support.lora_contract import AdapterContract, FinishingContract, ended, started

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(checkpoint):
    made = await started("sglang", checkpoint, in_flight="finish", pause="keep")
    yield made
    await ended(*made)


class TestAdapters(AdapterContract):
    async def test_the_server_holds_only_adapters_that_are_in_use(self, pair):
        trainer, engine = pair
        await trainer.sync()
        names = {f"policy-{slot}" for slot in engine._adapters.counts()}
        assert len(names) == 1
        assert names == {model["id"] for model in (await engine._client.get("/v1/models"))["data"] if model["parent"]}


class TestFinishing(FinishingContract):
    pass


async def test_memory_still_cannot_be_pinned_without_an_accelerator():
    """If this fails, torch has fixed it, and `asyncrl.cpu.sglang` can be deleted."""
    assert torch.accelerator.is_available() or pinning_is_refused()
