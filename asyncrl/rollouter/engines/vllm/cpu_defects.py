"""Known defects of vLLM's CPU build, each corrected only where it is found.

*Temperatures under speculation*: the CPU kernel that spreads a request's sampling parameters over its drafted tokens
writes into a temporary copy where their prefix sums are not int64, and the result is memory as it was found. Sampling
then follows some temperature or other. `spread_is_broken` measures it; the replacement is the same operation in torch.
"""

from __future__ import annotations

from typing import Any

import torch


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
