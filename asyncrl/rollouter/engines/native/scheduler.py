"""Scheduler of slots and prefill: pure decisions, no tensors.

A sequence is waiting → placed in a slot, prefilling → decoding → removed. Prefill computes all its tokens but the last,
which is the input of the first decode step, so only decode steps sample::

    scheduler.add(sequence)
    scheduler.place()                      # waiting sequences → free slots
    while work := scheduler.next_prefill(budget):
        ...                                # copy KV from another slot or compute a chunk, then advance computed
    scheduler.decoding()                   # sequences that the next step samples
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncrl.rollouter.engines.base import Request
from asyncrl.rollouter.engines.native.grammar import Matcher
from asyncrl.rollouter.engines.native.warm import WarmPrefix, WarmPrefixes


@dataclass(eq=False)
class Sequence:
    """A request in the engine. ``tokens``: all of them so far; the first ``computed`` have their KV in ``slot``.

    The first ``prefillable`` tokens may be computed in chunks, later ones only one by one in decode steps. It ends at
    ``limit`` tokens. ``logprobs`` belong to the last ``len(logprobs)`` tokens, which are not reported yet. ``matcher``:
    the state of its grammar after its tokens.
    """

    request: Request
    tokens: list[int]
    prefillable: int
    limit: int
    stop_tokens: frozenset[int]
    slot: int = -1
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    mixed_kv: bool = False
    matcher: Matcher | None = None

    @property
    def drafts(self) -> bool:
        """False for a sequence whose tokens are drawn one by one."""
        return self.matcher is None and not self.request.sampling.logit_bias

    @property
    def prefill_target(self) -> int:
        """Number of tokens whose KV the first decode step needs."""
        return min(self.prefillable, len(self.tokens)) - 1


class CopyPrefix(NamedTuple):
    """Copy the first ``tokens`` positions of ``source``'s KV to ``sequence``."""

    sequence: Sequence
    source: Sequence | WarmPrefix
    tokens: int


class Chunk(NamedTuple):
    """Compute positions ``start`` … ``start + tokens - 1`` of ``sequence``."""

    sequence: Sequence
    start: int
    tokens: int


