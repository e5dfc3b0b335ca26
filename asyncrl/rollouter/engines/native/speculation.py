"""Speculative decoding: the draft proposes k tokens per row, one pass of the target verifies them all.

The acceptance rule is that of Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(2023, arXiv 2211.17192) and Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023,
arXiv 2302.01318): whatever the draft proposes, the tokens follow the target's own distribution. The draft is sampled
with the request's temperature and filters. A draft that equals the target then has every token accepted; a greedy one
would be accepted only as often as the target draws its most likely token.

Shape suffixes: N rows (slots), k drafted tokens, J = k + 1 places verified, X = N·J of them row by row, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncrl.models.device_copy import on_device
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import ZERO_ACCEPTANCE_TOKENS, count_speculation
from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.native.drafter import Drafter
from asyncrl.rollouter.engines.native.guard import Guard
from asyncrl.rollouter.engines.native.kernels import LENGTH_STEP, ROWS_STEP, round_up
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.passes import Passes
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, distributions, inverse_cdf, uniforms

log = logging.getLogger(__name__)

_DRAFT, _ACCEPT = 1, 2  # purposes of random numbers; the redraw uses the token's own, 0
_WIDE = 64  # places to catch up at once after steps without speculation


class Speculation(NamedTuple):
    """Draft at most ``tokens`` per step; with ``guard``, fewer or none if that is faster."""

    tokens: int
    guard: bool = True


class Verified(NamedTuple):
    """By row: the number of accepted drafted tokens; these and the token drawn after them, with behaviour logprobs, in
    the first ``accepted + 1`` of k + 1 columns."""

    accepted: list[int]
    tokens: list[list[int]]
    logprobs: list[list[float]]


def judge(
    target_NJV: Tensor, draft_NkV: Tensor, drafted_Nk: Tensor, accept_Nk: Tensor, redraw_NJ: Tensor
) -> tuple[Tensor, Tensor]:
    """(number of accepted drafted tokens, int64 [N]; the token after them, int64 [N]).

    ``target`` and ``draft`` are the distributions p and q at each place; ``accept`` and ``redraw`` are uniforms. Token
    x is accepted with probability min(1, p(x) / q(x)). The first rejected one is redrawn from max(p − q, 0)
    renormalised; if all k are accepted, one more is drawn from p.
    """
    n, k, size = draft_NkV.shape
    drafted_Nk1 = drafted_Nk.unsqueeze(2)
    p_Nk1, q_Nk1 = target_NJV[:, :-1].gather(2, drafted_Nk1), draft_NkV.gather(2, drafted_Nk1)
    accepted_N = (accept_Nk.unsqueeze(2) * q_Nk1 < p_Nk1).cumprod(1).sum((1, 2))
    rows_N = torch.arange(n, device=accepted_N.device)
    p_NV = target_NJV.view(-1, size).index_select(0, rows_N * (k + 1) + accepted_N)
    q_NV = draft_NkV.view(-1, size).index_select(0, rows_N * k + accepted_N.clamp(max=k - 1))
    rest_NV = p_NV.addcmul(q_NV, (accepted_N < k).to(q_NV.dtype).unsqueeze(1), value=-1).clamp_(min=0)
    # if p = q up to rounding, or the draft is NaN, nothing is left of p − q
    rest_NV = rest_NV.where(rest_NV.sum(-1, keepdim=True) > 0, p_NV)
    return accepted_N, inverse_cdf(rest_NV, redraw_NJ.gather(1, accepted_N.unsqueeze(1))).squeeze(1)


class Speculator:
    """Drafts and verifies for a `Core`: keeps each slot's draft state and random numbers, and counts acceptance.

    The core reports changes of its slots (`begin`, `copied`, `prefilled`, `append`, `move`, `forget`) and calls `step`
    with as many tokens as `guard` chooses. Raises EngineError for a model without MTP layers and for a context too
    short for ``tokens``.
    """

    def __init__(
        self, model: NativeModel, kv: KVCache, passes: Passes, tokens: int, guarded: bool, recorder: Recorder
    ) -> None:
        slots, context = kv.slots, kv.context_tokens
        if not model.draft:
            raise EngineError(
                "mtp.enable_rollout: the checkpoint has no MTP layers (num_nextn_predict_layers is 0) to draft with; "
                "use one that has, or mtp.enable_rollout=false"
            )
        if not 1 <= tokens <= context - 2:
            raise EngineError(
                f"mtp.num_speculative_tokens is {tokens}; a context of {context} tokens has room for 1 to {context - 2}"
            )
        self.guard = Guard(tokens, guarded)
        self._model, self._kv, self._passes = model, kv, passes
        self._most, self._top = tokens, context - 1
        self._drafter = Drafter(model, kv)
        self._recorder = recorder
        self._tokens = np.zeros((slots, context), dtype=np.int64)  # of each slot's sequence
        self._drafted = np.zeros(slots, dtype=np.int64)  # leading places whose draft KV is valid
        self._draft_uniforms = np.zeros((slots, context), dtype=np.float32)  # both by the position before the
        self._accept_uniforms = np.zeros((slots, context), dtype=np.float32)  # token, like the core's
        self._base_S1 = np.arange(slots)[:, None] * context  # offset of each slot in flattened columns
        self._verifications = self._produced = 0
        self._drafts, self._accepts = np.zeros(tokens, dtype=np.int64), np.zeros(tokens, dtype=np.int64)  # by place
        self._barren, self._warned = 0, False

    # -- changes of the slots --------------------------------------------------------------------------------------

    def begin(self, slot: int, tokens: SequenceOf[int], key: int, position: int, count: int) -> None:
        """A sequence of these tokens was placed, and at most ``count`` more will be drawn, from ``position`` on."""
        size = len(tokens)
        self._tokens[slot, :size], self._drafted[slot] = tokens, 0
        drawn = slice(size - 1, size - 1 + count)
        self._draft_uniforms[slot, drawn] = uniforms(key, position, count, _DRAFT)
        self._accept_uniforms[slot, drawn] = uniforms(key, position, count, _ACCEPT)
        if size == 1:
            self._kv.hidden[0][slot, 0].zero_()  # no hidden state yet: make it deterministic

    def append(self, slot: int, place: int, token: int) -> None:
        self._tokens[slot, place] = token

    def drafted(self, slot: int) -> int:
        """Number of leading places of the slot whose draft KV is valid."""
        return int(self._drafted[slot])

    def copied(self, slot: int, tokens: int, drafted: int) -> None:
        """The first ``tokens`` places were copied to the slot, and valid draft KV of ``drafted`` places of the source.
        That of the last one is invalid: it read the source's next token."""
        self._drafted[slot] = max(min(drafted, tokens - 1), 0)

    def prefilled(self, slot: int, end: int) -> None:
        """The target has computed the places before ``end``: compute the draft's too."""
        start = int(self._drafted[slot])
        rows = round_up(end - start, ROWS_STEP)
        places_W = np.arange(start, start + rows)
        places_1W = np.where(places_W < end, places_W, self._top)[None]
        next_1W = self._tokens[slot, np.minimum(places_1W + 1, self._top)]
        length = int(places_1W.max()) + 1
        self._drafter.catch_up(self._tensor(places_1W), self._tensor(next_1W), length, slot)
        self._drafted[slot] = end

    def move(self, source: int, target: int) -> None:
        for column in (self._tokens, self._drafted, self._draft_uniforms, self._accept_uniforms):
            column[target] = column[source]
        self._drafted[source] = 0

    def forget(self, slot: int) -> None:
        """Invalidate the slot's draft KV."""
        self._drafted[slot] = 0

    def keep_hidden(self, positions_NJ: np.ndarray, hidden_XM: Tensor) -> None:
        """Store the target's hidden states at these positions of slots 0 … N−1, for the draft."""
        into_X = (positions_NJ + self._base_S1[: len(positions_NJ)]).ravel()
        self._kv.hidden[0].view(-1, hidden_XM.shape[1]).index_copy_(0, self._tensor(into_X), hidden_XM)

    # -- the step --------------------------------------------------------------------------------------------------

    def step(
        self,
        slots: np.ndarray,
        positions: np.ndarray,
        draws: np.ndarray,
        columns: SamplingColumns,
        k: int,
        length: int,
    ) -> Verified:
        """Draft and verify ``k`` tokens for the first N slots, of which only ``slots`` decode; the other rows' results
        are not read. ``positions``: int64 [N], of the last tokens. ``draws``: float32 [slots, context], uniforms by
        position. ``length``: attended cache entries, at least every position + k + 1, within the context.

        Rows near the end of the context write unread values to its last position. No sequence has KV there: its last
        token is drawn but never computed."""
        n, base_N1 = len(positions), self._base_S1[: len(positions)]
        positions_NJ = np.minimum(positions[:, None] + np.arange(k + 1), self._top)
        at_NJ = positions_NJ + base_N1
        places_NW, next_NW, last_N = self._behind(slots, positions)
        drafted_from = int(places_NW[np.arange(n), last_N].max())
        draft_length = min(round_up(drafted_from + k, LENGTH_STEP), self._top + 1)
        fed_N1, redraw_NJ = self._tokens.take(at_NJ[:, :1]), draws.take(at_NJ)
        uniforms_Nk = [column.take(at_NJ[:, :-1]) for column in (self._draft_uniforms, self._accept_uniforms)]
        arrays = places_NW, next_NW, last_N, fed_N1, positions_NJ, at_NJ, *uniforms_Nk, redraw_NJ
        own, rebuilt = columns.tensors()

        def run(*inputs: Tensor) -> tuple[Tensor, ...]:
            fixed, given = inputs[: len(arrays)], rebuilt(inputs[len(arrays) :])
            return self._propose_and_verify(*fixed, columns=given, k=k, draft_length=draft_length, length=length)

        key = ("speculate", n, k, places_NW.shape[1], columns.kind)
        accepted_N, tokens_NJ, logprobs_NJ = self._passes.run(key, [*map(self._tensor, arrays), *own], run)
        return Verified(accepted_N.tolist(), tokens_NJ.tolist(), logprobs_NJ.tolist())

    def _propose_and_verify(
        self,
        places_NW: Tensor,
        next_NW: Tensor,
        last_N: Tensor,
        fed_N1: Tensor,
        positions_NJ: Tensor,
        at_NJ: Tensor,
        draft_Nk: Tensor,
        accept_Nk: Tensor,
        redraw_NJ: Tensor,
        *,
        columns: SamplingColumns,
        k: int,
        draft_length: int,
        length: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All of a step that the device computes: numbers of accepted tokens, tokens and logprobs. ``at_NJ``: the
        positions among those of all slots; the last three arrays are uniforms."""
        drafts: list[Tensor] = []
        drafted: list[Tensor] = []

        def draw(step: int, logits_NV: Tensor) -> Tensor:
            drafts.append(distributions(logits_NV, columns)[1])
            drafted.append(inverse_cdf(drafts[-1], draft_Nk[:, step : step + 1]))
            return drafted[-1].squeeze(1)

        self._drafter.propose(places_NW, next_NW, last_N, k, draft_length, draw)
        drafted_Nk, draft_NkV = torch.cat(drafted, 1), torch.stack(drafts, 1)
        fed_NJ = torch.cat([fed_N1, drafted_Nk], 1)
        hidden_XM = self._model.hidden_states(fed_NJ, positions_NJ, self._kv, length)
        self._kv.hidden[0].view(-1, hidden_XM.shape[1]).index_copy_(0, at_NJ.reshape(-1), hidden_XM)
        probs_XV, target_XV = distributions(self._model.head(hidden_XM), columns.repeated(k + 1))
        target_NJV = target_XV.view(len(fed_NJ), k + 1, -1)
        accepted_N, next_N = judge(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ)
        tokens_NJ = torch.cat([drafted_Nk, next_N.unsqueeze(1)], 1)
        tokens_NJ.scatter_(1, accepted_N.unsqueeze(1), next_N.unsqueeze(1))
        logprobs_NJ = probs_XV.gather(1, tokens_NJ.view(-1, 1)).log_().view(len(fed_NJ), -1)
        return accepted_N, tokens_NJ, logprobs_NJ

    def _behind(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places that the draft must compute before it can continue from the last tokens [N, W], the tokens after them
        [N, W], and the index of each row's last place among the W [N]; on a GPU W is always the same, for one recorded
        pass. Places far behind are computed here."""
        last = np.maximum(positions - 1, 0)
        while True:
            start = np.minimum(self._drafted[: len(positions)], last)
            behind = last - start
            widest = int(behind[slots].max()) + 1
            near = widest <= self._most + 1
            if near and self._model.device.type == "cuda":
                widest = self._most + 1
            width = widest if near else _WIDE
            places_NW = np.minimum(start[:, None] + np.arange(width), self._top)
            next_NW = self._tokens.take(np.minimum(places_NW + 1, self._top) + self._base_S1[: len(positions)])
            if near:
                self._drafted[: len(positions)] = np.minimum(start + width, positions)
                return places_NW, next_NW, np.minimum(behind, width - 1)
            self._drafter.catch_up(self._tensor(places_NW), self._tensor(next_NW), int(places_NW.max()) + 1)
            self._drafted[: len(positions)] = np.minimum(start + width, last)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return on_device(array, self._model.device)

    # -- figures ---------------------------------------------------------------------------------------------------

    def count(self, k: int, drafted: SequenceOf[int], accepted: SequenceOf[int], produced: int) -> None:
        """Count one step of ``k``. By row: ``drafted`` tokens within the sequence's limit, and ``accepted`` ones of
        them. ``produced``: tokens of all rows."""
        places = np.arange(k)[:, None]
        accepts = (np.asarray(accepted) > places).sum(1)
        self._drafts[:k] += (np.asarray(drafted) > places).sum(1)
        self._accepts[:k] += accepts
        self._verifications += len(drafted)
        self._produced += produced
        self._barren = 0 if accepts[0] else self._barren + sum(drafted)
        if self._barren >= ZERO_ACCEPTANCE_TOKENS and not self._warned:
            log.warning(
                "%s: none of the last %d drafted tokens was accepted: the draft does not match these weights (was it "
                "ever trained?). Expected mtp.enable_train, or a checkpoint with a trained draft, or "
                "mtp.enable_rollout=false",
                self._recorder.actor,
                self._barren,
            )
        self._warned = self._barren >= ZERO_ACCEPTANCE_TOKENS

    def took(self, k: int, rows: int, gained: SequenceOf[int], seconds: float) -> None:
        """Report a step of ``k`` drafted tokens (possibly 0) for ``rows`` sequences to the guard; logs its switches."""
        self.guard.observe(k, rows, gained, seconds)
        while self.guard.switches:
            log.info("%s", self.guard.switches.pop(0))

    def report(self) -> None:
        """Record the counters since the last call, from which `asyncrl.rollouter.engine_metrics` derives rates, and a
        gauge."""
        drafted, accepted = self._drafts.tolist(), self._accepts.tolist()
        count_speculation(self._recorder, self._verifications, self._produced, drafted, accepted)
        self._verifications = self._produced = 0
        self._drafts[:] = 0
        self._accepts[:] = 0
        self._recorder.gauge("rollout/spec_tokens_per_step", self.guard.latest)
