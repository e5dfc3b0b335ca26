"""Hot kernels of generation: matrix products and norms."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.models.chunked import head_logits

# With few rows, a product takes as long as reading its weight. oneDNN reads a weight in its own blocked layout 1.4 to
# 1.9 times as fast as either library reads it row by row. Small weights do not repay the cost of its call. Measured on
# AMD Zen 4, 8 to 32 rows.
_WORTH_PACKING = 1 << 17  # elements
_CAN_PACK = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"

# every new shape costs kernels some setup
LENGTH_STEP = 32  # attended KV lengths are rounded up to a multiple of this
ROWS_STEP = 16  # and so are a prefill's rows, to this


def round_up(count: int, step: int) -> int:
    return -(-count // step) * step


class Linear:
    """``x @ weight.T + bias``, [N, I] → [N, O], over a weight that syncs write through live views.

    A large weight is also kept in the kernel's layout, so call `refresh` after every write to ``weight``. The choice of
    kernel depends only on shape, dtype and machine. ``float32``: see `asyncrl.models.chunked.head_logits`; without a
    bias.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None = None, float32: bool = False) -> None:
        self.weight, self.bias = weight_OI, bias_O
        self._weight_IO = weight_OI.t()
        self._float32 = float32 and weight_OI.dtype is not torch.float32
        large = weight_OI.numel() >= _WORTH_PACKING
        self._pack = _CAN_PACK and large and weight_OI.dtype is torch.float32 and weight_OI.device.type == "cpu"
        self._packed: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Copy the weight's current values into the kernel's layout."""
        if self._pack:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, x_NI: Tensor) -> Tensor:
        if self._float32:
            return head_logits(x_NI, self.weight, True)
        if self._packed is None:
            return F.linear(x_NI, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, self.bias, "none", [], "")

    def add_(self, sum_NO: Tensor, x_NI: Tensor) -> None:
        """Add the product to ``sum_NO`` in place."""
        if self._packed is None and self.bias is None:
            sum_NO.addmm_(x_NI, self._weight_IO)
        else:
            sum_NO.add_(self(x_NI))


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps)`` over the last dimension: RMS norm without its weight, a new tensor.

    On CPU torch's ``rms_norm`` runs nine small operations; this runs four, none with a Python number as an operand,
    which torch would first copy into a tensor."""
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], None, eps)  # sums in float32
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(_constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):  # for use within and without
        return torch.tensor([value])