class Scheduler:
    """Assigns ``slots`` to sequences, at most ``max_training`` of them to training requests. With ``validation_first``,
    validation is placed before training, whatever the priority. With ``aligned``, chunks start only at multiples of
    ``chunk_tokens``, so that a token is always computed in the same row of the same chunk, however much was shared.
    ``warm`` prefixes are copied from if they share more than any slot does."""

    def __init__(self, slots: int, chunk_tokens: int, aligned: bool, warm: WarmPrefixes | None = None) -> None:
        self.max_training, self.validation_first = slots, False
        self.placed: list[Sequence | None] = [None] * slots
        self.by_id: dict[str, Sequence] = {}
        self._chunk_tokens, self._aligned, self._warm = chunk_tokens, aligned, warm
        self._waiting: dict[bool, list[tuple[int, int, Sequence]]] = {True: [], False: []}  # by whether they train
        self._arrivals = itertools.count()
        self._prefilling: list[Sequence] = []
        self._groups: dict[str, list[Sequence]] = {}  # placed ones

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def running(self) -> int:
        return len(self.by_id) - self.waiting

    def decoding(self) -> list[Sequence]:
        prefilling = set(map(id, self._prefilling))
        return [s for s in self.placed if s is not None and id(s) not in prefilling]

    def highest(self) -> int:
        """Last occupied slot plus one."""
        return max((s.slot + 1 for s in self.placed if s is not None), default=0)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: lower priority numbers first, then order of arrival."""
        self.by_id[sequence.request.id] = sequence
        request = sequence.request
        heapq.heappush(self._waiting[request.trains], (request.priority, next(self._arrivals), sequence))

    def place(self) -> list[Sequence]:
        """Assign free slots, lowest first, to waiting sequences; returns the sequences placed."""
        placed: list[Sequence] = []
        for slot in (i for i, taken in enumerate(self.placed) if taken is None):
            if not (line := self._next_line()):
                break
            sequence = heapq.heappop(line)[2]
            sequence.slot, self.placed[slot] = slot, sequence
            self._groups.setdefault(sequence.request.group, []).append(sequence)
            self._prefilling.append(sequence)
            placed.append(sequence)
        return placed

    @property
    def would_place(self) -> bool:
        """True if a waiting sequence would take the next free slot."""
        return bool(self._next_line())

    def _next_line(self) -> list[tuple[int, int, Sequence]]:
        """Queue whose first sequence is next; empty if none may be placed."""
        others, training = self._waiting[False], self._waiting[True]
        if not training or (others and (self.validation_first or others[0] < training[0])):
            return others
        return training if sum(s is not None and s.request.trains for s in self.placed) < self.max_training else others

    def next_prefill(self, budget_tokens: int) -> CopyPrefix | Chunk | None:
        """Next piece of prefill, for the first sequence that is not ready to decode; None if there is none or the
        budget is used up. Advance the sequence's ``computed`` before the next call."""
        while self._prefilling:
            sequence = self._prefilling[0]
            target = sequence.prefill_target
            if sequence.computed >= target:
                self._prefilling.pop(0)
                continue
            if sequence.computed == 0 and (copy := self._shared(sequence, target)):
                return copy
            room = self._chunk_tokens
            if not self._aligned:
                room = min(room, budget_tokens)
            if budget_tokens <= 0:
                return None
            return Chunk(sequence, sequence.computed, min(room, target - sequence.computed))
        return None

    def _shared(self, sequence: Sequence, target: int) -> CopyPrefix | None:
        """Copy of the longest prefix that the sequence shares with another slot of its group, computed under the same
        weights, or with an earlier turn."""
        best: CopyPrefix | None = None
        request = sequence.request
        for other in self._groups[request.group]:
            tokens = min(request.shared_prefix, other.request.shared_prefix, other.computed, target)
            if self._aligned:
                # only prefilled KV, in whole chunks: bits depend on the place in the chunk, and decoded ones differ
                tokens = min(tokens, other.prefill_target)
                tokens -= tokens % self._chunk_tokens if tokens < target else 0
            if other is sequence or other.mixed_kv or tokens <= (best.tokens if best else 0):
                continue
            if np.array_equal(request.tokens[:tokens], other.request.tokens[:tokens]):
                best = CopyPrefix(sequence, other, tokens)
        if self._warm is not None and (match := self._warm.longest(request.group, request.tokens[:target])):
            return best if best and best.tokens >= match.tokens else CopyPrefix(sequence, match.prefix, match.tokens)
        return best

    def remove_waiting(self, sequences: Iterable[Sequence]) -> None:
        ids = {sequence.request.id for sequence in sequences}
        for line in self._waiting.values():
            line[:] = [entry for entry in line if entry[2].request.id not in ids]
            heapq.heapify(line)
        for id in ids:
            del self.by_id[id]

    def remove(self, sequence: Sequence) -> None:
        """Remove a placed sequence."""
        del self.by_id[sequence.request.id]
        self.placed[sequence.slot] = None
        group = self._groups[sequence.request.group]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.group]
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    def move_down(self) -> tuple[Sequence, int] | None:
        """Move the last sequence to the lowest free slot if that is lower, because the highest slot determines the cost
        of a decode step. Returns the sequence and its old slot."""
        last = self.highest() - 1
        hole = next((i for i in range(last) if self.placed[i] is None), None)
        if hole is None:
            return None
        sequence = self.placed[last]
        assert sequence is not None
        self.placed[last], self.placed[hole], sequence.slot = None, sequence, hole
        return sequence, last

    def forget_kv(self) -> SequenceOf[Sequence]:
        """Schedule every placed sequence for prefill again, in slot order; returns them."""
        self._prefilling = [s for s in self.placed if s is not None]
        for sequence in self._prefilling:
            sequence.computed, sequence.mixed_kv = 0, False
        return list(self._prefilling)

    def all(self) -> SequenceOf[Sequence]:
        return list(self.by_id.values())
