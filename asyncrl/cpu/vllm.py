"""Corrections of vLLM's CPU build, each applied only where the defect is found.

*Temperatures under speculation*: the CPU kernel that spreads a request's sampling parameters over its drafted tokens
writes into a temporary copy where their prefix sums are not int64, and the result is uninitialized memory, so that
sampling follows arbitrary temperatures. `spread_is_broken` measures it; the replacement is the same operation in torch.

*Experts after an update*: on the CPU the weights of all experts are packed for their kernel when it is made, and only
then. A reload leaves them as the checkpoint has them, which the kernel takes for packed ones: the model answers, but
wrongly. `experts_stay_unpacked` tries it; the correction rebuilds the kernel at each reload.

*Latent attention on a processor with AMX*: models with it (DeepSeek's) get a kernel there that packs bfloat16 weights
alone, and the engine does not start with others. `mla_kernel` asks for the one without AMX where vLLM's own list of
types lacks the model's.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.attention.backends.registry import AttentionBackendEnum


def correct_cpu_build(vllm_config: Any) -> list[str]:
    """Called in each worker once its model is loaded; returns what was found broken."""
    if vllm_config.device_config.device_type != "cpu" or vllm_config.speculative_config is None:
        return []
    from vllm.v1.sample import rejection_sampler

    if not spread_is_broken(rejection_sampler.expand_batch_to_tokens):
        return []
    rejection_sampler.expand_batch_to_tokens = spread
    return ["temperatures under speculation"]


def spread_is_broken(expand: Any) -> bool:
    """Whether vLLM's function gives other values than the definition, on memory that held something else before."""
    values, ends = torch.tensor([0.5, 2.0]), torch.tensor([3, 5], dtype=torch.int32)
    torch.full((5,), 7.0)  # its memory is likely to be handed out next
    return not torch.equal(expand(values, ends, 5), torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0]))


def spread(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """``x`` [batch] by token: entry b as often as ``cu_num_tokens`` [batch], the counts' prefix sums, says."""
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return x.repeat_interleave(counts, output_size=num_tokens)


def mla_kernel(raw: Mapping[str, Any], dtype: str) -> AttentionBackendEnum | None:
    """For an engine on the CPU with weights of ``dtype``: the attention backend to set explicitly, or None where its
    own choice works. ``raw``: the model's config.json."""
    latent = {**raw, **(raw.get("text_config") or {})}.get("kv_lora_rank")
    if not latent or not torch.cpu._is_amx_tile_supported():
        return None
    taken = AttentionBackendEnum.AMX_MLA.get_class()
    return None if getattr(torch, dtype) in taken.supported_dtypes else AttentionBackendEnum.CPU_MLA


def pack_experts_anew(net: torch.nn.Module) -> None:
    """For a loaded model, before its first update."""
    for module in net.modules():
        method = getattr(module, "quant_method", None)
        on_cpu = getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.CPU
        if isinstance(method, UnquantizedFusedMoEMethod) and on_cpu and experts_stay_unpacked(method):
            process = method.process_weights_after_loading
            method.process_weights_after_loading = functools.partial(_with_new_kernel, method, process)


def experts_stay_unpacked(method: UnquantizedFusedMoEMethod) -> bool:
    """Whether weights that are processed a second time do not get to the kernel, which packs them."""
    packed: list[torch.nn.Module] = []
    probe, layer = copy.copy(method), torch.nn.Module()
    kernel = types.SimpleNamespace(process_weights_after_loading=packed.append)
    probe.moe_kernel = types.SimpleNamespace(fused_experts=kernel)
    layer.moe_config = method.moe
    for name in ("w13_weight", "w2_weight"):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(1, 2, 2), requires_grad=False))
    type(method).process_weights_after_loading(probe, layer)
    return not packed


def _with_new_kernel(method: UnquantizedFusedMoEMethod, process: Any, layer: torch.nn.Module) -> None:
    method.moe_kernel = None
    process(layer)
