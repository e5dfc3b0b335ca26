"""Decode passes of the native engine: the model over all rows, and the draw of their next tokens.

On a GPU they are recorded graphs, and a pass is under way while the CPU goes on: `Drawn` holds what it will have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from asyncrl.rollouter.engines.native.graphs import Graphs, graph_rows
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, TokenMasks, sample


class Drawn:
    """The next token of each row (int64 [N]) and its logprob (float32 [N]), which the device may still compute."""

    def __init__(self, tokens_N: Tensor, logprobs_N: Tensor) -> None:
        self.tokens_N = tokens_N
        self._host = (tokens_N, logprobs_N)
        self._done: torch.cuda.Event | None = None
        if tokens_N.is_cuda:
            self._host = (_copied(tokens_N), _copied(logprobs_N))
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> tuple[list[int], list[float]]:
        """Tokens and logprobs by row."""
        if self._done is not None:
            self._done.synchronize()
        return self._host[0].tolist(), self._host[1].tolist()


def _copied(device: Tensor) -> Tensor:
    host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
    return host.copy_(device, non_blocking=True)


class Passes:
    """Runs decode passes of ``model`` over the slots of ``kv``."""

    def __init__(self, model: NativeModel, kv: KVCache, deterministic: bool = False) -> None:
        self._model, self._kv = model, kv
        self._draws_alike = deterministic
        self._graphs = Graphs() if model.device.type == "cuda" else None

    def rows(self, rows: int) -> int:
        """Number of rows that a pass over the first ``rows`` slots computes."""
        return rows if self._graphs is None else graph_rows(rows, self._kv.slots)

    def draw(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        uniforms_N: Tensor,
        columns: SamplingColumns,
        masks: TokenMasks | None,
        length: int,
    ) -> Drawn:
        """Draw each row's next token after its token at its position, as `NativeModel.decode` and `sample`."""
        model, kv = self._model, self._kv
        if self._graphs is None:
            return Drawn(*sample(model.decode(tokens_N, positions_N, kv, length), columns, uniforms_N, masks))
        rows = len(tokens_N)
        if masks is not None or columns.biases is not None:
            run = lambda tokens, positions: (model.decode(tokens, positions, kv, length),)
            (logits_NV,) = self._graphs.run(("logits", rows), (tokens_N, positions_N), run)
            return Drawn(*sample(logits_NV, columns, uniforms_N, masks, self._draws_alike))
        own, rebuilt = columns.tensors()

        def run_and_draw(tokens: Tensor, positions: Tensor, uniforms: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
            logits_NV = model.decode(tokens, positions, kv, length)
            return sample(logits_NV, rebuilt(rest), uniforms, alike=self._draws_alike)

        key = ("draw", rows, columns.kind)
        return Drawn(*self._graphs.run(key, (tokens_N, positions_N, uniforms_N, *own), run_and_draw))

    def hidden_states(self, tokens_NJ: Tensor, positions_NJ: Tensor, length: int) -> Tensor:
        """As `NativeModel.hidden_states`."""
        run = lambda tokens, positions: (self._model.hidden_states(tokens, positions, self._kv, length),)
        return self.run(("hidden", *tokens_NJ.shape), (tokens_NJ, positions_NJ), run)[0]

    def run(self, key: Hashable, inputs: Sequence[Tensor], work: Callable[..., tuple[Tensor, ...]]) -> Sequence[Tensor]:
        """``work(*inputs)``, on a GPU recorded under ``key``, see `Graphs.run`. Passes that are recorded ignore the
        attended length, which is not in their keys: on a GPU attention reads each row's KV up to its position."""
        return work(*inputs) if self._graphs is None else self._graphs.run(key, inputs, work)

    def forget(self) -> None:
        """The KV cache or weights have moved."""
        if self._graphs is not None:
            self._graphs.forget()
