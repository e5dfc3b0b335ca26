"""Spec of the Megatron backend: its limits, and how to start a rank. Imports none of Megatron's packages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import check_checkpoint, check_folder, is_draft, tensor_shapes
from asyncrl.models.config import DecoderConfig, ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.backends.base import Backend, BackendSpec
from asyncrl.trainer.backends.megatron.layout import fit_problems

_BRIDGES = ("auto", "megatron_bridge", "mbridge")


class MegatronSpec:
    """See `asyncrl.trainer.backends.base.BackendSpec`."""

    distributions = frozenset({"megatron-core"})
    options = frozenset({"model.bridge", "trainer.megatron"})

    def ranks_per_copy(self, config: Config) -> int:
        return max(self.weight_shards(config) * config.trainer.megatron.context_parallel_size, 1)

    def weight_shards(self, config: Config) -> int:
        """Context parallel ranks have the same weights."""
        cut = config.trainer.megatron
        return cut.tensor_model_parallel_size * cut.pipeline_model_parallel_size

    def problems(self, config: Config) -> Iterator[str]:
        trainer, cut = config.trainer, config.trainer.megatron
        if config.model.bridge not in _BRIDGES:
            yield f"model.bridge: expected one of {', '.join(_BRIDGES)}; found {config.model.bridge!r}"
        if trainer.ranks % self.ranks_per_copy(config):
            yield (
                f"trainer.ranks: expected a multiple of the {self.ranks_per_copy(config)} ranks that hold one copy of "
                f"the model (tensor {cut.tensor_model_parallel_size} × pipeline {cut.pipeline_model_parallel_size} × "
                f"context {cut.context_parallel_size}), found {trainer.ranks}"
            )
        sharing = trainer.ranks // max(cut.pipeline_model_parallel_size, 1)
        if sharing % max(cut.expert_model_parallel_size, 1):
            yield (
                f"trainer.megatron.expert_model_parallel_size: expected a divisor of the {sharing} ranks of a pipeline "
                f"stage, which share the experts, found {cut.expert_model_parallel_size}"
            )
        if cut.sequence_parallel and cut.tensor_model_parallel_size == 1:
            yield (
                "trainer.megatron.sequence_parallel: needs tensor parallel ranks; expected false with "
                "trainer.megatron.tensor_model_parallel_size=1"
            )
        virtual, stages = cut.virtual_pipeline_model_parallel_size, cut.pipeline_model_parallel_size
        if virtual > 1 and stages < 3:  # of two stages each precedes and follows the other: messages would mix
            yield (
                f"trainer.megatron.virtual_pipeline_model_parallel_size: {virtual} chunks per stage need "
                f"trainer.megatron.pipeline_model_parallel_size of at least 3, found {stages}"
            )
        if trainer.cpu_offload:
            yield (
                "trainer.cpu_offload: expected false; the Megatron backend has trainer.megatron.param_offload, "
                "grad_offload and optimizer_offload instead"
            )

    def check_model(self, config: Config, path: str, mtp_from_trunk: bool) -> ModelConfig:
        """Bridges compare the tensors of models that the native decoder does not build."""
        found = check_folder(path)
        makes_draft = mtp_from_trunk and not any(map(is_draft, tensor_shapes(path)))
        if DecoderConfig.builds(found.architecture) or makes_draft:
            return check_checkpoint(path, mtp_from_trunk)
        return found

    def model_problems(self, config: Config, text: Mapping[str, Any]) -> Iterator[str]:
        return fit_problems(config, text)

    def make(self, config: Config, rank: int, world_size: int, init_method: str | None, recorder: Recorder) -> Backend:
        from asyncrl.trainer.backends.megatron.backend import MegatronBackend

        return MegatronBackend(config, rank, world_size, init_method, recorder)


BACKEND: BackendSpec = MegatronSpec()
