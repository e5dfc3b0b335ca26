"""AdamW over data parallel shards: megatron-core's distributed optimizer, with this project's clipping and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import OptimizerConfig
from asyncrl.trainer.backends.megatron import packages

packages.prepare()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig  # noqa: E402
from megatron.core.optimizer import get_megatron_optimizer  # noqa: E402
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate  # noqa: E402

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """The slice ``start``:``end`` of a flattened parameter that this rank's optimizer steps. ``counts``: it enters the
    gradient norm; False for a duplicate of another rank's parameter (a tensor parallel peer's norm, the first stage's
    embedding)."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: Tensor
    state: dict[str, Tensor]
    trained: str
    counts: bool


class ShardedAdamW:
    """Separate optimizers for ``policy`` and ``draft``, megatron-core's data parallel modules, whose gradients must be
    reduced before `prepare`.

    Master weights are float32: the parameters themselves, or copies of bfloat16 ones. Construction is collective."""

    def __init__(
        self,
        policy: Sequence[DistributedDataParallel],
        draft: DistributedDataParallel | None,
        options: OptimizerConfig,
    ) -> None:
        self._options = options
        self._modules = {"policy": list(policy), "draft": [] if draft is None else [draft]}
        half = next(policy[0].parameters()).dtype == torch.bfloat16
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=0.0,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            use_distributed_optimizer=True,
        )
        # its standard groups keep norms and biases from decaying, as in the torch backend
        self._optimizers = {
            trained: get_megatron_optimizer(settings, modules, use_gloo_process_groups=False)
            for trained, modules in self._modules.items()
            if modules
        }
        for part in (*self._parts("policy"), *self._parts("draft")):
            for group in part.param_groups:  # megatron-core's own scheduler, unused here, would apply the factor
                group["weight_decay"] = options.weight_decay * group["wd_mult"]
        self._device = next(policy[0].parameters()).device
        self._by_parameter: dict[int, list[Shard]] = {}
        self.shards = [shard for trained in self._optimizers for shard in self._find_shards(trained)]

    def zero_grad(self, trained: str) -> None:
        for module in self._modules[trained]:
            module.zero_grad_buffer()
        if trained in self._optimizers:
            self._optimizers[trained].zero_grad()

    def prepare(self, trained: str) -> None:
        """Give each shard its gradient from the reduced buffers."""
        if trained in self._optimizers:
            self._optimizers[trained].prepare_grads()

    def clip(self, trained: str) -> float:
        """Clip the gradient of policy or draft to norm ``grad_clip``; returns its norm before, over all ranks."""
        shards = [shard for shard in self.shards if shard.trained == trained]
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for shard in shards:
            if shard.counts:
                squares += _gradient(shard).norm().double().square()
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if 0 < self._options.grad_clip < norm:
            for shard in shards:
                _gradient(shard).mul_(self._options.grad_clip / (norm + 1e-6))
        return norm

    def step(self, lr: float, trained: str) -> None:
        for part in self._parts(trained):
            for group in part.param_groups:
                group["lr"] = lr
        if trained in self._optimizers:
            self._optimizers[trained].step_with_ready_grads()

    def set_steps(self, steps: int, trained: str) -> None:
        """Set the number of steps that the moments cover."""
        for shard in self.shards:
            if shard.trained == trained:
                shard.state["step"].fill_(steps)
        for part in self._parts(trained):
            for group in part.param_groups:
                group["step"] = steps  # read by Transformer Engine's Adam; torch's reads the state

    def moment(self, name: str, parameter: torch.nn.Parameter) -> Tensor:
        """A moment in the shape of this rank's parameter; collective over the ranks that hold its shards."""
        return self._gathered(parameter, lambda shard: shard.state[name])

    def set_moment(self, name: str, parameter: torch.nn.Parameter, whole: Tensor) -> None:
        for shard in self._by_parameter.get(id(parameter), ()):
            shard.state[name].copy_(whole.reshape(-1)[shard.start : shard.end])

    def weight(self, parameter: torch.nn.Parameter) -> Tensor:
        """The float32 master weight; for a trained 16-bit parameter collective, like `moment`. A frozen parameter has
        no master copy."""
        if parameter.dtype == torch.float32 or not parameter.requires_grad:
            return parameter.float()
        return self._gathered(parameter, lambda shard: shard.main)

    def set_weight(self, parameter: torch.nn.Parameter, whole: Tensor) -> None:
        parameter.data.copy_(whole)
        for shard in self._by_parameter.get(id(parameter), ()):
            shard.main.data.copy_(whole.reshape(-1)[shard.start : shard.end])

    def own_tensors(self) -> Iterator[Tensor]:
        """The optimizer's memory: moments, and float32 master weights of 16-bit parameters."""
        for shard in self.shards:
            yield from (shard.state[name] for name in MOMENTS)
            if shard.parameter.dtype != torch.float32:
                yield shard.main.data

    def _gathered(self, parameter: torch.nn.Parameter, of: Callable[[Shard], Tensor]) -> Tensor:
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=self._device)
        for shard in self._by_parameter.get(id(parameter), ()):
            whole[shard.start : shard.end] = of(shard)
        if getattr(parameter, "allreduce", True):
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:  # an expert, which only this group has
            group = parallel_state.get_expert_data_parallel_group()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(whole, group=group)
        return whole.view(parameter.shape)

    def _parts(self, trained: str) -> Sequence[Any]:
        whole = self._optimizers.get(trained)
        return [] if whole is None else getattr(whole, "chained_optimizers", [whole])

    def _find_shards(self, trained: str) -> Iterator[Shard]:
        group = parallel_state.get_tensor_model_parallel_group()
        for part in self._parts(trained):
            if part.is_stub_optimizer:
                continue
            stepped = [*part.model_fp32_groups, *part.model_float16_groups]
            copies = [*part.shard_fp32_groups, *part.shard_fp32_from_float16_groups]
            for parameters, mains in zip(stepped, copies, strict=True):
                for parameter, main in zip(parameters, mains, strict=True):
                    # created now instead of at the first step, so that checkpoints have the same tensors at every step
                    state: dict[str, Any] = part.optimizer.state[main]
                    state["step"] = torch.zeros((), dtype=torch.float32)
                    state |= {name: torch.zeros_like(main) for name in MOMENTS}
                    where = part._get_model_param_range_map(parameter)["param"]
                    shard = Shard(
                        parameter,
                        where.start,
                        where.end,
                        main,
                        part.optimizer.state[main],
                        trained=trained,
                        # experts are distributed over tensor parallel ranks too
                        counts=not getattr(parameter, "allreduce", True)
                        or (
                            param_is_not_tensor_parallel_duplicate(parameter, group)
                            and not getattr(parameter, "shared", False)
                        ),
                    )
                    self._by_parameter.setdefault(id(parameter), []).append(shard)
                    yield shard


def _gradient(shard: Shard) -> Tensor:
    if shard.main.grad is None:
        raise RuntimeError("no gradient yet: call prepare first")
    return shard.main.grad
