"""Collects request events between two calls of `Engine.events` into the columns of an EventBatch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from asyncrl.rollouter.engines.base import EventBatch
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

NO_VERSION = PolicyVersion(0, -1)  #: of events without tokens before the first version


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
    """Events that no `take` has returned yet."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Event]] = {}  # by request; one for consecutive ones under one version
        self._ended: dict[str, None] = {}  # requests, in order

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def has_finished(self) -> bool:
        """Some event ends its request."""
        return bool(self._ended)

    def add(self, event: Event) -> None:
        rows = self._rows.setdefault(event.id, [])
        row = rows[-1] if rows else None
        if row is None or row.finish is not None or (row.version, row.mixed_kv) != (event.version, event.mixed_kv):
            rows.append(event._replace(tokens=list(event.tokens), logprobs=list(event.logprobs)))
        else:
            row.tokens.extend(event.tokens)
            row.logprobs.extend(event.logprobs)
            rows[-1] = row._replace(finish=event.finish, error=event.error)
        if event.finish is not None:
            self._ended[event.id] = None

    def take(self, progress: bool = True) -> EventBatch:
        """All events; without ``progress`` only those of requests that ended."""
        if progress:
            taken, self._rows = self._rows, {}
        else:
            taken = {id: self._rows.pop(id) for id in self._ended}
        self._ended = {}
        rows = [row for of_request in taken.values() for row in of_request]
        lengths = [len(row.tokens) for row in rows]
        return EventBatch(
            ids=[row.id for row in rows],
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.array([t for row in rows for t in row.tokens], dtype=np.int32),
            logprobs=np.array([x for row in rows for x in row.logprobs], dtype=np.float32),
            versions=[row.version for row in rows],
            finish=[row.finish for row in rows],
            mixed_kv=[row.mixed_kv for row in rows],
            errors={row.id: row.error for row in rows if row.error},
            progress=progress,
        )
