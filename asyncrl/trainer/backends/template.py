"""Framework-independent part of a backend: train step, draft steps, checkpoints, exports."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config, OptimizerConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import Manifest
from asyncrl.processes.device_memory import naming_memory
from asyncrl.trainer.backends.base import (
    TRAINED,
    LossFunction,
    NonFiniteError,
    Outputs,
    TrainBatch,
    computes_in_bfloat16,
)
from asyncrl.trainer.backends.draft import DraftTraining
from asyncrl.trainer.backends.export import Export
from asyncrl.trainer.backends.packing import PADDING, MicroBatch
from asyncrl.trainer.backends.scalars import add_scalars, reduce_scalars
from asyncrl.trainer.backends.schedule import learning_rate
from asyncrl.trainer.backends.state import StagedState, load_state, saved_names
from asyncrl.trainer.batches import cut_micro_batches


@dataclass
class GradientPass:
    """Forward and backward passes of one optimizer step: inputs of the micro-batches' losses, and their totals.

    ``draft_counts``: number of tokens that teach each depth if the draft learns in the policy's own step, else empty.
    ``hidden``: the trunk's states of each sequence of ``batches``, kept for a detached draft."""

    denominator: float
    temperature: float
    draft_counts: Sequence[float]
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    extremes: dict[str, Tensor] = field(default_factory=dict)
    draft_sums: dict[str, Tensor] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    batches: list[TrainBatch] = field(default_factory=list)
    loss: LossFunction = field(init=False)  # of the last batch

    def add(self, batch: TrainBatch, loss: LossFunction) -> None:
        self.batches.append(batch)
        self.loss = loss

    def keep_hidden(self, micro: MicroBatch, states: Sequence[Tensor]) -> None:
        """``states``: of each sequence of a micro-batch of the last batch."""
        before = sum(map(len, self.batches[:-1]))
        self.hidden.update(
            (b if b == PADDING else before + b, state) for b, state in zip(micro.sequences, states, strict=True)
        )

    def policy_loss(self, outputs: Outputs, batch: TrainBatch) -> Tensor:
        """A micro-batch's loss, not yet divided by the denominator; adds its metrics to the totals."""
        output = self.loss(outputs, batch)
        count = int(np.count_nonzero(batch.columns["weights"]))
        trained = output.loss.new_full((), count, dtype=torch.float64)
        add_scalars(self.sums, {"loss": output.loss.detach(), TRAINED: trained, **output.sums})
        add_scalars(self.counts, output.counts)
        for name, value in output.extremes.items():
            self.extremes[name] = torch.maximum(self.extremes[name], value) if name in self.extremes else value
        return output.loss

    def means(self, totals: Mapping[str, float], scale: float) -> dict[str, float]:
        """Metrics, given the totals of ``sums`` and ``counts`` over all ranks."""
        trained = totals.get(TRAINED, 0.0) or 1.0
        over = {**dict.fromkeys(self.sums, trained), "loss": self.denominator / scale, TRAINED: 1.0}
        return {name: total / over.get(name, 1.0) for name, total in totals.items()}


@dataclass(frozen=True)
class HeldModel:
    """One of the models of a rank. ``module``: in the form that `BaseBackend._score` takes; ``weights``: the kind of
    `BaseBackend._resident` state that they are, so that an idle model may be offloaded; ``context``: in which it
    computes, as a model may be another one with something switched off."""

    module: Any
    weights: str = "parameters"
    context: Callable[[], AbstractContextManager[None]] = nullcontext


