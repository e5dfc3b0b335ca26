"""The Megatron backend: a model of megatron-core cut over tensor, pipeline, context and data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.models.checkpoint import is_draft, open_tensors
from asyncrl.models.config import CheckpointError, DecoderConfig, engine_dtype
from asyncrl.models.mtp_from_trunk import draft_from_trunk
from asyncrl.param_sync.manifest import Manifest, is_adapter
from asyncrl.telemetry.recorder import Recorder
from asyncrl.trainer.backend import LossFunction, NonFiniteError, Scores, TrainBatch
from asyncrl.trainer.backends import process_group
from asyncrl.trainer.backends.export import Export
from asyncrl.trainer.backends.megatron.bridges import Bridge, bridge_of, read_source
from asyncrl.trainer.backends.megatron.draft import DraftTraining, by_sequence, share_of
from asyncrl.trainer.backends.megatron.layout import fit_problems
from asyncrl.trainer.backends.megatron.lora import Adapters
from asyncrl.trainer.backends.megatron.offload import Offload, resident
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.megatron.policy import PolicyModel, build_chunks, in_precision
from asyncrl.trainer.backends.megatron.state import ModelState, base_digest
from asyncrl.trainer.backends.megatron.vocab_parallel import VocabParallelScores
from asyncrl.trainer.backends.megatron.weights import Conversion, ModelWeights
from asyncrl.trainer.backends.packing import MicroBatch
from asyncrl.trainer.backends.schedule import learning_rate
from asyncrl.trainer.backends.torch_state import (
    StagedState,
    load_state,
    saved_names,
)
from asyncrl.trainer.batches import cut_micro_batches

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # isort: skip

LOAD_BLOCK = 32  # parameters of the model whose whole tensors are in memory at once while a checkpoint is read

#: a micro-batch, this rank's share of it, and its hidden states [T, 1, M] of policy and draft → the loss, divided by
#: the global count already
MicroBatchLoss = Callable[[PolicyModel, MicroBatch, PackedSequences, tuple[Tensor, ...]], Tensor]


class MegatronBackend:
    """One rank of it; see `asyncrl.trainer.backend.Backend` for what each method promises, and
    `asyncrl.trainer.backends.torch_fsdp.TorchFSDPBackend` for ``init_method`` and ``timeout_s``.

    ``trainer.megatron`` says how many ranks hold one copy of the model; the others are data parallel copies of it, and
    the optimizer's state is sharded over those. Gradients' sums, optimizer state and the weights that it steps are
    float32, the model computes in that or in bfloat16 (``trainer.mixed_precision``), and engines get what it computes
    with. A copy of the model gets the same batch on each of its ranks. Its context parallel ranks each have a part of
    every sequence (see `packed`), and its last pipeline stage computes the losses, with the head's vocabulary in parts.

    A checkpoint holds whole tensors under their Hugging Face names, each written by one of the ranks, in the same form
    as the torch backend's: it can be read at any parallel layout, and by that backend."""

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        init_method: str | None,
        recorder: Recorder,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._config, self._options, self._recorder = config, config.trainer, recorder
        self._device = _choose_device(self._options.device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(self._options.threads)
        source = read_source(config.model.path, config.mtp.init_from_trunk, config.mtp.enable_train)
        if problems := list(fit_problems(config, source.text)):
            raise CheckpointError(f"{source.path}: {'; '.join(problems)}")

        self._join_group(init_method, timeout_s)
        model_parallel_cuda_manual_seed(config.seed)
        torch.manual_seed(config.seed)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_ranks = parallel_state.get_data_parallel_world_size()

        self._bridge = bridge_of(source, config.model.bridge)
        self._chunks, self._conversion = self._load(self._bridge)
        self._adapters: Adapters | None = None
        base: Tensor | None = None
        if config.model.lora.rank:
            base = base_digest(self._conversion)
            self._adapters = self._add_adapters()
        for chunk in self._chunks:
            chunk.detach_draft = config.mtp.detach_encoder
            for name, parameter in chunk.named_parameters():
                trained = self._adapters is None or ".adapter." in name
                parameter.requires_grad_(config.mtp.enable_train if name.startswith("mtp.") else trained)
        self._reference: list[Any] = []
        reference_path = config.algorithm.reference_path
        if config.algorithm.kl_coef > 0 and (reference_path or self._adapters is None):
            reference = bridge_of(read_source(reference_path or config.model.path), config.model.bridge)
            self._reference = [in_precision(reference.provider, chunk) for chunk in self._load(reference)[0]]

        exact = {p: p.detach().clone() for chunk in self._chunks for p in chunk.parameters() if p.requires_grad}
        self._parallel, self._parallel_draft = self._wrap(self._chunks)
        self._optimizer = ShardedAdamW(self._parallel, self._parallel_draft, self._options.optimizer)
        for parameter, weight in exact.items():
            self._optimizer.set_weight(parameter, weight)
        del exact
        self._draft: DraftTraining | None = None
        if self._parallel_draft is not None:
            ours = self._chunks[-1], self._parallel_draft, self._optimizer
            self._draft = DraftTraining(config, *ours, self._micro_batches, self._over_copies)
        self._optimizer_steps = 0
        self._total_optimizer_steps = (
            self._options.total_steps * config.async_training.require_batches * config.algorithm.epochs
        )

        self._trained = frozenset(filter(self._is_trained, self._conversion.shapes))
        weights = ModelWeights(source, self._conversion, self._optimizer, self._trained, rank)
        self._export = Export(weights, self._adapters.spec if self._adapters else None, config, rank)
        of_model = self._conversion, self._optimizer, self._trained
        self._state = ModelState(*of_model, self._adapters, base, config.model.path)

        self._offload = self._make_offload()
        self._checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        periodic = config.checkpoint.every_steps > 0
        self._staged = StagedState(self.state(), self._checkpoint_group) if periodic else None
        self._offload.send_all()

    # -- scoring and training --------------------------------------------------------------------------------------

    @resident("parameters")
    def logprobs(self, batch: TrainBatch, temperature: float) -> Scores:
        return self._score(self._parallel, batch, temperature)

    @resident("reference")
    def reference_logprobs(self, batch: TrainBatch, temperature: float) -> np.ndarray:
        if not self._reference and self._adapters is not None:
            with self._offload.here("parameters"), self._adapters.off():
                return self._score(self._parallel, batch, temperature).logprobs
        if not self._reference:
            raise RuntimeError("no reference model is held: it is loaded only if algorithm.kl_coef > 0")
        return self._score(self._reference, batch, temperature).logprobs

    @torch.no_grad()
    def _score(self, chunks: list[Any], batch: TrainBatch, temperature: float) -> Scores:
        found = torch.zeros(2, len(batch.targets), device=self._device)

        def keep(model: PolicyModel, micro: MicroBatch, share: PackedSequences, states: tuple[Tensor, ...]) -> Tensor:
            if len(micro.places):
                scores = self._policy_scores(model, micro, share, states[0], temperature)
                found[:, torch.from_numpy(micro.places).to(self._device)] = scores
            return found.new_zeros(())

        self._run(chunks, self._micro_batches(batch), keep, draft_depths=0, forward_only=True)
        self._from_last_stage(found)
        logprobs, entropy = found.cpu().numpy()
        return Scores(logprobs, entropy)

    @resident("parameters", "gradients", written=True)
    def train_step(
        self, batch: TrainBatch, loss: LossFunction, global_denominator: float, temperature: float
    ) -> Mapping[str, float]:
        """See `Backend.train_step`. Whether loss and gradient are finite is checked before the policy's weights change,
        and of the draft's each time before those do."""
        draft = self._draft
        with self._recorder.span("trainer/forward_backward", tokens=len(batch.tokens)):
            sums: dict[str, Tensor] = {}
            extremes: dict[str, Tensor] = {}
            of_draft: dict[str, Tensor] = {}
            hidden: dict[int, Tensor] = {}
            micros = self._micro_batches(batch)
            together = draft if draft and not draft.detached else None
            counts = together.counts([micros]) if together else []

            def losses(
                model: PolicyModel, micro: MicroBatch, share: PackedSequences, states: tuple[Tensor, ...]
            ) -> Tensor:
                logprobs, entropy = self._policy_scores(model, micro, share, states[0], temperature)
                output = loss(logprobs, entropy, micro.batch)
                total = output.loss / global_denominator
                if together:
                    total = total + together.loss(micro, share, states[0], states[1:], counts[0], temperature, of_draft)
                elif draft:
                    hidden.update(zip(micro.sequences, by_sequence(states[0].detach(), share), strict=True))
                _add(sums, {"loss": output.loss.detach(), **output.sums})
                for name, value in output.extremes.items():
                    extremes[name] = torch.maximum(extremes[name], value) if name in extremes else value
                return total

            self._optimizer.zero_grad(draft=False)
            self._optimizer.zero_grad(draft=True)
            self._run(self._parallel, micros, losses, together.depths if together else 0, forward_only=False)
            figures = self._over_copies(sums, dist.ReduceOp.SUM, 1 / global_denominator)
            figures |= self._over_copies(extremes, dist.ReduceOp.MAX)
            if together:
                together.add_up()
                figures |= together.figures(of_draft, counts)
            figures = self._told_by_last_stage(figures)

        with self._offload.here("optimizer", written=True):
            self._optimizer.prepare(draft=False)
            figures["grad_norm"] = self._optimizer.clip(draft=False)
            self._expect_finite(figures)
            if together:
                figures["mtp/grad_norm"] = self._update_draft(together)
            elif draft:
                with self._recorder.span("trainer/draft"):
                    learned = draft.learn(batch, hidden, temperature, partial(self._update_draft, draft))
                    figures |= self._told_by_last_stage(learned)
            with self._recorder.span("trainer/optimizer"):
                figures["lr"] = self._rate(self._options.optimizer)
                self._optimizer.step(figures["lr"], draft=False)
                self._optimizer_steps += 1
        return figures

    def _update_draft(self, draft: DraftTraining) -> float:
        """Take the draft's gradient, clipped apart, so that it cannot shorten the policy's step; its norm before."""
        self._optimizer.prepare(draft=True)
        norm = self._optimizer.clip(draft=True)
        self._expect_finite({"mtp/grad_norm": norm})
        self._optimizer.step(self._rate(draft.options), draft=True)
        draft.steps += 1
        return norm

    def _rate(self, options: OptimizerConfig) -> float:
        """It follows the policy's steps."""
        return learning_rate(options, self._optimizer_steps, self._total_optimizer_steps)

    def _expect_finite(self, figures: Mapping[str, float]) -> None:
        for name in ("loss", "grad_norm", "mtp/grad_norm"):
            if not math.isfinite(figures.get(name, 0.0)):
                raise NonFiniteError(
                    f"optimizer step {self._optimizer_steps}: {name} is {figures[name]}, expected a finite number; "
                    f"the policy's weights were left as they are (look at this step's logprobs, advantages and lr)"
                )

    def _run(
        self,
        chunks: list[Any],
        micro_batches: list[MicroBatch],
        losses: MicroBatchLoss,
        draft_depths: int,
        forward_only: bool,
    ) -> None:
        """All micro-batches through the stages, in megatron-core's schedule; ``losses`` is called on the last one."""

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
            seq_length=1,  # both are told by each micro-batch's own tensors
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _policy_scores(
        self, model: PolicyModel, micro: MicroBatch, share: PackedSequences, hidden_T1M: Tensor, temperature: float
    ) -> Tensor:
        """float32 [2, R], of the whole micro-batch: log-probabilities and entropies."""
        hidden_rM, mine = share.rows(hidden_T1M, micro.rows)
        head_WM, chunk = model.head_weight, self._options.logprob_chunk_tokens
        scores = VocabParallelScores.apply(
            hidden_rM, head_WM, micro.targets[mine], model.vocabulary_part, temperature, chunk
        )
        return share.of_all(torch.stack(scores), mine, len(micro.targets))

    def _micro_batches(self, batch: TrainBatch, share: np.ndarray | None = None) -> list[MicroBatch]:
        """Of all sequences, or of those in ``share``: at least one, with virtual stages a multiple of the stages, and
        as many on all ranks that share experts; for this there are placeholders."""
        sequences = np.arange(len(batch)) if share is None else share
        cuts = cut_micro_batches(batch.lengths[sequences], self._options.max_tokens_per_micro_batch)
        micros = [MicroBatch.of(batch, sequences[cut].tolist(), self._device) for cut in cuts]
        stages = parallel_state.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        count = max(-(-len(micros) // stages) * stages, stages)
        if self._options.megatron.expert_model_parallel_size > 1:
            most = self._over_copies({"count": torch.tensor(count)}, dist.ReduceOp.MAX)
            count = int(most["count"])
        return micros + [MicroBatch.placeholder(batch, self._device) for _ in range(count - len(micros))]

    def _over_copies(
        self,
        values: Mapping[str, Tensor],
        op: dist.ReduceOp.RedOpType,
        scale: float = 1.0,
        with_context_parallel: bool = False,
    ) -> dict[str, float]:
        """Reduce scalars over the copies of the model with one collective; each rank with its like in the others."""
        if not values:
            return {}
        packed = torch.stack([value.double() for value in values.values()]).to(self._device)
        group = parallel_state.get_data_parallel_group(with_context_parallel)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(packed, op, group=group)
        return dict(zip(values, (packed * scale).tolist(), strict=True))

    def _from_last_stage(self, tensor: Tensor) -> None:
        group = parallel_state.get_pipeline_model_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.broadcast(tensor, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)

    def _told_by_last_stage(self, figures: dict[str, float]) -> dict[str, float]:
        group, told = parallel_state.get_pipeline_model_parallel_group(), [figures]
        if dist.get_world_size(group) > 1:
            dist.broadcast_object_list(told, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return told[0]

    # -- weights out -----------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        return self._export.manifest()

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.export`: rank 0 is the sender; the ranks that hold what it has not take part and yield
        nothing, others have nothing to do."""
        cut = self._options.megatron
        in_stage = self.rank % (self.world_size // cut.pipeline_model_parallel_size)
        if in_stage < math.lcm(cut.tensor_model_parallel_size, cut.expert_model_parallel_size):
            moves = self._options.megatron.param_offload  # and a tensor may be sent when the parameters are gone
            with self._offload.here("parameters"):
                for name, tensor in self._export.tensors(base):
                    yield name, tensor.clone() if moves else tensor

    @resident("parameters", "optimizer")
    def export_hf(self, path: Path) -> None:
        self._export.write_hf(path)
        dist.barrier()

    # -- state -----------------------------------------------------------------------------------------------------

    @resident("parameters", "optimizer")
    def state(self) -> Mapping[str, Any]:
        """This rank's share of the training state: every so many whole tensors, by their Hugging Face names. Of a LoRA
        run those that are trained, and the digest of the base that they belong to."""
        return {
            **self._state.share(self.rank, self.world_size),
            "optimizer_steps": torch.tensor(self._optimizer_steps),
            "draft_steps": torch.tensor(self._draft.steps if self._draft else 0),
            "random_state": {f"rank_{self.rank}": {"cpu": torch.get_rng_state()}},
        }

    def _is_trained(self, name: str) -> bool:
        if is_draft(name):
            return self._config.mtp.enable_train
        return self._adapters is None or is_adapter(name)

    def stage(self) -> None:
        with self._recorder.span("trainer/stage"):
            state = self.state()
            if self._staged is None:
                self._staged = StagedState(state, self._checkpoint_group)
            self._staged.fill(state)

    def write(self, path: Path) -> None:
        if self._staged is None or not self._staged.filled:
            raise RuntimeError(f"nothing to write to {path}: call stage first")
        with self._recorder.span("trainer/write"):
            self._staged.write(Path(path))

    @resident("parameters", "optimizer", written=True)
    def load(self, path: Path) -> None:
        """See `Backend.load`. A rank that there was none of takes the random state of rank 0."""
        path = Path(path)
        self._state.load(path)
        saved = saved_names(path)
        owner = self.rank if f"random_state.rank_{self.rank}.cpu" in saved else 0
        rest: dict[str, Any] = {
            "optimizer_steps": torch.tensor(0),
            "draft_steps": torch.tensor(0),
            "random_state": {f"rank_{owner}": {"cpu": torch.get_rng_state()}},
        }
        load_state(path, rest)
        torch.set_rng_state(rest["random_state"][f"rank_{owner}"]["cpu"])
        self._optimizer_steps = int(rest["optimizer_steps"])
        self._optimizer.set_steps(self._optimizer_steps, draft=False)
        if self._draft:
            self._draft.steps = int(rest["draft_steps"])
            self._optimizer.set_steps(self._draft.steps, draft=True)

    def close(self) -> None:
        """Leave the process groups; collective. No `write` may be under way."""
        dist.barrier(self._checkpoint_group)
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()

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

    def _load(self, bridge: Bridge) -> tuple[list[PolicyModel], Conversion]:
        chunks = [chunk.to(self._device) for chunk in build_chunks(bridge, self._options)]
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
                # else no gradient would reach a recomputed layer, or a stage that has no adapter: nothing says so
                chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        return adapters

    def _wrap(self, chunks: list[PolicyModel]) -> tuple[list[Any], Any]:
        """(a data parallel module around each chunk, one around the MTP layers if they are trained)"""
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
        )
        provider = self._bridge.provider
        provider.finalize_model_grads_func = _finalize_gradients
        learning = [p for p in _parameters_of_draft(chunks[-1]) if p.requires_grad]
        for parameter in learning:
            parameter.requires_grad_(False)  # whose gradients are to lie apart
        wrapped = [
            DistributedDataParallel(provider, settings, in_precision(provider, chunk), disable_bucketing=i > 0)
            for i, chunk in enumerate(chunks)
        ]
        for parameter in learning:
            parameter.requires_grad_(True)
        if not self._config.mtp.enable_train:
            return wrapped, None
        # stages without the MTP layers have an optimizer for them all the same: making one is collective
        draft = chunks[-1].mtp if learning else torch.nn.ModuleList()
        return wrapped, DistributedDataParallel(provider, settings, draft)

    def _make_offload(self) -> Offload:
        options, kinds = self._options.megatron, {}
        if options.param_offload:
            for kind, chunks in (("parameters", self._chunks), ("reference", self._reference)):
                kinds[kind] = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
        if options.grad_offload:
            modules = self._parallel + ([self._parallel_draft] if self._parallel_draft else [])
            buffers = [buffer for module in modules for buffer in module.buffers + module.expert_parallel_buffers]
            kinds["gradients"] = [buffer.grad_data for buffer in buffers]
        if options.optimizer_offload:
            kinds["optimizer"] = list(self._optimizer.own_tensors())
        return Offload(kinds, discarded={"gradients"})


def _finalize_gradients(chunks: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """megatron-core's, but gradients are not divided by a count of tokens: the losses were."""
    finalize_model_grads(chunks, None, **groups)


def _choose_device(name: str, rank: int) -> torch.device:
    """``auto`` takes CUDA where there is a device. The CPU is taken only where there is none: megatron-core's own code
    asks for the device that is there."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device is {name!r}; expected auto, cpu or cuda")
    if torch.cuda.is_available():
        if name == "cpu":
            raise ValueError("trainer.device is cpu, but megatron-core uses the CUDA device of this machine; use auto")
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("cpu")


def _parameters_of_draft(chunk: PolicyModel) -> Iterator[torch.nn.Parameter]:
    return (parameter for name, parameter in chunk.named_parameters() if name.startswith("mtp."))


def _unwrapped(module: Any) -> PolicyModel:
    while not isinstance(module, PolicyModel):
        module = module.module
    return module


def _add(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()
