"""Prefill: prompts of placed sequences are computed, or copied from a slot or from warm KV that shares them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncrl.models.device_copy import on_device
from asyncrl.rollouter.engines.native.kernels import ROWS_STEP, round_up
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel, Placed
from asyncrl.rollouter.engines.native.scheduler import Chunk, CopyPrefix, Scheduler, Sequence
from asyncrl.rollouter.engines.native.speculation import Speculator
from asyncrl.rollouter.engines.native.warm import WarmPrefix, WarmPrefixes


class Prefiller:
    """Carries out the scheduler's prefill, at most ``chunk_tokens`` computed tokens in a step.

    On a GPU, whose launches cost as much for few tokens as for many, all chunks of a step are one pass. Deterministic
    mode computes each alone, in chunks of one shape."""

    def __init__(
        self,
        model: NativeModel,
        kv: KVCache,
        scheduler: Scheduler,
        warm: WarmPrefixes,
        speculator: Speculator | None,
        chunk_tokens: int,
        deterministic: bool,
    ) -> None:
        self._model, self._kv, self._scheduler, self._warm = model, kv, scheduler, warm
        self._speculator, self._chunk_tokens, self._deterministic = speculator, chunk_tokens, deterministic
        self.together = model.device.type == "cuda" and not deterministic

    def run(self, advanced: Callable[[Sequence], None]) -> tuple[int, int]:
        """A step's prefill; numbers of tokens computed and copied. Calls ``advanced`` with each sequence whose
        ``computed`` has changed."""
        computed, reused = 0, 0
        chunks: list[Chunk] = []
        copies: list[CopyPrefix] = []
        while work := self._scheduler.next_prefill(self._chunk_tokens - computed):
            sequence = work.sequence
            if isinstance(work, CopyPrefix):
                copies.append(work)
                sequence.computed, sequence.mixed_kv = work.tokens, work.source.mixed_kv
                reused += work.tokens
            else:
                if any(copy.sequence is sequence for copy in copies):
                    self._carry_out(chunks, copies)
                chunks.append(work)
                sequence.computed += work.tokens
                computed += work.tokens
            if not self.together:
                self._carry_out(chunks, copies)
            advanced(sequence)
        self._carry_out(chunks, copies)
        return computed, reused

    def _carry_out(self, chunks: list[Chunk], copies: list[CopyPrefix]) -> None:
        """Compute these chunks, then copy these prefixes, which may be of them, in order. Empties both lists."""
        drafting = self._speculator is not None
        pieces = [
            Placed(np.array(s.tokens[start : start + count], np.int64), s.slot, start) for s, start, count in chunks
        ]
        if self.together and pieces:
            self._model.prefill_together(pieces, self._kv, drafting)
        for tokens, slot, start in pieces:
            count = len(tokens)
            if not self.together:
                rows = self._chunk_tokens if self._deterministic else round_up(count, ROWS_STEP)
                length = self._kv.context_tokens if self._deterministic else start + count
                tokens_T = on_device(np.pad(tokens, (0, rows - count)), self._model.device)
                self._model.prefill(tokens_T, slot, start, self._kv, count, length, drafting)
            if self._speculator is not None:
                self._speculator.prefilled(slot, start + count)
        for copy in copies:
            self._copy(copy)
        chunks.clear()
        copies.clear()

    def _copy(self, work: CopyPrefix) -> None:
        source, slot, tokens = work.source, work.sequence.slot, work.tokens
        if isinstance(source, WarmPrefix):
            self._kv.load(slot, source.kv.first(tokens))
            self._warm.used(source)
            drafted = source.drafted
        else:
            self._kv.load(slot, self._kv.view(source.slot, tokens))
            drafted = self._speculator.drafted(source.slot) if self._speculator is not None else 0
        if self._speculator is not None:
            self._speculator.copied(slot, tokens, drafted)
