"""State of model and optimizer in a checkpoint: whole tensors under Hugging Face names, for any parallel layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from asyncrl.param_sync.digest import digest_tensors
from asyncrl.trainer.backends.megatron.lora import Adapters
from asyncrl.trainer.backends.megatron.optimizer import MOMENTS, ShardedAdamW
from asyncrl.trainer.backends.megatron.weights import Conversion
from asyncrl.trainer.backends.state import (
    digest_bytes,
    expect_same_adapters,
    expect_same_base,
    expect_same_draft,
    load_state,
    saved_names,
)

LOAD_BLOCK = 32  # number of parameters whose whole tensors are in memory at once while a checkpoint loads


def base_digest(conversion: Conversion) -> Tensor:
    """Digest of the loaded base weights, before adapters are added; collective."""
    return digest_bytes(digest_tensors(conversion.whole(lambda parameter: parameter)))


class ModelState:
    """Master weights, and moments of the ``trained`` ones. With ``adapters`` only the trained ones, and the digest of
    their ``base``, the model of ``model_path``. All methods are collective."""

    def __init__(
        self,
        conversion: Conversion,
        optimizer: ShardedAdamW,
        trained: frozenset[str],
        adapters: Adapters | None,
        base: Tensor | None,
        model_path: str,
    ) -> None:
        self._conversion, self._optimizer, self._trained = conversion, optimizer, trained
        self._adapters, self._base, self._model_path = adapters, base, model_path

    def share(self, rank: int, ranks: int) -> dict[str, Any]:
        """One rank's part, in host memory: every ``ranks``-th tensor."""

        def every_nth(tensors: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
            return {name: tensor.to("cpu", copy=True) for i, (name, tensor) in enumerate(tensors) if i % ranks == rank}

        whole, trained = self._conversion.whole, self._trained.__contains__
        return {
            "model": every_nth(whole(self._optimizer.weight, wanted=self._is_kept)),
            **({} if self._base is None else {"base": self._base.clone()}),
            "optimizer": {
                moment: every_nth(whole(partial(self._optimizer.moment, moment), wanted=trained)) for moment in MOMENTS
            },
        }

    def load(self, path: Path) -> None:
        """Load a state saved at any number of ranks. Raises CheckpointError for another model or kind of training."""
        shapes, saved = self._conversion.shapes, saved_names(path)
        kept = list(filter(self._is_kept, shapes))
        expect_same_adapters(path, saved, {"model": kept})
        expect_same_draft(path, saved, {"model": kept, "optimizer": {"exp_avg": self._trained}})
        for block in self._conversion.blocks(LOAD_BLOCK, self._is_kept):
            learned = list(filter(self._trained.__contains__, block.names))
            state = _empty({name: shapes[name] for name in block.names}, {name: shapes[name] for name in learned})
            load_state(path, state)
            with torch.no_grad():
                for parameter, part in block.convert(state["model"].__getitem__):
                    self._optimizer.set_weight(parameter, part)
                of_trained = block.only(learned)
                for moment in MOMENTS:
                    for parameter, part in of_trained.convert(state["optimizer"][moment].__getitem__):
                        self._optimizer.set_moment(moment, parameter, part)
        if self._adapters is not None:
            self._load_adapters(path, self._adapters)
            return
        self._conversion.fill_tied_head(self._optimizer.weight, self._optimizer.set_weight)
        for moment in MOMENTS:
            of, put = partial(self._optimizer.moment, moment), partial(self._optimizer.set_moment, moment)
            self._conversion.fill_tied_head(of, put)

    @torch.no_grad()
    def _load_adapters(self, path: Path, adapters: Adapters) -> None:
        assert self._base is not None
        shapes = {name: shape for pair in adapters.pairs.values() for name, shape in pair.items()}
        state = _empty(shapes, shapes) | {"base": torch.empty_like(self._base)}
        load_state(path, state)
        expect_same_base(path, state["base"], self._base, self._model_path)
        for parameter, part in adapters.parts(state["model"]):
            self._optimizer.set_weight(parameter, part)
        for moment in MOMENTS:
            for parameter, part in adapters.parts(state["optimizer"][moment]):
                self._optimizer.set_moment(moment, parameter, part)

    def _is_kept(self, name: str) -> bool:
        return self._adapters is None or name in self._trained


def _empty(model: Mapping[str, tuple[int, ...]], learned: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A state to fill, with tensors of these shapes."""
    empty = lambda shapes: {name: torch.empty(shape) for name, shape in shapes.items()}
    return {"model": empty(model), "optimizer": {moment: empty(learned) for moment in MOMENTS}}
