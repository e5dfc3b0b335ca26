"""Scheduler of slots and prefill: pure decisions, no tensors.

A sequence's life: waiting → placed in a slot, prefilling → decoding → removed. Prefill computes all its tokens but the
last, which the first decode step takes; so sampling happens in decode steps only::

    scheduler.add(sequence)
    scheduler.place()                      # waiting sequences → free slots
    while work := scheduler.next_prefill(budget):
        ...                                # copy KV from another slot, or compute a chunk; then sequence.computed grows
    scheduler.decoding()                   # those whose next step samples
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from asyncrl.rollouter.engines.base import Request


@dataclass(eq=False)
class Sequence:
    """A request as it runs. ``tokens`` are all of it so far, ``computed`` of them have their KV in ``slot``.

    ``prefillable`` leading tokens may be computed in chunks, those after it one by one in decode steps; at ``limit``
    tokens it ends. ``logprobs`` belong to the last ``len(logprobs)`` tokens: those not reported yet.
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

    @property
    def prefill_target(self) -> int:
        """KV that must be there before the first decode step."""
        return min(self.prefillable, len(self.tokens)) - 1


class CopyPrefix(NamedTuple):
    """The first ``tokens`` positions of ``source``'s KV serve ``sequence`` too."""

    sequence: Sequence
    source: Sequence
    tokens: int


class Chunk(NamedTuple):
    """Compute positions ``start`` … ``start + tokens - 1`` of ``sequence``."""

    sequence: Sequence
    start: int
    tokens: int


class Scheduler:
    """Assigns ``slots`` to sequences, at most ``max_training`` of them to training requests; with ``validation_first``
    others are placed before these, whatever their priority. With ``aligned``, chunks start at multiples of
    ``chunk_tokens`` only, so that a token is computed at the same row of the same chunk whatever was shared before."""

    def __init__(self, slots: int, chunk_tokens: int, aligned: bool) -> None:
        self.max_training, self.validation_first = slots, False
        self.placed: list[Sequence | None] = [None] * slots
        self.by_id: dict[str, Sequence] = {}
        self._chunk_tokens, self._aligned = chunk_tokens, aligned
        self._waiting: dict[bool, list[tuple[int, int, Sequence]]] = {True: [], False: []}  # for training or not
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
        """One more than the last taken slot."""
        return max((s.slot + 1 for s in self.placed if s is not None), default=0)

    def add(self, sequence: Sequence) -> None:
        """Queue it: lower priority numbers first, then in order of arrival."""
        self.by_id[sequence.request.id] = sequence
        request = sequence.request
        heapq.heappush(self._waiting[request.trains], (request.priority, next(self._arrivals), sequence))

    def place(self) -> list[Sequence]:
        """Give free slots, lowest first, to waiting sequences; returns those placed now."""
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
        """True if a waiting sequence takes the next free slot."""
        return bool(self._next_line())

    def _next_line(self) -> list[tuple[int, int, Sequence]]:
        """Queue whose first sequence comes next; empty if none may."""
        others, training = self._waiting[False], self._waiting[True]
        if not training or (others and (self.validation_first or others[0] < training[0])):
            return others
        return training if sum(s is not None and s.request.trains for s in self.placed) < self.max_training else others

    def next_prefill(self, budget_tokens: int) -> CopyPrefix | Chunk | None:
        """Next piece of prefill for the first sequence that is not ready to decode; None when there is none, or the
        budget is used up. The sequence's ``computed`` must be advanced before the next call."""
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
        """The longest prefix that a live slot of the same group already holds under the same weights."""
        best: CopyPrefix | None = None
        request = sequence.request
        for other in self._groups[request.group]:
            tokens = min(request.shared_prefix, other.request.shared_prefix, other.computed, target)
            if self._aligned:
                # KV bits of a prefilled token depend on its place in its chunk alone, those of a decoded one differ
                tokens = min(tokens, other.prefill_target)
                tokens -= tokens % self._chunk_tokens if tokens < target else 0
            if other is sequence or other.mixed_kv or tokens <= (best.tokens if best else 0):
                continue
            if np.array_equal(request.tokens[:tokens], other.request.tokens[:tokens]):
                best = CopyPrefix(sequence, other, tokens)
        return best

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or placed."""
        del self.by_id[sequence.request.id]
        if sequence.slot < 0:
            line = self._waiting[sequence.request.trains]
            line[:] = [entry for entry in line if entry[2] is not sequence]
            heapq.heapify(line)
            return
        self.placed[sequence.slot] = None
        group = self._groups[sequence.request.group]
        group.remove(sequence)
        if not group:
            del self._groups[sequence.request.group]
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    def move_down(self) -> tuple[Sequence, int] | None:
        """Take the last sequence to the lowest free slot, if that is before it: (the sequence, its slot until now).
        Decode steps cost what the highest slot costs."""
        last = self.highest() - 1
        hole = next((i for i in range(last) if self.placed[i] is None), None)
        if hole is None:
            return None
        sequence = self.placed[last]
        assert sequence is not None
        self.placed[last], self.placed[hole], sequence.slot = None, sequence, hole
        return sequence, last

    def forget_kv(self) -> SequenceOf[Sequence]:
        """Every placed sequence is to be prefilled again, in the order of its slots; returns them."""
        self._prefilling = [s for s in self.placed if s is not None]
        for sequence in self._prefilling:
            sequence.computed, sequence.mixed_kv = 0, False
        return list(self._prefilling)

    def all(self) -> SequenceOf[Sequence]:
        return list(self.by_id.values())
