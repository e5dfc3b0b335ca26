"""Spec of the torch backend: its limits, and how to start a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.backends.base import Backend, BackendSpec


class TorchSpec:
    """See `asyncrl.trainer.backends.base.BackendSpec`."""

    distributions: frozenset[str] = frozenset()
    options = frozenset({"model.implementation", "model.attention"})

    def ranks_per_copy(self, config: Config) -> int:
        """1: FSDP gathers each layer for the forward pass, so every rank trains on different sequences."""
        return 1

    def weight_shards(self, config: Config) -> int:
        return config.trainer.ranks

    def problems(self, config: Config) -> Iterator[str]:
        yield from ()

    def check_model(self, config: Config, path: str, mtp_from_trunk: bool) -> ModelConfig:
        from asyncrl.trainer.backends.torch.checks import check

        return check(config, path, mtp_from_trunk)

    def model_problems(self, config: Config, text: Mapping[str, Any]) -> Iterator[str]:
        from asyncrl.trainer.backends.torch.checks import problems

        return problems(config, text)

    def make(self, config: Config, rank: int, world_size: int, init_method: str | None, recorder: Recorder) -> Backend:
        from asyncrl.trainer.backends.torch.backend import TorchFSDPBackend

        return TorchFSDPBackend(config, rank, world_size, init_method, recorder)


BACKEND: BackendSpec = TorchSpec()
