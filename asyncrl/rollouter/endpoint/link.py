"""What rollouter and endpoint exchange, in batches, and the rollouter's end of it.

::

    rollouter                               endpoint
      open(sessions)            ────────►   an agent starts, or goes on after the rollouter's death
      events()                  ◄────────   KnownCall…, StartedCall…, RestartedSession, EndedSession
      answer(finished calls)    ────────►   the agent's connection gets its answer
      end(ids)                  ────────►   the session is forgotten, its agent cancelled
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.batching_sender import BatchingSender
from asyncrl.rollouter.endpoint.turns import SequencePlan
from asyncrl.types.prompts import Message, Prompt


@dataclass(frozen=True)
class Session:
    """One sample's use of the endpoint. ``id`` is that of the sample's attempt, also in a later rollouter. ``seconds``:
    limit of the sample's time; None: none."""

    id: str
    prompt: Prompt
    index: int
    seconds: float | None


class StartedCall(NamedTuple):
    """The policy shall continue ``tokens`` (int32 [P]). ``sampling`` is None, or the parameters of a distribution from
    which nothing may be trained."""

    session: str
    number: int
    tokens: np.ndarray
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Mapping[str, float] | None


class KnownCall(NamedTuple):
    """A call that an earlier rollouter answered."""

    call: StartedCall
    completion: Completion

    @property
    def session(self) -> str:
        return self.call.session


class RestartedSession(NamedTuple):
    """The agent starts again from its beginning; its calls until now do not count."""

    session: str


@dataclass(frozen=True)
class EndedSession:
    """The agent has ended: well, with the plan of the sample's sequences, or with ``failure``, a reason and a
    message. ``messages``: the conversation that ended last, with its answer."""

    session: str
    plan: Sequence[SequencePlan] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    failure: tuple[str, str] | None = None


Event = StartedCall | KnownCall | RestartedSession | EndedSession


class CallError(NamedTuple):
    """Why a call has no completion. ``kind``: ``context``, the prompt does not fit; ``limit``, a limit of the sample
    ends it; ``failed``, the engine cannot serve it."""

    kind: str
    message: str


class FinishedCall(NamedTuple):
    session: str
    number: int
    result: Completion | CallError


class EndpointClient(Protocol):
    """The rollouter's view of the endpoint; the fencing token is its own."""

    async def attach(self, token: int) -> None:
        """The first call. Sessions of earlier rollouters wait until they are opened again."""

    async def open(self, token: int, sessions: Sequence[Session]) -> None: ...
    async def events(self, token: int) -> Sequence[Event]: ...
    async def answer(self, token: int, finished: Sequence[FinishedCall]) -> None: ...
    async def end(self, token: int, ids: Sequence[str]) -> None: ...


class EndpointDied(RuntimeError):
    """The endpoint's process died, and with it the agent: the sample begins again."""


_Sent = Session | FinishedCall | str  # the last: the id of a session that ends


class EndpointLink:
    """The rollouter's end. ``run()`` is a task that lives as long as sessions are served. ``client`` None: not there
    yet, see `replace`."""

    def __init__(self, client: EndpointClient | None, token: int, death: type[Exception]) -> None:
        self._client, self._token, self._death = client, token, death
        self._sessions: dict[str, asyncio.Queue[Event | EndpointDied]] = {}
        self._sender: BatchingSender[_Sent] = BatchingSender(self._send)
        self._replaced = asyncio.Event()

    async def run(self) -> None:
        """Raises the errors of the endpoint other than its death."""
        while True:
            if self._client is None:
                await self._replaced.wait()
            self._replaced.clear()
            client, sender = self._client, self._sender
            assert client is not None
            try:
                async with asyncio.TaskGroup() as tasks:
                    await client.attach(self._token)
                    tasks.create_task(sender.run())
                    tasks.create_task(self._receive(client))
            except* self._death:
                self._sender = BatchingSender(self._send)
                sessions, self._sessions = self._sessions, {}
                for events in sessions.values():
                    events.put_nowait(EndpointDied("the endpoint's process died"))
                if self._client is client:
                    self._client = None

    def replace(self, client: EndpointClient) -> None:
        """Use a new endpoint, once the old one has died."""
        self._client = client
        self._replaced.set()

    def open(self, session: Session) -> asyncio.Queue[Event | EndpointDied]:
        """Its events, in order."""
        events = self._sessions[session.id] = asyncio.Queue()
        self._sender.add(session)
        return events

    def answer(self, finished: FinishedCall) -> None:
        self._sender.add(finished)

    def end(self, session: Session) -> None:
        if self._sessions.pop(session.id, None) is not None:
            self._sender.add(session.id)

    async def _send(self, items: Sequence[_Sent]) -> None:
        assert self._client is not None
        if opened := [item for item in items if isinstance(item, Session)]:
            await self._client.open(self._token, opened)
        if finished := [item for item in items if isinstance(item, FinishedCall)]:
            await self._client.answer(self._token, finished)
        if ended := [item for item in items if isinstance(item, str)]:
            await self._client.end(self._token, ended)

    async def _receive(self, client: EndpointClient) -> None:
        while True:
            for event in await client.events(self._token):
                if events := self._sessions.get(event.session):
                    events.put_nowait(event)
