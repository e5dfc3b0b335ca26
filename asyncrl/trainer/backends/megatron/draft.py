"""The draft's losses and updates on the last pipeline stage.

The MTP layers have their own gradient buffers and optimizer, so their steps are independent of the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.trainer.backends.draft import DraftTraining, MicroBatches
from asyncrl.trainer.backends.megatron.core_loss import process_mtp_loss, through_core
from asyncrl.trainer.backends.megatron.optimizer import ShardedAdamW
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.megatron.policy import PolicyModel
from asyncrl.trainer.backends.megatron.vocab_parallel import (
    VocabParallelAcceptance,
    VocabParallelCrossEntropy,
)
from asyncrl.trainer.backends.packing import PADDING, MicroBatch
from asyncrl.trainer.backends.scalars import add_scalars

from megatron.core import parallel_state  # isort: skip (after what makes it run without CUDA)
from megatron.core.distributed import DistributedDataParallel  # isort: skip
from megatron.core.distributed.finalize_model_grads import (  # isort: skip
    _allreduce_non_tensor_model_parallel_grads as add_up_replicated_gradients,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # isort: skip


class MegatronDraftTraining(DraftTraining):
    """``model``: this rank's last chunk; ``parallel``: the data parallel module around its MTP layers. Only the last
    stage has MTP layers; other stages take part in the collectives."""

    def __init__(
        self,
        config: Config,
        device: torch.device,
        micro_batches: MicroBatches,
        model: PolicyModel,
        parallel: DistributedDataParallel,
        optimizer: ShardedAdamW,
    ) -> None:
        copies = parallel_state.get_data_parallel_group()
        # each context parallel rank has the metrics of its own positions
        peers = parallel_state.get_data_parallel_group(with_context_parallel=True)
        super().__init__(config, device, micro_batches, copies, peers)
        self._model, self._parallel, self._optimizer = model, parallel, optimizer
        self._process = process_mtp_loss()

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
        """A micro-batch's share of an update with ``counts`` tokens at each depth: a scalar of which only the gradient
        is meaningful. Adds metrics to ``sums``.

        ``hidden_T1M``: the trunk's states, ``states``: the draft's, by depth."""
        head_WM = self._model.head_weight
        head_WM = head_WM.detach() if self.detached else head_WM
        how = self._model.vocabulary_part, temperature, self._chunk_tokens
        factor = self._mtp.loss_scaling_factor

        def share_of_mean(depth: int, loss: Tensor, hits: Tensor) -> Tensor:
            add_scalars(sums, {f"mtp/loss_{depth}": loss.detach(), f"mtp/accuracy_{depth}": hits})
            return loss / max(counts[depth - 1], 1.0)

        def cross_entropy(depth: int, draft_rM: Tensor, tokens_r: Tensor) -> Tensor:
            return share_of_mean(depth, *VocabParallelCrossEntropy.apply(draft_rM, head_WM, tokens_r, *how))

        if self._mtp.loss == "cross_entropy" and self._process:
            config = self._model.config
            return through_core(self._process, config, factor, micro, share, hidden_T1M, states, cross_entropy)
        total = hidden_T1M.new_zeros((), dtype=torch.float32)
        for depth, (draft_T1M, (places, tokens)) in enumerate(zip(states, micro.drafts(self.depths), strict=True), 1):
            if self._mtp.loss == "acceptance":
                # the trunk predicts the token one position later; the draft's state moves to that position's rank
                target_rM, mine = share.rows(hidden_T1M.detach(), places + 1)
                draft_rM, _ = share.rows(share.before(draft_T1M), places + 1)
                found = VocabParallelAcceptance.apply(draft_rM, head_WM, target_rM, tokens[mine], *how)
                total = total + share_of_mean(depth, *found)
            else:
                draft_rM, mine = share.rows(draft_T1M, places)
                total = total + cross_entropy(depth, draft_rM, tokens[mine])
        return total * (factor / self.depths)

    def _accumulate_gradients(
        self,
        micros: Sequence[MicroBatch],
        hidden: Mapping[int, Tensor],
        counts: Sequence[float],
        temperature: float,
        sums: dict[str, Tensor],
    ) -> None:
        self._optimizer.zero_grad("draft")
        if self._model.post_process:
            for micro in micros:
                share = share_of(micro, self._model.config)
                hidden_T1M = self._joined(micro, share, hidden)
                states = self._model.draft(hidden_T1M, share, self.depths)
                self.loss(micro, share, hidden_T1M, states, counts, temperature, sums).backward()
            self.reduce_gradients()
            add_up_replicated_gradients([self._parallel], self._model.config)

    def reduce_gradients(self) -> None:
        """Sum the gradients of the model's copies; collective over those of this stage."""
        self._parallel.finish_grad_sync()

    def _joined(self, micro: MicroBatch, share: PackedSequences, hidden: Mapping[int, Tensor]) -> Tensor:
        """[T, 1, M]: the kept trunk states of the micro-batch's sequences; zeros for a placeholder."""
        if micro.sequences == [PADDING]:
            return torch.zeros(share.tokens.shape[1], 1, self._model.config.hidden_size, device=micro.tokens.device)
        return torch.cat([hidden[b] for b in micro.sequences]).unsqueeze(1)


def share_of(micro: MicroBatch, config: TransformerConfig) -> PackedSequences:
    """This rank's share of a micro-batch."""
    group = parallel_state.get_context_parallel_group()
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return PackedSequences.of(micro.tokens, micro.batch.lengths, micro.layout, group, multiple)


def by_sequence(states_T1M: Tensor, share: PackedSequences) -> Sequence[Tensor]:
    """[t, M] for each sequence: the states of this rank's tokens."""
    lengths = share.cu_seqlens_q.diff() // share.group.size()
    return states_T1M.squeeze(1).split(lengths.tolist())
