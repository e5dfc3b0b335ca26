"""The matrix product that generation spends its time in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ROWS = 8  # below, oneDNN's cost per call is more than it saves

# torch sends float32 products on CPU to MKL, which on AMD processors leaves AVX-512 unused: at 32 rows oneDNN reaches
# 1.5 to 2 times its speed. Like F.linear, it reads the weight where it lies, so live views stay live.
_ONEDNN = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``, [N, O]. The kernel depends on N, dtype and machine alone, never on values."""
    if not _ONEDNN or x_NI.dtype is not torch.float32 or len(x_NI) < _FEW_ROWS or x_NI.device.type != "cpu":
        return F.linear(x_NI, weight_OI, bias_O)
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")
