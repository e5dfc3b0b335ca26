"""The torch backend: the native decoder trained with FSDP2, on CPU (gloo) and CUDA (NCCL) alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import copy_tokenizer, is_draft, load_decoder, save_checkpoint, without_draft
from asyncrl.models.decoder import Decoder, MTPLayer, TokenScores
from asyncrl.param_sync.manifest import Manifest
from asyncrl.telemetry.recorder import Recorder
from asyncrl.trainer.backend import LossFunction, NonFiniteError, Scores, TrainBatch
from asyncrl.trainer.backends.packing import MicroBatch
from asyncrl.trainer.backends.schedule import learning_rate
from asyncrl.trainer.backends.torch_state import (
    StagedState,
    checkpoint_dtype,
    expect_same_draft,
    load_state,
    manifest_of,
    saved_names,
    whole_tensors,
)
from asyncrl.trainer.batches import cut_micro_batches
from asyncrl.trainer.draft_loss import draft_targets


class TorchFSDPBackend:
    """One rank of it; see `asyncrl.trainer.backend.Backend` for what each method promises.

    ``init_method`` is torch.distributed's, such as ``tcp://127.0.0.1:29500`` or ``file:///some/file``; a single rank
    needs none. ``timeout_s`` bounds every collective: a hung peer is an error then, not a wait without end. A process
    holds one backend at a time (`close` leaves the process group). One rank is sharded like many: the single code path
    costs it 3 to 8 % on a CPU with a million parameters, and less with more.

    The MTP layers belong to the model, so they are saved, exported and listed as ``draft``. The policy loss does not
    reach them: they are frozen and have no optimizer state, unless ``mtp.enable_train`` adds a loss of their own (see
    `asyncrl.trainer.draft_loss`) and clips their gradient apart from the policy's.
    """

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
        self.data_rank, self.data_ranks = rank, world_size
        self._config, self._options, self._recorder = config, config.trainer, recorder
        self._device = _choose_device(self._options.device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(self._options.threads)
        torch.manual_seed(config.seed)

        model = load_decoder(config.model.path, mtp_from_trunk=config.mtp.init_from_trunk)
        if config.mtp.enable_train and not model.config.num_mtp_layers:
            raise without_draft(config.model.path)
        self._mesh = self._join_group(init_method, timeout_s)

        self._draft_depths = config.mtp.num_speculative_tokens if config.mtp.enable_train else 0
        self._draft_scale = config.mtp.loss_scaling_factor / max(self._draft_depths, 1)
        self._model = self._prepare(model, train_draft=config.mtp.enable_train)
        self._engine_dtype = self._model.config.engine_dtype(config.rollout.engine.dtype)
        self._first_draft: dict[str, Tensor] = {}
        if not config.param_sync.reload_draft:
            weights = whole_tensors(self._model, getattr(torch, self._engine_dtype))
            self._first_draft = {name: tensor.clone() for name, tensor in weights if is_draft(name)}
        self._model.activation_checkpointing = self._options.activation_checkpointing
        self._reference: Decoder | None = None
        if config.algorithm.kl_coef > 0:
            reference = load_decoder(config.algorithm.reference_path or config.model.path)
            self._reference = self._prepare(reference.requires_grad_(False), train_draft=False)

        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._target_parameters = [p for name, p in self._trained.items() if not is_draft(name)]
        self._draft_parameters = [p for name, p in self._trained.items() if is_draft(name)]
        self._optimizer = self._make_optimizer()
        self._optimizer_steps = 0
        self._total_optimizer_steps = (
            self._options.total_steps * config.async_training.require_batches * config.algorithm.epochs
        )

        self._checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        # made here where checkpoints are part of training, for making it takes longer than filling it
        periodic = config.checkpoint.every_steps > 0
        self._staged = StagedState(self.state(), self._checkpoint_group) if periodic else None

    # -- scoring and training --------------------------------------------------------------------------------------

    def logprobs(self, batch: TrainBatch, temperature: float) -> Scores:
        return self._score(self._model, batch, temperature)

    def reference_logprobs(self, batch: TrainBatch, temperature: float) -> np.ndarray:
        if self._reference is None:
            raise RuntimeError("no reference model is held: it is loaded only if algorithm.kl_coef > 0")
        return self._score(self._reference, batch, temperature).logprobs

    @torch.no_grad()
    def _score(self, model: Decoder, batch: TrainBatch, temperature: float) -> Scores:
        logprobs, entropy = np.empty(len(batch.targets), np.float32), np.empty(len(batch.targets), np.float32)
        for micro in self._micro_batches(batch):
            scores = self._forward(model, micro, temperature)
            if len(micro.places):
                logprobs[micro.places] = scores.logprobs.cpu().numpy()
                entropy[micro.places] = scores.entropy.cpu().numpy()
        # FSDP2 keeps the root's weights gathered after a forward pass, for the backward pass that usually follows. None
        # does here: the copy would be what `named_parameters` gives, and stale after an optimizer step.
        cast(FSDPModule, model).reshard()
        return Scores(logprobs, entropy)

    def train_step(
        self, batch: TrainBatch, loss: LossFunction, global_denominator: float, temperature: float
    ) -> Mapping[str, float]:
        """See `Backend.train_step`. Whether loss and gradient are finite is checked before any weight changes."""
        with self._recorder.span("trainer/forward_backward", tokens=len(batch.tokens)):
            sums: dict[str, Tensor] = {}
            extremes: dict[str, Tensor] = {}
            of_draft: dict[str, Tensor] = {}
            counts = self._draft_counts(batch)
            for micro in self._micro_batches(batch):
                scores = self._forward(self._model, micro, temperature, self._draft_depths)
                output = loss(scores.logprobs, scores.entropy, micro.batch)
                # FSDP averages gradients over ranks, but the losses are sums over them
                total = output.loss * (self.world_size / global_denominator)
                for depth, (draft, count) in enumerate(zip(scores.drafts, counts, strict=True), 1):
                    total = total + draft.loss * (self.world_size * self._draft_scale / count)
                    _add(of_draft, {f"mtp/loss_{depth}": draft.loss.detach().double() / count})
                    _add(of_draft, {f"mtp/accuracy_{depth}": draft.hits.double() / count})
                total.backward()
                _add(sums, {"loss": output.loss.detach(), **output.sums})
                for name, value in output.extremes.items():
                    extremes[name] = torch.maximum(extremes[name], value) if name in extremes else value
            figures = self._over_ranks(sums, dist.ReduceOp.SUM, 1 / global_denominator)
            figures |= self._over_ranks(extremes, dist.ReduceOp.MAX)
            figures |= self._over_ranks(of_draft, dist.ReduceOp.SUM)

        with self._recorder.span("trainer/optimizer"):
            figures["grad_norm"] = self._clip_gradients(self._target_parameters)
            if self._draft_depths:  # apart, so that the draft cannot shorten the policy's step
                figures["mtp/grad_norm"] = self._clip_gradients(self._draft_parameters)
            for name in ("loss", "grad_norm", "mtp/grad_norm"):
                if not math.isfinite(figures.get(name, 0.0)):
                    self._optimizer.zero_grad()
                    raise NonFiniteError(
                        f"optimizer step {self._optimizer_steps}: {name} is {figures[name]}, expected a finite number; "
                        f"the weights were left as they are (look at this step's logprobs, advantages and lr)"
                    )
            figures["lr"] = learning_rate(self._options.optimizer, self._optimizer_steps, self._total_optimizer_steps)
            for group in self._optimizer.param_groups:
                group["lr"] = figures["lr"]
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._optimizer_steps += 1
        return figures

    def _forward(self, model: Decoder, micro: MicroBatch, temperature: float, draft_depths: int = 0) -> TokenScores:
        return model(
            micro.tokens,
            micro.layout,
            micro.rows,
            micro.targets,
            temperature,
            self._options.logprob_chunk_tokens,
            micro.drafts(draft_depths),
            self._config.mtp.detach_encoder,
        )

    def _draft_counts(self, batch: TrainBatch) -> list[float]:
        """For each depth, how many tokens of all ranks the draft is taught; 1 where there is none, to divide by."""
        depths = range(1, self._draft_depths + 1)
        counts = {str(depth): torch.tensor(float(len(draft_targets(batch, depth)[0]))) for depth in depths}
        return [max(count, 1.0) for count in self._over_ranks(counts, dist.ReduceOp.SUM).values()]

    def _micro_batches(self, batch: TrainBatch) -> Iterator[MicroBatch]:
        """This rank's micro-batches, then placeholders up to the number that the busiest rank has."""
        cuts = cut_micro_batches(batch.lengths, self._options.max_tokens_per_micro_batch)
        most = len(cuts)
        if self.world_size > 1:
            most = int(self._over_ranks({"count": torch.tensor(float(most))}, dist.ReduceOp.MAX)["count"])
        for cut in cuts:
            yield MicroBatch.of(batch, cut, self._device)
        for _ in range(most - len(cuts)):
            yield MicroBatch.placeholder(batch, self._device)

    def _over_ranks(
        self, values: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType, scale: float = 1.0
    ) -> dict[str, float]:
        """Reduce scalars over all ranks with one collective, and bring them to the host with one copy."""
        if not values:
            return {}
        packed = torch.stack([value.double() for value in values.values()])
        if self.world_size > 1:
            packed = packed.to(self._device)
            dist.all_reduce(packed, op)
        return dict(zip(values, (packed * scale).tolist(), strict=True))

    def _clip_gradients(self, parameters: Sequence[Tensor]) -> float:
        """Scale these parameters' gradient down to ``grad_clip``; returns its norm before, over all ranks."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = cast(DTensor, nn.utils.get_total_norm(gradients)).full_tensor()
        if 0 < self._options.optimizer.grad_clip < norm:
            nn.utils.clip_grads_with_norm_(parameters, self._options.optimizer.grad_clip, norm)
        return float(norm)

    # -- weights out -----------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """In the engine's dtype, which need not be the checkpoint's."""
        return manifest_of(self._model, self._engine_dtype)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.export`: rank 0 is the sender; the others take part in gathering and yield nothing. Without
        ``param_sync.reload_draft`` the draft goes out as it was at the start."""
        for name, tensor in whole_tensors(self._model, getattr(torch, self._engine_dtype)):
            if self.rank == 0:
                yield name, self._first_draft.get(name, tensor)

    def export_hf(self, path: Path) -> None:
        """See `Backend.export_hf`; in the dtype that the checkpoint's config.json names."""
        tensors = whole_tensors(self._model, checkpoint_dtype(self._model.config.dtype))
        if self.rank == 0:
            save_checkpoint(path, tensors, self._model.config)
            copy_tokenizer(self._config.model.path, path)
        else:
            for _ in tensors:
                pass
        dist.barrier()

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """Live tensors, by parameter name: what `stage` copies and `load` fills in place."""
        moments = {
            moment: {name: self._optimizer.state[p][moment] for name, p in self._trained.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }
        return {
            "model": {name: p.detach() for name, p in self._model.named_parameters()},
            "optimizer": moments,
            "optimizer_steps": torch.tensor(self._optimizer_steps),
            "random_state": {f"rank_{self.rank}": self._random_state()},
        }

    def stage(self) -> None:
        with self._recorder.span("trainer/stage"):
            if self._staged is None:
                self._staged = StagedState(self.state(), self._checkpoint_group)
            self._staged.fill(self.state())

    def write(self, path: Path) -> None:
        if self._staged is None or not self._staged.filled:
            raise RuntimeError(f"nothing to write to {path}: call stage first")
        with self._recorder.span("trainer/write"):
            self._staged.write(Path(path))

    def load(self, path: Path) -> None:
        """See `Backend.load`. A rank that there was none of takes the random state of rank 0; a GPU whose random state
        was not saved keeps its own."""
        saved = saved_names(Path(path))
        state = dict(self.state())
        expect_same_draft(Path(path), saved, state)
        owner = self.rank if f"random_state.rank_{self.rank}.cpu" in saved else 0
        random = {
            device: value
            for device, value in self._random_state().items()
            if f"random_state.rank_{owner}.{device}" in saved
        }
        state["random_state"] = {f"rank_{owner}": random}
        load_state(Path(path), state)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)
        self._optimizer_steps = int(state["optimizer_steps"])
        for p in self._trained.values():
            self._optimizer.state[p]["step"].fill_(self._optimizer_steps)

    def _random_state(self) -> dict[str, Tensor]:
        """By the kind of device, uint8 each."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def close(self) -> None:
        """Leave the process group; collective. No `write` may be under way."""
        # gloo's threads outlive the group (DTensor's caches hold it), and one that has yet to let go of a collective's
        # tensor aborts an interpreter that is shutting down. During a barrier, which has no tensor, they get the GIL.
        dist.barrier(self._checkpoint_group)
        dist.barrier()
        dist.destroy_process_group()

    # -- construction ----------------------------------------------------------------------------------------------

    def _join_group(self, init_method: str | None, timeout_s: float) -> DeviceMesh:
        if init_method is None and self.world_size > 1:
            raise ValueError(f"{self.world_size} ranks need an init_method at which to meet, such as tcp://host:port")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        dist.init_process_group(
            # gloo beside NCCL, for gradients and optimizer state that were offloaded to the host
            backend="cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo",
            init_method=init_method,
            store=dist.HashStore() if init_method is None else None,  # a store within this process, for a single rank
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        return init_device_mesh(self._device.type, (self.world_size,))

    def _prepare(self, model: Decoder, train_draft: bool) -> Decoder:
        """Freeze a draft that is not trained, and shard layer by layer; the root's own group is embedding, final norm
        and head."""
        for name, p in model.named_parameters():
            if is_draft(name) and not train_draft:
                p.requires_grad_(False)
        # host memory to offload to is elsewhere only with CUDA
        offload = self._options.cpu_offload and self._device.type == "cuda"
        shared: dict[str, Any] = {
            "mesh": self._mesh,
            "mp_policy": _precision(self._options.mixed_precision),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        for layer in [*model.model.layers, *getattr(model.model, "mtp_layers", [])]:
            fully_shard(layer, **shared)
            if isinstance(layer, MTPLayer):
                register_fsdp_forward_method(layer, "draft")
        fully_shard(model, **shared)
        return model

    def _make_optimizer(self) -> torch.optim.AdamW:
        options = self._options.optimizer
        optimizer = torch.optim.AdamW(
            self._trained.values(),
            lr=options.lr,
            betas=(options.betas[0], options.betas[1]),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,
        )
        # AdamW makes its state at the first step; made now, a checkpoint has the same tensors at every step
        for p in self._trained.values():
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
            }
        return optimizer


def _add(sums: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value.double() if name in sums else value.double()


def _choose_device(name: str, rank: int) -> torch.device:
    """``auto`` takes CUDA where there is a device; several visible ones are dealt to the ranks in turn."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device is {name!r}; expected auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", rank % max(torch.cuda.device_count(), 1))


def _precision(name: str) -> MixedPrecisionPolicy:
    """bfloat16 for compute; weights, gradients' sums and optimizer state stay float32."""
    if name == "no":
        return MixedPrecisionPolicy()
    if name == "bfloat16":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    raise ValueError(f"trainer.mixed_precision is {name!r}; expected no or bfloat16")
