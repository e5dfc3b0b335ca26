"""The torch backend: trains the native decoder or a model of transformers with FSDP2, on CPU (gloo) or CUDA (NCCL)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
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
)
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.models.checkpoint import is_draft, without_draft
from asyncrl.models.decoder import Decoder, DraftTargets, TokenScores
from asyncrl.models.lora import add_adapters, linear_shapes_of, without_adapters
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.lora.adapters import adapter_spec
from asyncrl.param_sync.manifest import AdapterSpec, is_adapter
from asyncrl.processes.device_memory import tensor_bytes
from asyncrl.trainer.backends import process_group
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.backends.export import Export
from asyncrl.trainer.backends.packing import MicroBatch
from asyncrl.trainer.backends.scalars import add_scalars
from asyncrl.trainer.backends.state import (
    digest_bytes,
    expect_same_adapters,
    expect_same_base,
    expect_same_draft,
    load_state,
)
from asyncrl.trainer.backends.template import BaseBackend, GradientPass, reference_path
from asyncrl.trainer.backends.torch.draft import TorchDraftTraining
from asyncrl.trainer.backends.torch.export import ShardedWeights
from asyncrl.trainer.backends.torch.models import TorchModel, load
from asyncrl.trainer.backends.torch.prompts import attention_cost, cut_with_prompts_once


class TorchFSDPBackend(BaseBackend):
    """One rank; see `asyncrl.trainer.backends.base.Backend`.

    ``init_method`` is torch.distributed's, such as ``tcp://127.0.0.1:29500`` or ``file:///some/file``; a single rank
    needs none. ``timeout_s`` bounds every collective, so a hung peer raises. A process holds one backend at a time
    (`close` leaves the process group). A single rank is sharded too: the single code path costs it 3 to 8 % on a CPU
    with a million parameters, less with more.

    The MTP layers are part of the model, so they are saved, exported and listed as ``draft``. The policy loss does not
    reach them: they are frozen without optimizer state, unless ``mtp.enable_train`` gives them their own loss (see
    `asyncrl.trainer.draft_loss`) and optimizer. With ``mtp.detach_encoder`` they learn in several smaller steps from
    the hidden states [T, M] of the policy's forward passes; else in the policy's step, with the trunk.

    With ``model.lora`` everything else is frozen: optimizer and state hold the adapters, and the draft if it is
    trained. The base, without its adapters, is the reference model.
    """

    _draft: TorchDraftTraining | None

    def __init__(
        self,
        config: Config,
        rank: int,
        world_size: int,
        init_method: str | None,
        recorder: Recorder,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(config, rank, world_size, recorder)
        self.data_rank, self.data_ranks = rank, world_size
        torch.manual_seed(config.seed)

        half_on_cuda = self._half and self._device.type == "cuda"
        model = load(config, config.model.path, half_on_cuda, config.mtp.init_from_trunk)
        if config.mtp.enable_train and not model.config.num_mtp_layers:
            raise without_draft(config.model.path)
        self._mesh = self._join_group(init_method, timeout_s)
        start_s = max(timeout_s, config.supervision.start_s)
        self._starting = dist.new_group(backend="gloo", timeout=timedelta(seconds=start_s))
        values = self._read(model)
        adapter: AdapterSpec | None = None
        if self._lora:
            self._base_digest = self._digest_of_first(model.module, values)
            adapter = self._add_adapters(model)
        for name, p in model.module.named_parameters():
            trained = config.mtp.enable_train if is_draft(name) else not self._lora or is_adapter(name)
            p.requires_grad_(trained)
        self._policy = self._sharded(model, values)
        values = {}
        self._export = Export(ShardedWeights(model, rank), adapter, config, rank)
        reference, path = None, reference_path(config)
        if path is not None:
            frozen = load(config, path, half_on_cuda)
            frozen.module.requires_grad_(False)
            reference = self._sharded(frozen, self._read(frozen))
        self._hold(self._policy, reference)

        self._trained = {name: p for name, p in self._policy.named_parameters() if p.requires_grad}
        self._parameters: dict[str, list[nn.Parameter]] = {"policy": []}
        for name, parameter in self._trained.items():
            self._parameters.setdefault(_owner(name), []).append(parameter)
        self._optimizers = {
            trained: _make_optimizer(parameters, self._options.optimizer)
            for trained, parameters in self._parameters.items()
        }
        self._draft = None
        if config.mtp.enable_train:
            decoder = cast(Decoder, self._policy)
            self._draft = TorchDraftTraining(config, self._device, self._micro_batches, decoder, world_size)
        # a draft in the policy's step reads each sequence's own next tokens, after the prompt too
        shares = isinstance(self._policy, Decoder) and self._joint_draft is None
        self._attention_cost = attention_cost(cast(Decoder, self._policy).config) if shares else None
        self._prepare_checkpoints(timeout_s)

    # -- scoring and training --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _score(self, model: nn.Module, batch: TrainBatch, temperature: float) -> dict[str, np.ndarray]:
        found = {name: np.empty(len(batch.targets), np.float32) for name in ("logprobs", "entropy")}
        micros = self._policy_micro_batches(batch) if isinstance(model, Decoder) else self._micro_batches(batch)
        for micro in micros:
            scores = self._forward(model, micro, temperature)
            if len(micro.places):
                found["logprobs"][micro.places] = scores.logprobs.cpu().numpy()
                found["entropy"][micro.places] = scores.entropy.cpu().numpy()
        # FSDP2 keeps the root's weights gathered after a forward pass, for the backward pass that usually follows. None
        # follows here, and `named_parameters` would return the gathered copy, stale after an optimizer step.
        cast(FSDPModule, model).reshard()
        return found

    def _without_adapters(self) -> AbstractContextManager[None]:
        return without_adapters(self._policy)

    @property
    def in_parts(self) -> bool:
        return super().in_parts and not self._balances_experts

    @property
    def only_policy_loss(self) -> bool:
        return super().only_policy_loss and not self._balances_experts

    @property
    def prompts_once(self) -> bool:
        return self._attention_cost is not None

    @property
    def _balances_experts(self) -> bool:
        return getattr(self._policy, "balances_experts", False)

    def _clear_gradients(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()

    def _reduce_gradients(self, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters["policy"] if p.grad is not None], scale)

    def _accumulate_gradients(self, micros: list[MicroBatch], step: GradientPass) -> None:
        draft, joint = self._draft, self._joint_draft
        tokens = 0.0
        if self._balances_experts:
            own = torch.tensor(float(sum(len(m.tokens) for m in micros if len(m.places))))
            tokens = self._over_data_ranks({"tokens": own}, dist.ReduceOp.SUM)["tokens"]
        for micro in micros:
            scores = self._forward(self._policy, micro, step.temperature, micro.drafts(joint.depths) if joint else [])
            # FSDP averages gradients over ranks, but the losses are sums over them
            outputs = {"logprobs": scores.logprobs, "entropy": scores.entropy}
            total = step.policy_loss(outputs, micro.batch) * (self.world_size / step.denominator)
            if joint:
                total = total + joint.loss(scores.drafts, step.draft_counts, step.draft_sums)
            if scores.balance is not None:  # of a placeholder too: all ranks must have the same metrics
                share = scores.balance * (len(micro.tokens) / tokens if len(micro.places) else 0.0)
                add_scalars(step.counts, {"balance_loss": share.detach()})
                total = total + share * self.world_size
            total.backward()
            if draft and not joint:
                hidden = scores.hidden.index_select(0, micro.layout.written)
                step.keep_hidden(micro, hidden.split(micro.batch.lengths.tolist()))

    def _forward(
        self, model: nn.Module, micro: MicroBatch, temperature: float, drafts: Sequence[DraftTargets] = ()
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
            self._config.mtp.detach_encoder,
        )

    def _policy_micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """With each group's prompt once, where the model can share it and that costs less."""
        cuts, limit = None, self._options.max_tokens_per_micro_batch
        if self._attention_cost is not None:
            cuts = cut_with_prompts_once(batch, limit, self._attention_cost, self._device.type)
        if cuts is None:
            return self._micro_batches(batch)
        micros = [
            MicroBatch.of(batch, [b for block in blocks for b in block], self._device, list(map(len, blocks)))
            for blocks in cuts
        ]
        return self._with_placeholders(batch, micros)

    def _micro_batch_count(self, own: int) -> int:
        """The highest number on any rank."""
        return int(self._over_data_ranks({"count": torch.tensor(float(own))}, dist.ReduceOp.MAX)["count"])

    def _clip_gradients(self, trained: str) -> float:
        parameters, limit = self._parameters[trained], self._options.optimizer.grad_clip
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = cast(DTensor, nn.utils.get_total_norm(gradients)).full_tensor()
        if 0 < limit < norm:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return float(norm)

    def _step(self, lr: float, trained: str) -> None:
        optimizer = self._optimizers[trained]
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

    def _held_bytes(self) -> dict[str, int]:
        models = {name: dict(held.module.named_parameters()) for name, held in self._models.items()}
        gradients = {name: p.grad for name, p in self._policy.named_parameters()}
        moments = {name: dict(enumerate(o.state.values())) for name, o in self._optimizers.items()}
        parts = {"weights": models, "gradients": gradients, "optimizer": moments}
        return {name: tensor_bytes(tensors, self._device) for name, tensors in parts.items()}

    # -- state -----------------------------------------------------------------------------------------------------

    def _model_state(self) -> dict[str, Any]:
        """Live tensors, which `stage` copies and `load` fills in place."""
        kept = self._trained.items() if self._lora else self._policy.named_parameters()
        return {
            "model": {name: p.detach() for name, p in kept},
            **({"base": self._base_digest.clone()} if self._lora else {}),
            "optimizer": {
                moment: {name: self._moments(name)[moment] for name in self._trained}
                for moment in ("exp_avg", "exp_avg_sq")
            },
        }

    def _load_model(self, path: Path, saved: frozenset[str]) -> None:
        state = self._model_state()
        expect_same_adapters(path, saved, state)
        expect_same_draft(path, saved, state)
        load_state(path, state)
        if self._lora:
            expect_same_base(path, state["base"], self._base_digest, self._config.model.path)

    def _set_steps(self, steps: int, trained: str) -> None:
        for state in self._optimizers[trained].state.values():
            state["step"].fill_(steps)

    def _moments(self, name: str) -> dict[str, Tensor]:
        return self._optimizers[_owner(name)].state[self._trained[name]]

    # -- construction ----------------------------------------------------------------------------------------------

    def _join_group(self, init_method: str | None, timeout_s: float) -> DeviceMesh:
        process_group.join(self.rank, self.world_size, self._device, init_method, timeout_s)
        return init_device_mesh(self._device.type, (self.world_size,))

    def _read(self, model: TorchModel) -> Mapping[str, Tensor]:
        """A model's values on the first rank; the others wait for it as long as an actor may take to start."""
        values = model.read() if self.rank == 0 else {}
        dist.barrier(self._starting)
        return values

    def _digest_of_first(self, module: nn.Module, values: Mapping[str, Tensor]) -> Tensor:
        """Digest of the first rank's ``values`` as float32, on all ranks."""
        found: list[Tensor | None] = [None]
        if self.rank == 0:
            names = [name for name, _ in module.named_parameters()]
            found = [digest_bytes(digest_tensors((name, values[name].detach().float()) for name in names))]
        dist.broadcast_object_list(found, 0, self._starting)
        return cast(Tensor, found[0])

    def _add_adapters(self, model: TorchModel) -> AdapterSpec:
        shapes, lora = linear_shapes_of(model.module), self._config.model.lora
        spec = adapter_spec(lora, shapes, model.config.engine_dtype(self._config.rollout.engine.dtype))
        add_adapters(model.module, [m for m in shapes if spec.targets(m)], lora.rank, lora.alpha, self._config.seed)
        return spec

    def _sharded(self, model: TorchModel, values: Mapping[str, Tensor]) -> nn.Module:
        # without CUDA the state is in host memory already
        offload = self._options.cpu_offload and self._device.type == "cuda"
        policies = {
            "mp_policy": _precision(self._half),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }
        model.shard(self._mesh, self.rank, values, **policies)
        model.check(self._device, self._half)
        return model.module


def _owner(parameter: str) -> str:
    """Whose optimizer steps a parameter."""
    return "draft" if is_draft(parameter) else "policy"


def _make_optimizer(parameters: Sequence[Tensor], options: OptimizerConfig) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=options.lr,
        betas=(options.betas[0], options.betas[1]),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=True,
    )
    # AdamW creates its state at the first step; created now, so that checkpoints have the same tensors at every step
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
        }
    return optimizer


def _precision(half: bool) -> MixedPrecisionPolicy:
    """bfloat16 for compute; weights, gradient sums and optimizer state stay float32."""
    if not half:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