class BaseBackend(ABC):
    """Template for `asyncrl.trainer.backends.base.Backend`, which documents the public methods.

    A subclass builds model and optimizers, sets the attributes declared below, and calls `_prepare_checkpoints` last.
    What is trained has an optimizer each: the argument ``trained`` of a method is ``policy`` or ``draft``."""

    data_rank: int
    data_ranks: int
    _models: dict[str, HeldModel]  #: by name: the ``policy``, which is trained, and frozen ones
    _draft: DraftTraining | None
    _export: Export
    _data_group: dist.ProcessGroup | None = None  #: the ranks that train on different sequences; None: all ranks
    _pass: GradientPass  #: of the gradient that is being accumulated

    def __init__(self, config: Config, rank: int, world_size: int, recorder: Recorder) -> None:
        self.rank, self.world_size = rank, world_size
        self._config, self._options, self._recorder = config, config.trainer, recorder
        self._half = computes_in_bfloat16(config)
        self._device = choose_device(self._options.device, rank)
        if self._device.type == "cpu":
            torch.set_num_threads(self._options.threads)
        self._lora = config.model.lora.rank > 0
        self._optimizer_steps = 0
        self._schedule_steps = 0  # the same, unless a resume has changed how many a train step takes
        self._during_step = ExitStack()  # from the first `accumulate` of a step to its `optimizer_step`
        self.kept = torch.zeros(2, dtype=torch.float64)
        self._steps_per_train_step = config.optimizer_steps

    def _hold(self, policy: Any, reference: Any | None) -> None:
        """Hold these models. With LoRA the policy without its adapters is the reference, unless there is another."""
        self._models = {"policy": HeldModel(policy)}
        if reference is not None:
            self._models["reference"] = HeldModel(reference, weights="reference")
        elif self._lora:
            self._models["reference"] = HeldModel(policy, context=self._without_adapters)

    def _prepare_checkpoints(self, timeout_s: float) -> None:
        limit_s = max(timeout_s, self._config.checkpoint.timeout_s)  # the others wait while one rank writes
        self._checkpoint_group = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        # with periodic checkpoints allocated at the start, because allocation takes longer than a copy
        periodic = self._config.checkpoint.every_steps > 0
        self._staged = StagedState(self.state(), self._checkpoint_group) if periodic else None

    # -- scoring and training --------------------------------------------------------------------------------------

    def outputs(self, batch: TrainBatch, temperature: float, model: str = "policy") -> Mapping[str, np.ndarray]:
        if (held := self._models.get(model)) is None:
            raise RuntimeError(
                f"no {model} model is held, only {', '.join(self._models)}: reference is loaded with "
                "algorithm.kl_coef or kl_reward_coef"
            )
        with self._naming_memory(f"while it scored with the {model}"), self._resident(held.weights), held.context():
            return self._score(held.module, batch, temperature)

    def summed(self, values: np.ndarray) -> np.ndarray:
        if self.data_ranks == 1:
            return values
        total = torch.from_numpy(values).to(self._device)
        dist.all_reduce(total, group=self._data_group)
        return total.cpu().numpy()

    @property
    def in_parts(self) -> bool:
        """False where losses are divided by counts over the whole batch."""
        return self._joint_draft is None

    @property
    def only_policy_loss(self) -> bool:
        return self._draft is None

    @property
    def prompts_once(self) -> bool:
        return False

    @property
    def _joint_draft(self) -> Any:
        """The draft if it learns in the policy's own steps."""
        return self._draft if self._draft is not None and not self._draft.detached else None

    def accumulate(
        self, batch: TrainBatch, loss: LossFunction, denominator: float, temperature: float, first: bool = True
    ) -> None:
        joint = self._joint_draft
        if first:
            self._during_step.close()  # of a step that ended early
            self._during_step.enter_context(self._resident("parameters", "gradients", written=True))
        with (
            self._closing_if_it_fails(),
            self._naming_memory("in a train step"),
            self._recorder.span("trainer/forward_backward", tokens=len(batch.tokens)),
        ):
            micros = self._policy_micro_batches(batch)
            if first:
                counts = joint.counts([micros])[0] if joint else ()
                self._pass = GradientPass(denominator, temperature, counts)
                self._clear_gradients()
            self._pass.add(batch, loss)
            self._accumulate_gradients(micros, self._pass)

    def optimizer_step(self, scale: float = 1.0) -> Mapping[str, float]:
        """Checks that loss and gradient are finite before the policy's weights change, and that the draft's gradient is
        before each of its steps."""
        step, draft, joint = self._pass, self._draft, self._joint_draft
        with self._during_step, self._naming_memory("in a train step"), self._resident("optimizer", written=True):
            self._reduce_gradients(scale)
            figures = step.means(self._over_data_ranks({**step.sums, **step.counts}, dist.ReduceOp.SUM), scale)
            figures |= self._over_data_ranks(step.extremes, dist.ReduceOp.MAX)
            if joint:
                figures |= joint.figures(step.draft_sums, [step.draft_counts])
            figures = self._shared(figures)
            figures["grad_norm"] = self._clip_gradients("policy")
            self._expect_finite(figures)
            if joint:
                figures["mtp/grad_norm"] = self._update_draft()
            elif draft:
                with self._recorder.span("trainer/draft"):
                    batch = TrainBatch.joined(step.batches)
                    figures |= self._shared(draft.learn(batch, step.hidden, step.temperature, self._update_draft))
            with self._recorder.span("trainer/optimizer"):
                figures["lr"] = self._learning_rate(self._options.optimizer)
                self._step(figures["lr"], "policy")
                self._optimizer_steps += 1
                self._schedule_steps += 1
        del self._pass  # with the states of its sequences
        return figures

    @contextmanager
    def _closing_if_it_fails(self) -> Iterator[None]:
        """Leave what `accumulate` keeps for `optimizer_step`, which does not come after an error."""
        try:
            yield
        except BaseException:
            self._during_step.close()
            raise

    def _naming_memory(self, doing: str) -> AbstractContextManager[None]:
        options = "max_tokens_per_micro_batch or logprob_chunk_tokens, or set activation_checkpointing"
        return naming_memory(self._device, doing, self._held_bytes, f"trainer.{options}")

    def _held_bytes(self) -> dict[str, int]:
        """What is known to lie on the device, by name; without a collective or an allocation."""
        return {}

    def _update_draft(self) -> float:
        """Step the draft. Its gradient is clipped separately, so that it cannot shorten the policy's step. Returns the
        gradient norm before clipping."""
        assert self._draft is not None
        norm = self._clip_gradients("draft")
        self._expect_finite({"mtp/grad_norm": norm})
        self._step(self._learning_rate(self._draft.options), "draft")
        self._draft.steps += 1
        return norm

    def _rescaled(self, position: int, per_train_step: int) -> int:
        """Position in the schedule of this run at which the decay has come as far as at ``position`` in that of a run
        whose train steps took so many optimizer steps."""
        warmup, train_steps = self._options.optimizer.warmup_steps, self._options.total_steps
        if position <= warmup:
            return position
        before, now = (max(train_steps * steps - warmup, 1) for steps in (per_train_step, self._steps_per_train_step))
        return warmup + (position - warmup) * now // before

    def _learning_rate(self, options: OptimizerConfig) -> float:
        """Learning rate at the policy's current step, which the draft's schedule follows too."""
        total = self._options.total_steps * self._steps_per_train_step
        return learning_rate(options, self._optimizer_steps, total, self._schedule_steps)

    def _expect_finite(self, figures: Mapping[str, float]) -> None:
        for name in ("loss", "grad_norm", "mtp/grad_norm"):
            if not math.isfinite(figures.get(name, 0.0)):
                raise NonFiniteError(
                    f"optimizer step {self._optimizer_steps}: {name} is {figures[name]}, expected a finite number; "
                    f"the policy's weights are unchanged (look at this step's logprobs, advantages and lr)"
                )

    def _micro_batches(self, batch: TrainBatch, share: np.ndarray | None = None) -> list[MicroBatch]:
        """Micro-batches of this rank's sequences, or of those in ``share``, padded with placeholders to the number that
        all ranks must run."""
        sequences = np.arange(len(batch)) if share is None else share
        cuts = cut_micro_batches(batch.lengths[sequences], self._options.max_tokens_per_micro_batch)
        micros = [MicroBatch.of(batch, sequences[cut].tolist(), self._device) for cut in cuts]
        return self._with_placeholders(batch, micros)

    def _with_placeholders(self, batch: TrainBatch, micros: list[MicroBatch]) -> list[MicroBatch]:
        count = self._micro_batch_count(len(micros))
        return micros + [MicroBatch.placeholder(batch, self._device) for _ in range(count - len(micros))]

    def _policy_micro_batches(self, batch: TrainBatch) -> list[MicroBatch]:
        """Of what the policy reads."""
        return self._micro_batches(batch)

    def _over_data_ranks(self, values: Mapping[str, Tensor], op: dist.ReduceOp.RedOpType) -> dict[str, float]:
        return reduce_scalars(values, op, self._device, self._data_group)

    # -- weights out -----------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        return self._export.manifest

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        return self._export.tensors(base)

    def export_hf(self, path: Path) -> None:
        with self._resident("parameters", "optimizer"):
            self._export.write_hf(path)
        dist.barrier(self._checkpoint_group)  # one rank writes, which may take longer than any other collective

    # -- state -----------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """This rank's part of the training state. With LoRA: the trained tensors and the digest of their base."""
        with self._resident("parameters", "optimizer"):
            return {
                **self._model_state(),
                "optimizer_steps": torch.tensor(self._optimizer_steps),
                "schedule": torch.tensor([self._schedule_steps, self._steps_per_train_step]),
                "draft_steps": torch.tensor(self._draft.steps if self._draft else 0),
                "kept": self.kept,
                "random_state": {f"rank_{self.rank}": self._random_state()},
            }

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

    def load(self, path: Path) -> None:
        """A rank that did not exist when the state was saved takes rank 0's random state; a device whose random state
        was not saved keeps its own."""
        path = Path(path)
        with self._resident("parameters", "optimizer", written=True):
            saved = saved_names(path)
            self._load_model(path, saved)
            owner = self.rank if f"random_state.rank_{self.rank}.cpu" in saved else 0
            random = {
                device: value
                for device, value in self._random_state().items()
                if f"random_state.rank_{owner}.{device}" in saved
            }
            rest: dict[str, Any] = {
                "optimizer_steps": torch.tensor(0),
                **({"schedule": torch.tensor([0, 1])} if "schedule" in saved else {}),
                "draft_steps": torch.tensor(0),
                "kept": self.kept,
                "random_state": {f"rank_{owner}": random},
            }
            load_state(path, rest)
            torch.set_rng_state(random["cpu"])
            if "cuda" in random:
                torch.cuda.set_rng_state(random["cuda"], self._device)
            self._optimizer_steps = int(rest["optimizer_steps"])
            self._schedule_steps = self._optimizer_steps  # of a checkpoint of an earlier release
            if "schedule" in rest:
                position, per_train_step = rest["schedule"].tolist()
                self._schedule_steps = self._rescaled(position, per_train_step)
            self._set_steps(self._optimizer_steps, "policy")
            if self._draft:
                self._draft.steps = int(rest["draft_steps"])
                self._set_steps(self._draft.steps, "draft")

    def _random_state(self) -> dict[str, Tensor]:
        """uint8 tensors by kind of device."""
        states = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._device)
        return states

    def close(self) -> None:
        """Leave the process groups; collective. No `write` may be running."""
        # gloo's threads outlive the group (DTensor's caches hold it), and a thread that has yet to release a
        # collective's tensor aborts an interpreter that is shutting down. During a barrier, which has no tensor, these
        # threads get the GIL.
        dist.barrier(self._checkpoint_group)
        dist.barrier()
        self._destroy_groups()

    # -- framework-specific ----------------------------------------------------------------------------------------

    @abstractmethod
    def _score(self, model: Any, batch: TrainBatch, temperature: float) -> Mapping[str, np.ndarray]:
        """See `outputs`."""

    @abstractmethod
    def _without_adapters(self) -> AbstractContextManager[None]:
        """Context in which the policy computes as its LoRA base."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Set all gradients to zero; a rejected step has left its own."""

    @abstractmethod
    def _accumulate_gradients(self, micros: list[MicroBatch], step: GradientPass) -> None:
        """Forward and backward passes over ``micros``; adds to the gradient, and to the totals of ``step``."""

    @abstractmethod
    def _reduce_gradients(self, scale: float) -> None:
        """Finish the accumulated gradient, over all ranks, and multiply that of the policy by ``scale``."""

    @abstractmethod
    def _clip_gradients(self, trained: str) -> float:
        """Clip the gradient to norm ``grad_clip``; returns its norm before, over all ranks."""

    @abstractmethod
    def _step(self, lr: float, trained: str) -> None:
        """Take an optimizer step."""

    @abstractmethod
    def _set_steps(self, steps: int, trained: str) -> None:
        """Set the number of steps that an optimizer's moments cover."""

    @abstractmethod
    def _micro_batch_count(self, own: int) -> int:
        """Number of micro-batches that this rank must run, given the number of its ``own``."""

    @abstractmethod
    def _model_state(self) -> dict[str, Any]:
        """``model``, ``optimizer`` (by moment) and with LoRA ``base``, by tensor name."""

    @abstractmethod
    def _load_model(self, path: Path, saved: frozenset[str]) -> None:
        """Restore `_model_state` from ``path``, which holds the tensors ``saved``. Raises CheckpointError."""

    def _shared(self, figures: dict[str, float]) -> dict[str, float]:
        """Distribute metrics that only some ranks have computed."""
        return figures

    def _resident(self, *kinds: str, written: bool = False) -> AbstractContextManager[None]:
        """Context in which these kinds of state are on the device, for backends that offload them. ``written``: they
        may change."""
        return nullcontext()

    def _destroy_groups(self) -> None:
        dist.destroy_process_group()


def reference_path(config: Config) -> str | None:
    """The checkpoint to load as a frozen reference model; None if the run needs no separate one."""
    algorithm = config.algorithm
    if algorithm.needs_reference and (algorithm.reference_path or not config.model.lora.rank):
        return algorithm.reference_path or config.model.path
    return None


def choose_device(name: str, rank: int) -> torch.device:
    """Device of a rank. ``auto`` takes CUDA if available; ranks take the visible devices in turn."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"trainer.device is {name!r}; expected auto, cpu or cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
