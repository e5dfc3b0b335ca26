"""The Megatron backend: a model of megatron-core, sharded over tensor, pipeline, context and data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import is_draft, open_tensors
from asyncrl.models.config import CheckpointError, DecoderConfig, engine_dtype
from asyncrl.models.mtp_from_trunk import draft_from_trunk
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import is_adapter
from asyncrl.trainer.backends import process_group
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.backends.export import Export
from asyncrl.trainer.backends.megatron.bridges import Bridge, bridge_of, read_source
from asyncrl.trainer.backends.megatron.draft import MegatronDraftTraining, by_sequence, share_of
from asyncrl.trainer.backends.megatron.layout import fit_problems
from asyncrl.trainer.backends.megatron.lora import Adapters
from asyncrl.trainer.backends.megatron.offload import Offload
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.megatron.policy import PolicyModel, build_chunks, in_precision
from asyncrl.trainer.backends.megatron.state import ModelState, base_digest
from asyncrl.trainer.backends.megatron.vocab_parallel import VocabParallelScores
from asyncrl.trainer.backends.megatron.weights import Conversion, ModelWeights
from asyncrl.trainer.backends.packing import MicroBatch
from asyncrl.trainer.backends.template import BaseBackend, GradientPass, reference_path

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # isort: skip

_OUTPUTS = ("logprobs", "entropy")

#: (model, micro-batch, this rank's share of it, hidden states [T, 1, M] of policy and draft) → the loss, already
#: divided by the global count
MicroBatchLoss = Callable[[PolicyModel, MicroBatch, PackedSequences, tuple[Tensor, ...]], Tensor]


class MegatronBackend(BaseBackend):
    """One rank; see `asyncrl.trainer.backends.base.Backend`.

    ``init_method`` is torch.distributed's; ``timeout_s`` bounds every collective. ``trainer.megatron`` sets how many
    ranks hold one copy of the model; further ranks are data parallel copies, over which the optimizer state is sharded.
    Gradient sums, optimizer state and master weights are float32. The model computes in float32 or bfloat16
    (``trainer.mixed_precision``), and engines receive the weights that it computes with. Every rank of a copy gets the
    same batch. Context parallel ranks each have a part of every sequence (see `packed`), and the last pipeline stage
    computes the losses, with the head's vocabulary sharded.

    A checkpoint holds whole tensors under their Hugging Face names, each written by one rank, in the same format as the
    torch backend's: it loads at any parallel layout, and in that backend."""

    _draft: MegatronDraftTraining | None
    _policy: list[Any]

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        init_method: str | None,
        recorder: Recorder,
        timeout_s: float = 600.0,
    ) -> None:
        if config.trainer.device == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "trainer.device is cpu, but megatron-core uses the CUDA device of this machine; expected auto"
            )
        super().__init__(config, rank, world_size, recorder)
        source = read_source(config.model.path, config.mtp.init_from_trunk, config.mtp.enable_train)
        if problems := list(fit_problems(config, source.text)):
            raise CheckpointError(f"{source.path}: {'; '.join(problems)}")

        self._join_group(init_method, timeout_s)
        model_parallel_cuda_manual_seed(config.seed)
        torch.manual_seed(config.seed)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_ranks = parallel_state.get_data_parallel_world_size()
        self._data_group = parallel_state.get_data_parallel_group()

        self._bridge = bridge_of(source, config.model.bridge)
        self._chunks, self._conversion = self._load_chunks(self._bridge)
        self._adapters: Adapters | None = None
        base: Tensor | None = None
        if self._lora:
            base = base_digest(self._conversion)
            self._adapters = self._add_adapters()
        for chunk in self._chunks:
            chunk.detach_draft = config.mtp.detach_encoder
            for name, parameter in chunk.named_parameters():
                learns = not self._lora or ".adapter." in name
                parameter.requires_grad_(config.mtp.enable_train if name.startswith("mtp.") else learns)
        frozen: list[Any] | None = None
        if (path := reference_path(config)) is not None:
            reference = bridge_of(read_source(path), config.model.bridge)
            frozen = [in_precision(reference.provider, chunk) for chunk in self._load_chunks(reference)[0]]

        master = {p: p.detach().clone() for chunk in self._chunks for p in chunk.parameters() if p.requires_grad}
        self._policy, self._parallel_draft = self._wrap(self._chunks)
        self._hold(self._policy, frozen)
        self._optimizer = ShardedAdamW(self._policy, self._parallel_draft, self._options.optimizer)
        for parameter, weight in master.items():
            self._optimizer.set_weight(parameter, weight)
        del master
        self._draft = None
        if self._parallel_draft is not None:
            self._draft = MegatronDraftTraining(
                config, self._device, self._micro_batches, self._chunks[-1], self._parallel_draft, self._optimizer
            )

        trained = frozenset(filter(self._is_trained, self._conversion.shapes))
        weights = ModelWeights(source, self._conversion, self._optimizer, trained, rank)
        self._export = Export(weights, self._adapters.spec if self._adapters else None, config, rank)
        self._state = ModelState(self._conversion, self._optimizer, trained, self._adapters, base, config.model.path)
        self._offload = self._make_offload()
        self._prepare_checkpoints(timeout_s)
        self._offload.send_all()

    # -- scoring and training --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _score(self, model: list[Any], batch: TrainBatch, temperature: float) -> dict[str, np.ndarray]:
        found = torch.zeros(2, len(batch.targets), device=self._device)

        def keep(chunk: PolicyModel, micro: MicroBatch, share: PackedSequences, states: tuple[Tensor, ...]) -> Tensor:
            if len(micro.places):
                scores = self._policy_scores(chunk, micro, share, states[0], temperature)
                found[:, torch.from_numpy(micro.places).to(self._device)] = scores
            return found.new_zeros(())

        self._run(model, self._micro_batches(batch), keep, draft_depths=0, forward_only=True)
        self._broadcast_from_last_stage(found)
        return dict(zip(_OUTPUTS, found.cpu().numpy(), strict=True))

    def _without_adapters(self) -> AbstractContextManager[None]:
        assert self._adapters is not None
        return self._adapters.off()

    def _accumulate_gradients(self, micros: list[MicroBatch], step: GradientPass) -> None:
        draft, joint = self._draft, self._joint_draft

        def losses(model: PolicyModel, micro: MicroBatch, share: PackedSequences, states: tuple[Tensor, ...]) -> Tensor:
            scores = self._policy_scores(model, micro, share, states[0], step.temperature)
            total = step.policy_loss(dict(zip(_OUTPUTS, scores, strict=True)), micro.batch) / step.denominator
            if joint:
                counts, sums = step.draft_counts, step.draft_sums
                total = total + joint.loss(micro, share, states[0], states[1:], counts, step.temperature, sums)
            elif draft:
                step.keep_hidden(micro, by_sequence(states[0].detach(), share))
            return total

        self._run(self._policy, micros, losses, joint.depths if joint else 0, forward_only=False)

    @property
    def in_parts(self) -> bool:
        offload = self._options.megatron
        # else the device would hold what is offloaded while the trainer waits for the next part
        return super().in_parts and not (offload.param_offload or offload.grad_offload)

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad("policy")
        self._optimizer.zero_grad("draft")

    def _reduce_gradients(self, scale: float) -> None:
        """By megatron-core's function without its division by a token count, which the losses already include."""
        finalize_model_grads(self._policy, None)
        if scale != 1.0:
            for chunk in self._policy:
                chunk.scale_gradients(scale)
        if self._joint_draft:
            self._joint_draft.reduce_gradients()

    def _clip_gradients(self, trained: str) -> float:
        self._optimizer.prepare(trained)
        return self._optimizer.clip(trained)

    def _step(self, lr: float, trained: str) -> None:
        self._optimizer.step(lr, trained)

    def _set_steps(self, steps: int, trained: str) -> None:
        self._optimizer.set_steps(steps, trained)

    def _run(
        self,
        chunks: list[Any],
        micro_batches: list[MicroBatch],
        losses: MicroBatchLoss,
        draft_depths: int,
        forward_only: bool,
    ) -> None:
        """Run all micro-batches through the stages by megatron-core's schedule; the last stage calls ``losses``."""

        def forward_step(micros: Iterator[MicroBatch], module: Any) -> Any:
            micro, model = next(micros), _unwrapped(module)
            model.draft_depths = draft_depths
            share = share_of(micro, model.config)
            states = module(share.tokens, share.positions, None, packed_seq_params=share)
            return states, partial(reduce, model, micro, share)

        def reduce(
            model: PolicyModel, micro: MicroBatch, share: PackedSequences, states: tuple[Tensor, ...]
        ) -> tuple[Tensor, Tensor, dict]:
            return losses(model, micro, share, states), torch.ones((), dtype=torch.int), {}

        iterators = [iter(micro_batches) for _ in chunks]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=1,  # unused, like the next: tensor shapes vary by micro-batch
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _policy_scores(
        self, model: PolicyModel, micro: MicroBatch, share: PackedSequences, hidden_T1M: Tensor, temperature: float
    ) -> Tensor:
        """float32 [2, R]: `_OUTPUTS` for the whole micro-batch."""
        hidden_rM, mine = share.rows(hidden_T1M, micro.rows)
        head_WM, chunk = model.head_weight, self._options.logprob_chunk_tokens
        scores = VocabParallelScores.apply(
            hidden_rM, head_WM, micro.targets[mine], model.vocabulary_part, temperature, chunk
        )
        return share.of_all(torch.stack(scores), mine, len(micro.targets))

    def _micro_batch_count(self, own: int) -> int:
        """At least one; with virtual stages a multiple of the stages; equal on all ranks that share experts."""
        stages = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        count = max(-(-own // stages) * stages, stages)
        if self._options.megatron.expert_model_parallel_size > 1:
            count = int(self._over_data_ranks({"count": torch.tensor(count)}, dist.ReduceOp.MAX)["count"])
        return count

    def _broadcast_from_last_stage(self, tensor: Tensor) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)

    def _shared(self, figures: dict[str, float]) -> dict[str, float]:
        """The metrics of the last stage, which computes the losses."""
        group, found = parallel_state.get_pipeline_model_parallel_group(), [figures]
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(found, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return found[0]

    # -- weights out, and state ------------------------------------------------------------------------------------

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Rank 0 sends. Ranks with parts that it lacks take part and yield nothing; the others do nothing."""
        layout = self._options.megatron
        in_stage = self.rank % (self.world_size // layout.pipeline_model_parallel_size)
        if in_stage < math.lcm(layout.tensor_model_parallel_size, layout.expert_model_parallel_size):
            # an offloaded parameter may leave the device before it is sent
            with self._resident("parameters"):
                for name, tensor in super().export(base):
                    yield name, tensor.clone() if layout.param_offload else tensor

    def _model_state(self) -> dict[str, Any]:
        """Every n-th whole tensor for n ranks, by Hugging Face name."""
        return self._state.share(self.rank, self.world_size)

    def _load_model(self, path: Path, saved: frozenset[str]) -> None:
        self._state.load(path)

    def _resident(self, *kinds: str, written: bool = False) -> AbstractContextManager[None]:
        return self._offload.here(*kinds, written=written)

    def _destroy_groups(self) -> None:
        parallel_state.destroy_model_parallel()
        super()._destroy_groups()

    def _is_trained(self, name: str) -> bool:
        if is_draft(name):
            return self._config.mtp.enable_train
        return not self._lora or is_adapter(name)

    # -- construction ----------------------------------------------------------------------------------------------

    def _join_group(self, init_method: str | None, timeout_s: float) -> None:
        process_group.join(self.rank, self.world_size, self._device, init_method, timeout_s)
        cut = self._options.megatron
        virtual = cut.virtual_pipeline_model_parallel_size
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=cut.tensor_model_parallel_size,
            pipeline_model_parallel_size=cut.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
            context_parallel_size=cut.context_parallel_size,
            expert_model_parallel_size=cut.expert_model_parallel_size,
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
            create_gloo_process_groups=False,
        )

    def _load_chunks(self, bridge: Bridge) -> tuple[list[PolicyModel], Conversion]:
        chunks = [chunk.to(self._device) for chunk in build_chunks(bridge, self._options, self._half)]
        for chunk in chunks:
            chunk.float32_head = self._config.model.float32_head
        conversion = Conversion(bridge, chunks)
        with open_tensors(bridge.source.path) as read:
            made: dict[str, Tensor] = {}
            if bridge.source.makes_draft:
                trunk = {name: read(name) for name in bridge.source.shapes if not is_draft(name)}
                made = draft_from_trunk(trunk, DecoderConfig.from_dict(bridge.source.raw))
            conversion.load(lambda name: made[name] if name in made else read(name))
        return chunks, conversion

    def _add_adapters(self) -> Adapters:
        config = self._config
        dtype = engine_dtype(self._bridge.source.dtype, config.rollout.engine.dtype)
        tasks, shapes = self._conversion.tasks, self._conversion.shapes
        adapters = Adapters(tasks, shapes, config.model.lora, dtype, config.seed, self._device)
        self._conversion.attach(adapters)
        for chunk in self._chunks:
            if chunk.pre_process:
                # else no gradient reaches a recomputed layer or a stage without adapters, without any error
                chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        return adapters

    def _wrap(self, chunks: list[PolicyModel]) -> tuple[list[Any], Any]:
        """(data parallel modules around the chunks, and one around the MTP layers if they are trained)"""
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        provider = self._bridge.provider
        provider.finalize_model_grads_func = None  # `_reduce_gradients` calls it once for all parts of a step
        learning = [p for p in _parameters_of_draft(chunks[-1]) if p.requires_grad]
        for parameter in learning:
            parameter.requires_grad_(False)  # keeps their gradients out of the policy's buffers
        wrapped = [
            DistributedDataParallel(provider, settings, in_precision(provider, chunk), disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        for parameter in learning:
            parameter.requires_grad_(True)
        if not self._config.mtp.enable_train:
            return wrapped, None
        # stages without MTP layers get an empty module, since building its optimizer is collective
        draft = chunks[-1].mtp if learning else torch.nn.ModuleList()
        return wrapped, DistributedDataParallel(provider, settings, draft)

    def _make_offload(self) -> Offload:
        options, weights = self._options.megatron, {held.weights for held in self._models.values()}
        wanted = {"gradients": options.grad_offload, "optimizer": options.optimizer_offload}
        wanted |= dict.fromkeys(weights, options.param_offload)
        return Offload({kind: t for kind, t in self._tensors().items() if wanted[kind]}, discarded={"gradients"})

    def _tensors(self) -> dict[str, list[Tensor]]:
        """What a step finds and leaves, by kind."""
        modules = self._policy + ([self._parallel_draft] if self._parallel_draft else [])
        buffers = [buffer for module in modules for buffer in module.buffers + module.expert_parallel_buffers]
        return {
            **{h.weights: [p.data for chunk in h.module for p in chunk.parameters()] for h in self._models.values()},
            "gradients": [buffer.grad_data for buffer in buffers],
            "optimizer": list(self._optimizer.own_tensors()),
        }

    def _held_bytes(self) -> dict[str, int]:
        tensors = self._tensors()
        held = Offload(tensors)
        return {kind: held.held_bytes(kind) for kind in tensors}


def _parameters_of_draft(chunk: PolicyModel) -> Iterator[torch.nn.Parameter]:
    return (parameter for name, parameter in chunk.named_parameters() if name.startswith("mtp."))


def _unwrapped(module: Any) -> PolicyModel:
    while not isinstance(module, PolicyModel):
        module = module.module
    return module
