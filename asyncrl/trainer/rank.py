"""One trainer rank: finished groups in, optimizer steps and metrics out. `asyncrl.trainer.actors` wraps it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.measured import TRAINER
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import Manifest
from asyncrl.trainer.backends.base import BACKENDS, TRAINED, Backend, NonFiniteError, TrainBatch
from asyncrl.trainer.batches import (
    build_batch,
    cut_mini_batches,
    deal,
    first_sequences,
    samplers,
    shape_rewards,
    tokens_of_sequences,
    with_advantage_and_samplers,
)
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.trainer.objective import Objective, Source, effective_sample_size
from asyncrl.trainer.sampler_kl import take_sampler_kl, with_sampler_kl
from asyncrl.types.groups import Group, computed_tokens
from asyncrl.types.samples import TRUNCATED
from asyncrl.types.versions import Sampler


@dataclass
class GradientSum:
    """The gradient of a train step that comes in parts.

    ``denominator``: by which all parts are divided, near the step's own; 0 until one has a trained token. ``share``:
    the sum of the parts' shares, in the end the step's own denominator. ``batches``, ``sampled_by``: of each part, all
    sequences, without columns of tokens, and what sampled them."""

    denominator: float = 0.0
    share: float = 0.0
    batches: list[TrainBatch] = field(default_factory=list)
    sampled_by: list[list[Sampler]] = field(default_factory=list)


class TrainerRank:
    """One rank of the trainer. All ranks are built alike and get the same calls in the same order::

    rank = TrainerRank(config, rank=0, world_size=1, init_method=None, recorder=Recorder("trainer/0"))
    metrics = rank.train(step=0, buffers=[group.to_bytes(), ...])   # every rank gets all groups
    for name, tensor in rank.export(): ...                          # yields on rank 0
    rank.save(folder)
    """

    def __init__(self, config: Config, rank: int, world_size: int, init_method: str | None, recorder: Recorder) -> None:
        self._config, self._recorder = config, recorder
        self._objective = Objective(config)
        spec = BACKENDS.find(config.trainer.backend)
        backend = spec.make(config, rank, world_size, init_method, recorder)
        self._backend = BACKENDS.checked(backend, Backend, config.trainer.backend)
        self._keep_entropy()
        #: what a train step adds to the position of the weights in versions
        self._versions_per_step = 1 / config.async_training.trigger_parameter_sync_step
        #: of the last batch, in its first optimizer step; equal on all ranks
        self.sampler_kl: list[SamplerKL] = []
        self._in_parts = config.optimizer_steps == 1 and self._objective.of_groups and self._backend.in_parts
        self._skips_zero_advantages = self._objective.scales_advantages and self._backend.only_policy_loss

    def train(
        self,
        step: int,
        buffers: Sequence[bytes | bytearray | memoryview | np.ndarray],
        mask_before: int | None = None,
        version: float = 0.0,
        part: int = 0,
        parts: int = 1,
    ) -> dict[str, float]:
        """A train step on groups that come in ``parts`` calls, the groups of number ``part`` in ``buffers``:
        ``algorithm.epochs`` passes, an optimizer step per mini batch. Tokens of versions below ``mask_before`` are not
        trained. ``version``: position of the weights in versions.

        Each call computes the gradient of its part, if that needs nothing of the others, else the last one computes
        all. A step that ends early is begun again with part 0.

        The last call returns metrics of the whole batch, equal on all ranks; the others nothing. Raises NonFiniteError,
        which names the step; earlier optimizer steps of the batch have been taken, so restart from a checkpoint."""
        last, began_s = part == parts - 1, now_s()
        with self._recorder.span("trainer/step", step=step):
            if part == 0:
                self._sum, self._waiting = GradientSum(), []
            groups = [Group.from_buffer(data) for data in buffers]
            one_step = parts > 1 or len(groups) <= self._config.trainer.mini_batch_groups
            metrics: dict[str, float] = {}
            if self._in_parts and one_step:
                self._add(self._sum, groups, mask_before, version, parts)
                if last:
                    metrics = self._take_step(step, self._sum)
            else:
                self._waiting += groups
                if last:
                    metrics = self._train_whole(step, self._waiting, mask_before, version)
                    self._waiting = []
        TRAINER.observe(self._recorder, now_s() - began_s, last, part > 0, computed_tokens(groups))
        return metrics

    def _add(
        self, total: GradientSum, groups: list[Group], mask_before: int | None, version: float, parts: int
    ) -> None:
        """Add the gradient of one of the ``parts`` to the step's."""
        with self._recorder.span("trainer/batch"):
            whole = build_batch(groups, mask_before)
            total.batches.append(dataclasses.replace(whole, columns={}))
            total.sampled_by.append(samplers(groups))
            whole = shape_rewards(whole, self._config.algorithm, self._config.rollout.max_response_tokens)
            shares = self._objective.prepare(whole, version, self._versions_per_step)
            total.share += float(shares.sum())
            found = [whole.select(mine.tolist()) for _, dealt in self._dealt(whole) for mine in dealt]
        loss = self._objective.loss
        for mini_batch in found:  # none if no token is trained
            with self._recorder.span("trainer/logprobs"):
                mini_batch.columns |= self._scored(mini_batch, self._objective.scores(several_steps=False))
            measured = with_sampler_kl(loss, len(total.sampled_by[-1]), len(total.sampled_by) - 1)
            first = not total.denominator
            if first:
                total.denominator = float(shares.sum()) * parts
            self._backend.accumulate(mini_batch, measured, total.denominator, self._config.rollout.temperature, first)

    def _take_step(self, step: int, total: GradientSum) -> dict[str, float]:
        with self._recorder.span("trainer/batch"):
            metrics = batch_metrics(TrainBatch.joined(total.batches))
        steps: list[dict[str, float]] = []
        self.sampler_kl = []
        if total.denominator:
            steps.append(self._optimizer_step(step, 0, 0, total.denominator / total.share))
            self.sampler_kl = take_sampler_kl(steps[0], total.sampled_by)
        return metrics | self._step_metrics(steps)

    def _train_whole(self, step: int, groups: list[Group], mask_before: int | None, version: float) -> dict[str, float]:
        with self._recorder.span("trainer/batch"):
            whole = build_batch(groups, mask_before)
            metrics = batch_metrics(whole)
            whole = shape_rewards(whole, self._config.algorithm, self._config.rollout.max_response_tokens)
        if columns := self._objective.step_scores():
            with self._recorder.span("trainer/logprobs"):
                mine = np.sort(
                    np.concatenate([np.arange(0), *(mine for _, parts in self._dealt(whole) for mine in parts)])
                )
                self._score_step(whole, mine, columns)
        with self._recorder.span("trainer/batch"):
            shares = self._objective.prepare(whole, version, self._versions_per_step)
            mini_batches = [
                ([whole.select(mine.tolist()) for mine in parts], float(shares[every].sum()))
                for every, parts in self._dealt(whole)
            ]
        with self._recorder.span("trainer/logprobs"):
            columns = self._objective.scores(several_steps=len(mini_batches) * self._config.algorithm.epochs > 1)
            for mini_batch in (part for parts, _ in mini_batches for part in parts):
                mini_batch.columns |= self._scored(mini_batch, columns)
        return metrics | self._optimize(step, mini_batches, samplers(groups))

    def _dealt(self, whole: TrainBatch) -> list[tuple[np.ndarray, list[np.ndarray]]]:
        """Of every mini batch all sequences, and those that this rank trains, which it computes one list after the
        other: indices, ascending.

        All ranks hold all groups, so they agree without a collective. Where only the surrogate learns, a sequence
        without an advantage has no gradient and is left out, once advantages are known. Those that only measure a
        sampler come apart, as timing decides who samples what: the others' micro-batches must not depend on it. Mini
        batches without a trained token are skipped: on a zero gradient AdamW would still move by momentum."""
        found, trained, backend = [], tokens_of_sequences(whole, whole.loss_mask) > 0, self._backend
        for every in cut_mini_batches(whole, self._config.trainer.mini_batch_groups):
            sequences = every[trained[every]]  # the others would cost a forward pass and have no gradient
            parts = [sequences]
            if self._skips_zero_advantages and "advantages" in whole.columns:
                chosen = with_advantage_and_samplers(whole.select(sequences.tolist()))
                parts = [sequences[which] for which in chosen]
            dealt = [deal(whole, part, backend.data_ranks, backend.prompts_once) for part in parts if len(part)]
            if dealt:
                found.append((every, [of_ranks[backend.data_rank] for of_ranks in dealt]))
        return found

    def _score_step(self, whole: TrainBatch, mine: np.ndarray, columns: Mapping[str, Source]) -> None:
        """Add columns to the whole batch, of which this rank scores the sequences ``mine``; 0 in sequences
        that no rank trains."""
        rows = np.isin(np.repeat(np.arange(len(whole)), np.diff(whole.row_offsets)), mine)
        for column, of_mine in self._scored(whole.select(mine.tolist()), columns).items():
            values = np.zeros(len(rows), np.float32)
            values[rows] = of_mine
            whole.columns[column] = self._backend.summed(values)

    def _scored(self, batch: TrainBatch, columns: Mapping[str, Source]) -> dict[str, np.ndarray]:
        """The values of ``columns``: outputs of models that this rank holds."""
        temperature = self._config.rollout.temperature
        found = {model: self._backend.outputs(batch, temperature, model) for model, _ in columns.values()}
        return {column: found[model][output] for column, (model, output) in columns.items()}

    def _optimize(
        self, step: int, mini_batches: list[tuple[list[TrainBatch], float]], sampled_by: Sequence[Sampler]
    ) -> dict[str, float]:
        steps: list[dict[str, float]] = []
        self.sampler_kl = []
        for epoch in range(self._config.algorithm.epochs):
            for k, (parts, denominator) in enumerate(mini_batches):
                first = not steps
                loss = with_sampler_kl(self._objective.loss, len(sampled_by)) if first else self._objective.loss
                for p, part in enumerate(parts):
                    self._backend.accumulate(part, loss, denominator, self._config.rollout.temperature, p == 0)
                steps.append(self._optimizer_step(step, epoch, k))
                if first:
                    self.sampler_kl = take_sampler_kl(steps[0], [sampled_by])
        return self._step_metrics(steps)

    def _optimizer_step(self, step: int, epoch: int, mini_batch: int, scale: float = 1.0) -> dict[str, float]:
        try:
            result = dict(self._backend.optimizer_step(scale))
        except NonFiniteError as e:
            raise NonFiniteError(f"train step {step}, epoch {epoch}, mini batch {mini_batch}: {e}") from e
        effective_sample_size(result)
        return result

    def _step_metrics(self, steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
        metrics = {"trainer/optimizer_steps": float(len(steps)), **step_metrics(steps)}
        control = self._objective.entropy
        if steps and control.used:
            metrics["actor/entropy_coef"] = control.coefficient
            control.observe(metrics["actor/entropy"])
            self._keep_entropy()
        return metrics

    def _keep_entropy(self) -> None:
        """Have the coefficient of the entropy saved with the weights."""
        self._backend.kept[:] = torch.tensor(self._objective.entropy.state, dtype=torch.float64)

    # -- weights and state -----------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        return self._backend.manifest()

    def export(self, base: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the manifest's order, on rank 0; the other ranks must exhaust the iterator too. ``base``:
        include those that adapters leave unchanged."""
        return self._backend.export(base)

    def stage(self) -> None:
        """Copy the state for `write`, which may run in another thread while training continues."""
        self._backend.stage()

    def write(self, path: str | Path) -> None:
        self._backend.write(Path(path))

    def save(self, path: str | Path) -> None:
        """Stage and write."""
        self.stage()
        self.write(path)

    def load(self, path: str | Path) -> None:
        self._backend.load(Path(path))
        self._objective.entropy.restore(self._backend.kept.tolist())
        self._keep_entropy()

    def export_hf(self, path: str | Path) -> None:
        self._backend.export_hf(Path(path))

    def close(self) -> None:
        self._backend.close()


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Metrics of the samples, before the overlong policy is applied. A sample is partial if its tokens were sampled
    under several versions; its span is the newest version number minus the oldest."""
    columns, first = batch.sequence_columns, first_sequences(batch)
    rewards, group = columns["rewards"][first].astype(np.float64), columns["group"][first]
    lengths = np.bincount(columns["sample"], np.diff(batch.row_offsets))
    partial, version_span = columns["versions"][first] > 1, columns["version_span"][first]
    return {
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/std": float(rewards.std()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        **quantiles("critic/rewards", rewards, (10, 50, 90)),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        **quantiles("response_length", lengths, (10, 50, 90, 99)),
        "response_length/clip_ratio": float(np.isin(columns["finish"][first], TRUNCATED).mean()),
        "fully_async/partial/ratio": float(partial.mean()),
        "fully_async/partial/count": float(partial.sum()),
        "fully_async/partial/max_span": float(version_span.max()),
        "trainer/groups": float(group.max() + 1),
        "trainer/samples": float(len(first)),
        "trainer/sequences": float(len(batch)),
        "trainer/tokens": float(len(batch.tokens)),
        "trainer/trained_tokens": float(batch.loss_mask.sum()),
    }


def quantiles(name: str, values: np.ndarray, percents: Sequence[int]) -> dict[str, float]:
    """``name/p50`` and so on, linearly interpolated."""
    return {f"{name}/p{p}": float(q) for p, q in zip(percents, np.percentile(values, percents), strict=True)}


def step_metrics(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as ``actor/...``: means over the trained tokens of all, except for extremes
    and the last ``lr``; or unchanged if named ``mtp/...``: means over the steps that have them."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for step in steps for name in step if name != TRAINED):
        having = [step for step in steps if name in step]
        values, tokens = np.array([(step[name], step[TRAINED]) for step in having]).T
        if name.endswith("ratio_min_negated"):
            metrics[f"actor/{name.removesuffix('_negated')}"] = float(-values.max())
        elif name.endswith("ratio_max"):
            metrics[f"actor/{name}"] = float(values.max())
        elif name == "lr":
            metrics["actor/lr"] = float(values[-1])
        elif name.startswith("mtp/"):
            metrics[name] = float(values.mean())
        else:
            metrics[f"actor/{name}"] = float(values @ (tokens / tokens.sum()))
    return metrics
