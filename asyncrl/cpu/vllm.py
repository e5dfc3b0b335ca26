"""Corrections of vLLM's CPU build, each applied only where the defect is found.

*Temperatures under speculation*: if the prefix sums are not int64, the CPU kernel that expands a request's sampling
parameters over its drafted tokens writes into a temporary copy. Its result is uninitialized memory, so sampling uses
arbitrary temperatures. `spread_is_broken` measures it; the replacement is the same operation in torch.

*Experts after an update*: on the CPU the experts' weights are packed only when their kernel is created. A reload leaves
them in the checkpoint's layout, which the kernel reads as packed: the model answers, but wrongly.
`experts_stay_unpacked` tries it; the correction rebuilds the kernel at each reload.

*Latent attention on a processor with AMX*: such models (DeepSeek's) get a kernel that packs only bfloat16 weights, and
the engine does not start with others. `mla_kernel` selects the kernel without AMX if vLLM's own list of dtypes lacks
the model's.
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
    """Correct vLLM's sampler if it is broken. Called in each worker once its model is loaded; returns the names of the
    defects found."""
    if vllm_config.device_config.device_type != "cpu" or vllm_config.speculative_config is None:
        return []
    from vllm.v1.sample import rejection_sampler

    if not spread_is_broken(rejection_sampler.expand_batch_to_tokens):
        return []
    rejection_sampler.expand_batch_to_tokens = spread
    return ["temperatures under speculation"]


def spread_is_broken(expand: Any) -> bool:
    """True if vLLM's function returns wrong values on memory that held something else before."""
    values, ends = torch.tensor([0.5, 2.0]), torch.tensor([3, 5], dtype=torch.int32)
    torch.full((5,), 7.0)  # its memory is likely to be handed out next
    return not torch.equal(expand(values, ends, 5), torch.tensor([0.5, 0.5, 0.5, 2.0, 2.0]))


def spread(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """``x`` [batch] expanded to [tokens]: entry b is repeated for each of its tokens. ``cu_num_tokens`` [batch]: prefix
    sums of the token counts. ``replace_from`` is replaced by ``replace_to``."""
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return x.repeat_interleave(counts, output_size=num_tokens)


def mla_kernel(raw: Mapping[str, Any], dtype: str) -> AttentionBackendEnum | None:
    """Attention backend to set for an engine on the CPU with weights of ``dtype``; None if vLLM's own choice works.
    ``raw``: the model's config.json."""
    latent = {**raw, **(raw.get("text_config") or {})}.get("kv_lora_rank")
    if not latent or not torch.cpu._is_amx_tile_supported():
        return None
    taken = AttentionBackendEnum.AMX_MLA.get_class()
    return None if getattr(torch, dtype) in taken.supported_dtypes else AttentionBackendEnum.CPU_MLA


def repack_experts(net: torch.nn.Module) -> None:
    """Make every reload rebuild the experts' kernels, if that is needed. Call once on a loaded model, before its first
    update."""
    for module in net.modules():
        method = getattr(module, "quant_method", None)
        on_cpu = getattr(method, "unquantized_backend", None) is UnquantizedMoeBackend.CPU
        if isinstance(method, UnquantizedFusedMoEMethod) and on_cpu and experts_stay_unpacked(method):
            process = method.process_weights_after_loading
            method.process_weights_after_loading = functools.partial(_with_new_kernel, method, process)


def experts_stay_unpacked(method: UnquantizedFusedMoEMethod) -> bool:
    """True if weights that are processed a second time do not reach the kernel, which packs them."""
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
