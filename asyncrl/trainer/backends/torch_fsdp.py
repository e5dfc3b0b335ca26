"""The torch backend: the native decoder trained with FSDP2, on CPU (gloo) and CUDA (NCCL) alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
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

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.models.checkpoint import is_draft, load_decoder, without_draft
from asyncrl.models.decoder import Decoder, DraftScores, DraftTargets, MTPLayer, TokenScores
from asyncrl.models.lora import add_adapters, linear_shapes, without_adapters
from asyncrl.param_sync.adapters import adapter_spec
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, is_adapter
from asyncrl.telemetry.recorder import Recorder
from asyncrl.trainer.backend import LossFunction, NonFiniteError, Scores, TrainBatch
from asyncrl.trainer.backends import process_group
from asyncrl.trainer.backends.export import Export
from asyncrl.trainer.backends.packing import NOBODY, MicroBatch
from asyncrl.trainer.backends.schedule import learning_rate
from asyncrl.trainer.backends.torch_export import ShardedWeights
from asyncrl.trainer.backends.torch_state import (
    StagedState,
    digest_bytes,
    expect_same_adapters,
    expect_same_base,
    expect_same_draft,
    load_state,
    saved_names,
)
from asyncrl.trainer.batches import cut_micro_batches, partition
from asyncrl.trainer.draft_loss import draft_updates

#: the micro-batches of one optimizer step of the draft, with what it is taught of them at each depth
DraftUpdate = Sequence[tuple[MicroBatch, Sequence[DraftTargets]]]


class TorchFSDPBackend:
    """One rank of it; see `asyncrl.trainer.backend.Backend` for what each method promises.

    ``init_method`` is torch.distributed's, such as ``tcp://127.0.0.1:29500`` or ``file:///some/file``; a single rank
    needs none. ``timeout_s`` bounds every collective: a hung peer is an error then, not a wait without end. A process
    holds one backend at a time (`close` leaves the process group). One rank is sharded like many: the single code path
    costs it 3 to 8 % on a CPU with a million parameters, and less with more.

    The MTP layers belong to the model, so they are saved, exported and listed as ``draft``. The policy loss does not
    reach them: they are frozen and have no optimizer state, unless ``mtp.enable_train`` adds a loss of their own (see
    `asyncrl.trainer.draft_loss`), with an optimizer of their own. With ``mtp.detach_encoder`` they learn in several
    smaller steps from the hidden states [T, M] that the policy's forward passes left; else in one, with the trunk.

    With ``model.lora`` all else is frozen: optimizer and state are those of the adapters, and of a draft that is
    trained. The base, without its adapters, is the reference model.
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
        self._adapter: AdapterSpec | None = None
        if config.model.lora.rank:
            self._base_digest = digest_bytes(digest_tensors(model.named_parameters()))
            self._adapter = self._add_adapters(model)

        self._draft_depths = config.mtp.num_speculative_tokens if config.mtp.enable_train else 0
        self._draft_updates, self._detached = draft_updates(config.mtp), config.mtp.detach_encoder
        for name, p in model.named_parameters():
            trained = config.mtp.enable_train if is_draft(name) else self._adapter is None or is_adapter(name)
            p.requires_grad_(trained)
        self._model = self._prepare(model)
        self._export = Export(ShardedWeights(self._model, rank), self._adapter, config, rank)
        self._model.activation_checkpointing = self._options.activation_checkpointing
        self._reference: Decoder | None = None
        reference_path = config.algorithm.reference_path
        if config.algorithm.kl_coef > 0 and (reference_path or self._adapter is None):
            reference = load_decoder(reference_path or config.model.path)
            self._reference = self._prepare(reference.requires_grad_(False))

        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._target_parameters = [p for name, p in self._trained.items() if not is_draft(name)]
        self._draft_parameters = [p for name, p in self._trained.items() if is_draft(name)]
        options = self._options.optimizer
        self._draft_options = replace(options, lr=config.mtp.learning_rate or options.lr)
        self._optimizer = _make_optimizer(self._target_parameters, options)
        self._draft_optimizer = _make_optimizer(self._draft_parameters, options) if self._draft_parameters else None
        states = self._optimizer.state | (self._draft_optimizer.state if self._draft_optimizer else {})
        self._moments = {name: states[p] for name, p in self._trained.items()}
        self._optimizer_steps = self._draft_steps = 0
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
        if self._reference is None and self._adapter is not None:
            with without_adapters(self._model):
                return self._score(self._model, batch, temperature).logprobs
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
        """See `Backend.train_step`. Whether loss and gradient are finite is checked before the policy's weights change,
        and of the draft's each time before those do."""
        together, apart = self._draft_depths and not self._detached, self._draft_depths and self._detached
        kept = {NOBODY: torch.zeros(1, self._model.config.hidden_size, device=self._device)}
        with self._recorder.span("trainer/forward_backward", tokens=len(batch.tokens)):
            sums: dict[str, Tensor] = {}
            extremes: dict[str, Tensor] = {}
            of_draft: dict[str, Tensor] = {}
            micros = [(m, m.drafts(self._draft_depths if together else 0)) for m in self._micro_batches(batch)]
            counts = self._draft_counts([micros]) if together else []
            for micro, targets in micros:
                scores = self._forward(self._model, micro, temperature, targets)
                output = loss(scores.logprobs, scores.entropy, micro.batch)
                # FSDP averages gradients over ranks, but the losses are sums over them
                total = output.loss * (self.world_size / global_denominator)
                if together:
                    total = total + self._draft_loss(scores.drafts, counts[0], of_draft)
                total.backward()
                if apart:
                    kept.update(zip(micro.sequences, scores.hidden.split(micro.batch.lengths.tolist()), strict=True))
                _add(sums, {"loss": output.loss.detach(), **output.sums})
                for name, value in output.extremes.items():
                    extremes[name] = torch.maximum(extremes[name], value) if name in extremes else value
            figures = self._over_ranks(sums, dist.ReduceOp.SUM, 1 / global_denominator)
            figures |= self._over_ranks(extremes, dist.ReduceOp.MAX)
            figures["grad_norm"] = self._clip_gradients(self._target_parameters)
            self._expect_finite(figures)

        if apart:
            with self._recorder.span("trainer/draft"):
                figures |= self._learn_draft(batch, kept, temperature)
        with self._recorder.span("trainer/optimizer"):
            if together:
                figures |= self._draft_figures(of_draft, counts) | {"mtp/grad_norm": self._update_draft()}
            figures["lr"] = self._step(self._optimizer, self._options.optimizer)
            self._optimizer_steps += 1
        return figures

    def _learn_draft(self, batch: TrainBatch, hidden: Mapping[int, Tensor], temperature: float) -> dict[str, float]:
        """Go over the batch in `draft_updates` steps of the draft's optimizer, each over an equal share of every rank's
        sequences, and do so ``mtp.passes`` times. The figures are of the first pass: what it had yet to learn.

        ``hidden``: the trunk's states [T, M] of each sequence. The trunk is not run again, and nothing but the draft
        changes: embedding and head stay gathered from the first step to the last."""
        root = cast(FSDPModule, self._model)
        shares = partition(batch.lengths, self._draft_updates)
        updates = [[(m, m.drafts(self._draft_depths)) for m in self._micro_batches(batch, share)] for share in shares]
        counts = self._draft_counts(updates)
        sums: dict[str, Tensor] = {}
        norms: list[float] = []
        root.set_reshard_after_backward(False, recurse=False)
        try:
            for number in range(self._config.mtp.passes * len(updates)):
                micros, count = updates[number % len(updates)], counts[number % len(updates)]
                if not any(count):
                    continue  # on a zero gradient AdamW would still move by momentum
                for micro, targets in micros:
                    scores = self._model.score_drafts(
                        torch.cat([hidden[b] for b in micro.sequences]),
                        micro.tokens,
                        micro.layout,
                        targets,
                        temperature,
                        self._options.logprob_chunk_tokens,
                        self._config.mtp.loss,
                    )
                    self._draft_loss(scores, count, sums if number < len(updates) else {}).backward()
                norms.append(self._update_draft())
        finally:
            root.set_reshard_after_backward(True, recurse=False)
            root.reshard()
        return self._draft_figures(sums, counts) | ({"mtp/grad_norm": float(np.mean(norms))} if norms else {})

    def _draft_loss(self, drafts: Sequence[DraftScores], counts: Sequence[float], sums: dict[str, Tensor]) -> Tensor:
        """Of a micro-batch, as part of an update that teaches ``counts`` tokens at each depth; adds to ``sums``."""
        scale = self.world_size * self._config.mtp.loss_scaling_factor / self._draft_depths
        for depth, draft in enumerate(drafts, 1):
            _add(sums, {f"mtp/loss_{depth}": draft.loss.detach(), f"mtp/accuracy_{depth}": draft.hits})
        return torch.stack([d.loss * (scale / max(n, 1.0)) for d, n in zip(drafts, counts, strict=True)]).sum()

    def _draft_counts(self, updates: Sequence[DraftUpdate]) -> list[list[float]]:
        """For each update and depth, how many tokens of all ranks the draft is taught."""
        depths = range(self._draft_depths)
        mine = {
            f"{u}/{d}": torch.tensor(float(sum(len(targets[d].tokens) for _, targets in micros)))
            for u, micros in enumerate(updates)
            for d in depths
        }
        found = self._over_ranks(mine, dist.ReduceOp.SUM)
        return [[found[f"{u}/{d}"] for d in depths] for u in range(len(updates))]

    def _draft_figures(self, sums: Mapping[str, Tensor], counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """Means over the tokens taught, by depth."""
        taught = [max(sum(count), 1.0) for count in zip(*counts, strict=True)]
        found = self._over_ranks(sums, dist.ReduceOp.SUM)
        return {name: value / taught[int(name.rpartition("_")[2]) - 1] for name, value in found.items()}

    def _update_draft(self) -> float:
        """Take the draft's gradient, clipped apart, so that it cannot shorten the policy's step; its norm before."""
        assert self._draft_optimizer is not None
        norm = self._clip_gradients(self._draft_parameters)
        self._expect_finite({"mtp/grad_norm": norm})
        self._step(self._draft_optimizer, self._draft_options)
        self._draft_steps += 1
        return norm

    def _step(self, optimizer: torch.optim.Optimizer, options: OptimizerConfig) -> float:
        """Returns the learning rate, which follows the policy's steps."""
        rate = learning_rate(options, self._optimizer_steps, self._total_optimizer_steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        return rate

    def _expect_finite(self, figures: Mapping[str, float]) -> None:
        for name in ("loss", "grad_norm", "mtp/grad_norm"):
            if not math.isfinite(figures.get(name, 0.0)):
                for p in self._trained.values():
                    p.grad = None
                raise NonFiniteError(
                    f"optimizer step {self._optimizer_steps}: {name} is {figures[name]}, expected a finite number; "
                    f"the policy's weights were left as they are (look at this step's logprobs, advantages and lr)"
                )

    def _forward(
        self, model: Decoder, micro: MicroBatch, temperature: float, drafts: Sequence[DraftTargets] = ()
    ) -> TokenScores:
        return model(
            micro.tokens,
            micro.layout,
            micro.rows,
            micro.targets,
            temperature,
            self._options.logprob_chunk_tokens,
            drafts,
            self._config.mtp.loss,
            self._detached,
        )

    def _micro_batches(self, batch: TrainBatch, share: np.ndarray | None = None) -> Iterator[MicroBatch]:
        """This rank's micro-batches, of all its sequences or of those in ``share``, then placeholders up to the number
        that the busiest rank has."""
        sequences = np.arange(len(batch)) if share is None else share
        cuts = cut_micro_batches(batch.lengths[sequences], self._options.max_tokens_per_micro_batch)
        most = len(cuts)
        if self.world_size > 1:
            most = int(self._over_ranks({"count": torch.tensor(float(most))}, dist.ReduceOp.MAX)["count"])
        for cut in cuts:
            yield MicroBatch.of(batch, sequences[cut].tolist(), self._device)
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
        return self._export.manifest()

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """See `Backend.export`: rank 0 is the sender; the others take part in gathering and yield nothing."""
        return self._export.tensors(base)

    def export_hf(self, path: Path) -> None:
        self._export.write_hf(path)
        dist.barrier()

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """Live tensors, by parameter name: what `stage` copies and `load` fills in place. Of a LoRA run those that are
        trained, and the digest of the base that they belong to."""
        moments = {
            moment: {name: moments[moment] for name, moments in self._moments.items()}
            for moment in ("exp_avg", "exp_avg_sq")
        }
        kept = self._model.named_parameters() if self._adapter is None else self._trained.items()
        return {
            "model": {name: p.detach() for name, p in kept},
            **({"base": self._base_digest.clone()} if self._adapter is not None else {}),
            "optimizer": moments,
            "optimizer_steps": torch.tensor(self._optimizer_steps),
            "draft_steps": torch.tensor(self._draft_steps),
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
        expect_same_adapters(Path(path), saved, state)
        expect_same_draft(Path(path), saved, state)
        owner = self.rank if f"random_state.rank_{self.rank}.cpu" in saved else 0
        random = {
            device: value
            for device, value in self._random_state().items()
            if f"random_state.rank_{owner}.{device}" in saved
        }
        state["random_state"] = {f"rank_{owner}": random}
        load_state(Path(path), state)
        if self._adapter is not None:
            expect_same_base(Path(path), state["base"], self._base_digest, self._config.model.path)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)
        self._optimizer_steps = int(state["optimizer_steps"])
        self._draft_steps = int(state["draft_steps"])
        for name, moments in self._moments.items():
            moments["step"].fill_(self._draft_steps if is_draft(name) else self._optimizer_steps)

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
        process_group.join(self.rank, self.world_size, self._device, init_method, timeout_s)
        return init_device_mesh(self._device.type, (self.world_size,))

    def _add_adapters(self, model: Decoder) -> AdapterSpec:
        shapes, lora = linear_shapes(model.config), self._config.model.lora
        spec = adapter_spec(lora, shapes, model.config.engine_dtype(self._config.rollout.engine.dtype))
        add_adapters(model, [m for m in shapes if spec.targets(m)], lora.rank, lora.alpha, self._config.seed)
        return spec

    def _prepare(self, model: Decoder) -> Decoder:
        """Shard layer by layer; the root's own group is embedding, final norm and head."""
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
        register_fsdp_forward_method(model, "score_drafts")
        return model


def _make_optimizer(parameters: Sequence[Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.lr,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    # AdamW makes its state at the first step; made now, a checkpoint has the same tensors at every step
    for p in parameters:
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
