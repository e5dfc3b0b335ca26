"""Families trained through transformers, beside vLLM's own code of them. `python -m benchmarks.families` has all."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

from benchmarks.families import WITH_VLLM, vllm_difference
from tests.support.families import FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

SHORT = ("Mixtral",)  # experts under names of their own
LONG = ("Gemma 2", "Gemma 3", "Phi 3", "GLM 4.5", "EXAONE 4", "Granite", "Qwen3 MoE")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
async def test_logprobs_after_a_step_and_a_sync_equal_those_of_the_exported_checkpoint(name, tmp_path):
    difference, runs_transformers = await vllm_difference(FAMILIES[name], tmp_path)
    assert difference <= WITH_VLLM
    assert not runs_transformers  # else it would be no reference
