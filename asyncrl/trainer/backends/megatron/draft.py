"""The draft's own part of a training step: its loss on the last pipeline stage, and its optimizer's steps.

What it is taught, and in how many steps, is `asyncrl.trainer.draft_loss`'s; the torch backend does the same. The MTP
layers have gradient buffers and optimizer of their own beside the policy's, so their steps wait for nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.trainer.backend import TrainBatch
from asyncrl.trainer.backends.megatron.core_loss import process_mtp_loss, through_core
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.megatron.policy import PolicyModel
from asyncrl.trainer.backends.megatron.vocab_parallel import (
    VocabParallelAcceptance,
    VocabParallelCrossEntropy,
)
from asyncrl.trainer.backends.packing import NOBODY, MicroBatch
from asyncrl.trainer.batches import partition
from asyncrl.trainer.draft_loss import draft_targets, draft_updates

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.distributed.finalize_model_grads import (  # isort: skip
    _allreduce_non_tensor_model_parallel_grads as add_up_replicated_gradients,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip

#: of a rank's sequences, all or some
MicroBatches = Callable[[TrainBatch, np.ndarray | None], list[MicroBatch]]


class DraftTraining:
    """``model``: this rank's last chunk; ``parallel``: the data parallel module around its MTP layers, which are on the
    last stage. The others take part in what all ranks do. ``micro_batches`` and ``over_copies``: the backend's."""

    def __init__(
        self,
        config: Config,
        model: PolicyModel,
        parallel: DistributedDataParallel,
        optimizer: ShardedAdamW,
        micro_batches: MicroBatches,
        over_copies: Callable[..., dict[str, float]],
    ) -> None:
        self._mtp, self._model, self._parallel, self._optimizer = config.mtp, model, parallel, optimizer
        self._process = process_mtp_loss()
        self._micro_batches, self._over_copies = micro_batches, over_copies
        self._chunk_tokens = config.trainer.logprob_chunk_tokens
        self.depths, self.detached = config.mtp.num_speculative_tokens, config.mtp.detach_encoder
        self.options = replace(config.trainer.optimizer, lr=config.mtp.learning_rate or config.trainer.optimizer.lr)
        self.steps = 0

    def loss(
        self,
        micro: MicroBatch,
        share: PackedSequences,
        hidden_T1M: Tensor,
        states: Sequence[Tensor],
        counts: Sequence[float],
        temperature: float,
        sums: dict[str, Tensor],
    ) -> Tensor:
        """Of a micro-batch, as part of an update that teaches ``counts`` tokens at each depth: a scalar of which only
        the gradient counts. The figures are added to ``sums``.

        ``hidden_T1M``: the trunk's states, ``states``: the draft's, by depth."""
        head_WM = self._model.head_weight
        head_WM = head_WM.detach() if self.detached else head_WM
        how = self._model.vocabulary_part, temperature, self._chunk_tokens
        factor = self._mtp.loss_scaling_factor

        def share_of_mean(depth: int, loss: Tensor, hits: Tensor) -> Tensor:
            for name, value in ((f"mtp/loss_{depth}", loss.detach()), (f"mtp/accuracy_{depth}", hits)):
                sums[name] = sums.get(name, 0.0) + value.double()
            return loss / max(counts[depth - 1], 1.0)

        def cross_entropy(depth: int, draft_rM: Tensor, tokens_r: Tensor) -> Tensor:
            return share_of_mean(depth, *VocabParallelCrossEntropy.apply(draft_rM, head_WM, tokens_r, *how))

        if self._mtp.loss == "cross_entropy" and self._process:
            config = self._model.config
            return through_core(self._process, config, factor, micro, share, hidden_T1M, states, cross_entropy)
        total = hidden_T1M.new_zeros((), dtype=torch.float32)
        for depth, (draft_T1M, (places, tokens)) in enumerate(zip(states, micro.drafts(self.depths), strict=True), 1):
            if self._mtp.loss == "acceptance":
                # the trunk draws the token from the place after: the draft's state comes to the rank that has it
                target_rM, mine = share.rows(hidden_T1M.detach(), places + 1)
                draft_rM, _ = share.rows(share.before(draft_T1M), places + 1)
                found = VocabParallelAcceptance.apply(draft_rM, head_WM, target_rM, tokens[mine], *how)
                total = total + share_of_mean(depth, *found)
            else:
                draft_rM, mine = share.rows(draft_T1M, places)
                total = total + cross_entropy(depth, draft_rM, tokens[mine])
        return total * (factor / self.depths)

    def counts(self, updates: Sequence[Sequence[MicroBatch]]) -> list[list[float]]:
        """For each update and depth, how many tokens of all copies the draft is taught."""
        depths = range(1, self.depths + 1)
        mine = {
            f"{u}/{depth}": torch.tensor(float(sum(len(draft_targets(m.batch, depth)[0]) for m in micros)))
            for u, micros in enumerate(updates)
            for depth in depths
        }
        found = self._over_copies(mine, dist.ReduceOp.SUM)
        return [[found[f"{u}/{depth}"] for depth in depths] for u in range(len(updates))]

    def figures(self, sums: Mapping[str, Tensor], counts: Sequence[Sequence[float]]) -> dict[str, float]:
        """On the last stage: means over the tokens taught, by depth."""
        taught = [max(sum(count), 1.0) for count in zip(*counts, strict=True)]
        # on each context parallel rank of its own places
        found = self._over_copies(sums, dist.ReduceOp.SUM, with_context_parallel=True)
        return {name: value / taught[int(name.rpartition("_")[2]) - 1] for name, value in found.items()}

    def learn(
        self, batch: TrainBatch, hidden: Mapping[int, Tensor], temperature: float, update: Callable[[], float]
    ) -> dict[str, float]:
        """Go over the batch in `draft_updates` steps of the draft's optimizer, each over an equal share of every copy's
        sequences, and do so ``mtp.passes`` times. The figures, on the last stage, are of the first pass.

        ``hidden``: there the trunk's states [t, M] of each sequence's tokens that this rank has. ``update`` steps, and
        returns the gradient's norm."""
        updates = [self._micro_batches(batch, share) for share in partition(batch.lengths, draft_updates(self._mtp))]
        counts = self.counts(updates)
        sums: dict[str, Tensor] = {}
        norms: list[float] = []
        for number in range(self._mtp.passes * len(updates)):
            micros, count = updates[number % len(updates)], counts[number % len(updates)]
            if not any(count):
                continue  # on a zero gradient AdamW would still move by momentum
            self._optimizer.zero_grad(draft=True)
            if self._model.post_process:
                for micro in micros:
                    share = share_of(micro, self._model.config)
                    hidden_T1M = self._joined(micro, share, hidden)
                    states = self._model.draft(hidden_T1M, share, self.depths)
                    of_pass = sums if number < len(updates) else {}
                    self.loss(micro, share, hidden_T1M, states, count, temperature, of_pass).backward()
                self.add_up()
                add_up_replicated_gradients([self._parallel], self._model.config)
            norms.append(update())
        return self.figures(sums, counts) | ({"mtp/grad_norm": float(np.mean(norms))} if norms else {})

    def add_up(self) -> None:
        """The gradients of the copies of the model; collective over those of this stage."""
        self._parallel.finish_grad_sync()

    def _joined(self, micro: MicroBatch, share: PackedSequences, hidden: Mapping[int, Tensor]) -> Tensor:
        """[T, 1, M]: what was kept of the micro-batch's sequences; zeros for a placeholder."""
        if micro.sequences == [NOBODY]:
            return torch.zeros(share.tokens.shape[1], 1, self._model.config.hidden_size, device=micro.tokens.device)
        return torch.cat([hidden[b] for b in micro.sequences]).unsqueeze(1)


def share_of(micro: MicroBatch, config: TransformerConfig) -> PackedSequences:
    """This rank's."""
    group = parallel_state.get_context_parallel_group()
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return PackedSequences.of(micro.tokens, micro.batch.lengths, micro.layout, group, multiple)


def by_sequence(states_T1M: Tensor, share: PackedSequences) -> Sequence[Tensor]:
    """[t, M] of each sequence's tokens that this rank has."""
    lengths = share.cu_seqlens_q.diff() // share.group.size()
    return states_T1M.squeeze(1).split(lengths.tolist())
