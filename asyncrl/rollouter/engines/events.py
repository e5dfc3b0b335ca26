"""Collects request events between two calls of `Engine.events` into the columns of an EventBatch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl.rollouter.engines.base import EventBatch
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion


class Event(NamedTuple):
    """New tokens of one request with their ``logprobs``, all sampled under ``version``; or its end; or both. ``error``:
    why it finished with ERROR."""

    id: str
    tokens: list[int]
    logprobs: list[float]
    version: PolicyVersion
    finish: FinishReason | None = None
    mixed_kv: bool = False
    error: str = ""


class EventLog:
    """Events since the last `take`."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.has_finished = False  # some event ends its request

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: Event) -> None:
        self._events.append(event)
        self.has_finished |= event.finish is not None

    def take(self) -> EventBatch:
        events, self._events, self.has_finished = self._events, [], False
        lengths = [len(e.tokens) for e in events]
        return EventBatch(
            ids=[e.id for e in events],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.array([t for e in events for t in e.tokens], dtype=np.int32),
            logprobs=np.array([x for e in events for x in e.logprobs], dtype=np.float32),
            versions=[e.version for e in events],
            finish=[e.finish for e in events],
            mixed_kv=[e.mixed_kv for e in events],
            errors={e.id: e.error for e in events if e.error},
        )
