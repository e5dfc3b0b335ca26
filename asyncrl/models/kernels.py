"""Whether Triton's kernels compute the trainer's scores, rotary positions and gated activations.

They are faster on a GPU, but need the package, a C compiler and a GPU that it supports. Eager code does the same.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)


def fuses(x: Tensor) -> bool:
    """True if Triton's kernels (`head_kernels`, `layer_kernels`) compute what depends on ``x``. The first call for a
    GPU compiles one and runs it. Raises torch.OutOfMemoryError, after which the next call tries again."""
    return x.is_cuda and _work_on(x.device)


@functools.cache
def _work_on(device: torch.device) -> bool:
    try:
        _check(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:  # no Triton, no C compiler, or an unsupported GPU: eager code does the same
        log.warning("training on %s is slower, since Triton's kernels fail (%s: %s)", device, type(e).__name__, e)
        return False
    return True


@torch.no_grad()
def _check(device: torch.device) -> None:
    """Raises what the smallest kernel raises, and RuntimeError if its results are wrong."""
    from asyncrl.models.layer_kernels import Gated  # needs Triton

    x = torch.arange(-4, 4, dtype=torch.bfloat16, device=device)[None]
    if not torch.allclose(Gated.apply(x, x), F.silu(x) * x, rtol=0.02):
        raise RuntimeError("a kernel's results are wrong; please report the GPU and Triton's release")
