"""Drafting: MiMo's MTP layers propose the tokens that the target then verifies.

At place i the first MTP layer reads the target's hidden state at i (after the final norm) and the embedding of token
i+1; its output predicts token i+2 through the shared head. Each further step runs at the next place, in the next MTP
layer (the last one repeats), on the previous output as hidden state and the drafted token. Each layer keeps keys and
values by place. Places that a verification accepted are recomputed from the target's true hidden states.

Shape suffixes: N rows (slots), W places per row to catch up, X = N·W of them row by row, M hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asyncrl.rollouter.engines.native.attention import DecodePositions
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel

#: (draft step 0 …, logits [N, V]) → the tokens drawn from them, int64 [N]
Draw = Callable[[int, Tensor], Tensor]


class Drafter:
    """Runs the MTP layers. ``kv`` must be made with ``draft=True`` and hold the target's hidden states of every place
    read. ``length``: attended cache entries, more than every place."""

    def __init__(self, model: NativeModel, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        #: place 0 of each slot among those of all slots
        self._base_S1 = (torch.arange(kv.slots, device=model.device) * kv.context_tokens).unsqueeze(1)

    def catch_up(self, places_NW: Tensor, next_NW: Tensor, length: int, first: int = 0) -> None:
        """Write keys and values at these places (int64) of slots ``first`` …; ``next_NW``: the token after each
        place."""
        places = DecodePositions(self._model.config, self._kv, places_NW, length, first)
        for layer in range(len(self._model.draft)):
            self._enter(layer, places_NW, next_NW, places, first, whole=True)

    def propose(self, places_NW: Tensor, next_NW: Tensor, last_N: Tensor, k: int, length: int, draw: Draw) -> None:
        """Catch up on these places, then draft ``k`` tokens per row, after the next token of the row's place number
        ``last_N``. Calls ``draw`` k times."""
        model, (n, width) = self._model, places_NW.shape
        top = self._kv.context_tokens - 1
        at_N = places_NW.gather(1, last_N.unsqueeze(1)).squeeze(1)
        places = DecodePositions(model.config, self._kv, places_NW, length)
        several = len(model.draft) > 1
        x_XM, q_XHD = self._enter(0, places_NW, next_NW, places, 0, whole=several)
        for layer in range(1, len(model.draft)):
            self._enter(layer, places_NW, next_NW, places, 0, whole=True)
        if width > 1:
            pick_N = torch.arange(n, device=model.device) * width + last_N
            x_XM, q_XHD = x_XM.index_select(0, pick_N), q_XHD.index_select(0, pick_N)
            places = DecodePositions(model.config, self._kv, at_N.unsqueeze(1), length)
        trunk = model.config.num_layers
        hidden_NM = model.draft[0].leave(x_XM, places.attend(trunk, q_XHD))
        tokens_N = draw(0, model.head(hidden_NM))
        for step in range(1, k):
            layer = min(step, len(model.draft) - 1)
            at_N = (at_N + 1).clamp_(max=top)
            places = DecodePositions(model.config, self._kv, at_N.unsqueeze(1), length)
            x_NM = model.draft[layer].enter(hidden_NM, model.embed.index_select(0, tokens_N))
            attended = places(trunk + layer, *model.draft[layer].project(x_NM, *model.rope(at_N)))
            hidden_NM = model.draft[layer].leave(x_NM, attended)
            tokens_N = draw(step, model.head(hidden_NM))

    def _enter(
        self, layer: int, places_NW: Tensor, next_NW: Tensor, places: DecodePositions, first: int, whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Write the layer's keys and values and, with ``whole``, its outputs, which the next layer reads. Returns the
        block's input [X, M] and its queries [X, H, D]."""
        model, kv, block = self._model, self._kv, self._model.draft[layer]
        at_X = (places_NW + self._base_S1[first : first + len(places_NW)]).view(-1)
        started_X = (places_NW > 0).view(-1)
        # MTP layer i > 0 reads the previous layer's output at the previous place
        read_X = at_X - started_X.long() if layer else at_X
        hidden_XM = kv.hidden[layer].view(-1, model.config.hidden_size).index_select(0, read_X)
        embed_XM = model.embed.index_select(0, next_NW.reshape(-1)).mul_(started_X.unsqueeze(1))
        if layer:
            hidden_XM.mul_(started_X.unsqueeze(1))
        x_XM = block.enter(hidden_XM, embed_XM)
        q_XHD, k_XKD, v_XKD = block.project(x_XM, *model.rope(places_NW.reshape(-1)))
        places.write(model.config.num_layers + layer, k_XKD, v_XKD)
        if whole and layer + 1 < len(model.draft):
            out_XM = block.leave(x_XM.clone(), places.attend(model.config.num_layers + layer, q_XHD))
            kv.hidden[layer + 1].view(-1, out_XM.shape[1]).index_copy_(0, at_X, out_XM)
        return x_XM, q_XHD
