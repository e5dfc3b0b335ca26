"""What rollouter and endpoint exchange, in batches, and the rollouter's end of it.

::

    rollouter                    endpoint
      Session          ─send─►   an agent starts, or goes on after the rollouter's death
                     ◄─events─   KnownCall…, StartedCall…, RestartedSession, EndedSession
      FinishedCall     ─send─►   the agent's connection gets its answer
      ForgottenSession ─send─►   the session is forgotten, its agent cancelled
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.batching_sender import BatchingSender
from asyncrl.rollouter.endpoint.turns import SequencePlan
from asyncrl.types.prompts import Message, Prompt
from asyncrl.types.samples import FinishReason

FORGET_S = 0.2  # that sessions wait to be forgotten, for other commands with which to go
REATTACH_S = 1.0  # after data was lost


@dataclass(frozen=True)
class Session:
    """One sample's use of the endpoint. ``id`` is that of the sample's attempt, also in a later rollouter; ``opening``
    counts the sessions that a rollouter opens. ``seconds``: limit of the sample's time; None: none."""

    id: str
    opening: str
    prompt: Prompt
    index: int
    seconds: float | None

    @property
    def address(self) -> str:
        """Names this opening in events and calls, so that none of an earlier one is taken for it."""
        return f"{self.id}.{self.opening}"


class StartedCall(NamedTuple):
    """The policy shall continue the prompt and the answer of the call ``after`` (None: nothing), then ``tokens`` (int32
    [T]). ``session``: its address. ``sampling`` is None, or those of `SamplingParams` that it replaces, for an
    answer that is never trained."""

    session: str
    number: int
    after: int | None
    tokens: np.ndarray
    max_tokens: int | None
    stop: tuple[str, ...]
    sampling: Mapping[str, Any] | None

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


class KnownCall(NamedTuple):
    """A call that an earlier rollouter answered."""

    call: StartedCall
    completion: Completion

    @property
    def session(self) -> str:
        return self.call.session

    @property
    def nbytes(self) -> int:
        return self.call.nbytes + self.completion.tokens.nbytes + self.completion.logprobs.nbytes


class RestartedSession(NamedTuple):
    """The agent starts again from its beginning; its calls until now do not count."""

    session: str

    @property
    def nbytes(self) -> int:
        return 0


@dataclass(frozen=True)
class EndedSession:
    """The agent has ended: well, with the plan of the sample's sequences, or with ``failure``, a reason and a
    message. ``messages``: the conversation with the last answer. ``finish``: if a limit of the sample ended it."""

    session: str
    plan: Sequence[SequencePlan] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: Sequence[Message] = ()
    finish: FinishReason | None = None
    failure: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        tokens = sum(part.nbytes for plan in self.plan for part in plan if isinstance(part, np.ndarray))
        return tokens + sum(len(message.get("content") or "") for message in self.messages)


Event = StartedCall | KnownCall | RestartedSession | EndedSession


class CallError(NamedTuple):
    """Why a call has no answer. ``kind``: ``context``, the prompt does not fit; ``refused``, the engine cannot serve
    its grammar; ``limit``, a limit of the sample ends it, with this ``finish``; ``failed``, the sample cannot be
    served."""

    kind: str
    message: str
    finish: FinishReason | None = None


class FinishedCall(NamedTuple):
    session: str
    number: int
    result: Completion | CallError


class ForgottenSession(NamedTuple):
    session: str


Command = Session | FinishedCall | ForgottenSession


class EndpointClient(Protocol):
    """The rollouter's view of the endpoint; the fencing token is its own."""

    async def attach(self, token: int) -> None:
        """The first call. Sessions of earlier rollouters wait until they are opened again."""

    async def send(self, token: int, commands: Sequence[Command]) -> None: ...
    async def events(self, token: int) -> Sequence[Event]: ...


class EndpointDied(RuntimeError):
    """The endpoint's process died, and with it the agent, which begins again; or events are lost, and it goes on."""


class EndpointLink:
    """The rollouter's end. ``run()`` is a task that lives as long as sessions are served. ``client`` None: not there
    yet, see `replace`. It raises ``death`` when the endpoint's process dies, and ``lost`` when data of a call is lost
    on the way."""

    def __init__(
        self,
        client: EndpointClient | None,
        token: int,
        death: type[Exception],
        lost: type[Exception] | tuple[()] = (),
    ) -> None:
        self._client, self._token, self._death, self._lost = client, token, death, lost
        self._sessions: dict[str, asyncio.Queue[Event | EndpointDied]] = {}  # by address
        self._openings = itertools.count()
        self._attached = client  # not yet the one of `replace` while the death of the one before is unknown
        self._urgent = asyncio.Event()  # something waits to be sent that is not only to be forgotten
        self._sender = self._new_sender()
        self._replaced = asyncio.Event()

    async def run(self) -> None:
        """Raises the errors of the endpoint other than its death and lost data."""
        while True:
            if self._client is None:
                await self._replaced.wait()
            self._replaced.clear()
            client, sender = self._client, self._sender
            assert client is not None
            self._attached = client
            try:
                async with asyncio.TaskGroup() as tasks:
                    await client.attach(self._token)
                    tasks.create_task(sender.run())
                    tasks.create_task(self._receive(client))
            except* self._death:
                self._end_sessions()
                if self._client is client:
                    self._client = None
            except* self._lost:  # the endpoint sends them again to those that are opened again
                self._end_sessions()
                await asyncio.sleep(REATTACH_S)

    def replace(self, client: EndpointClient) -> None:
        """Use a new endpoint, once the old one has died."""
        self._client = client
        self._replaced.set()

    def open(
        self, id: str, prompt: Prompt, index: int, seconds: float | None
    ) -> tuple[Session, asyncio.Queue[Event | EndpointDied]]:
        """A session, and its events in order."""
        session = Session(id, f"{self._token}-{next(self._openings)}", prompt, index, seconds)
        events = self._sessions[session.address] = asyncio.Queue()
        self._add(session)
        return session, events

    def answer(self, finished: FinishedCall) -> None:
        self._add(finished)

    def end(self, session: Session) -> None:
        if self._sessions.pop(session.address, None) is not None:
            self._sender.add(ForgottenSession(session.address))

    def _add(self, command: Command) -> None:
        self._sender.add(command)
        self._urgent.set()

    def _new_sender(self) -> BatchingSender[Command]:
        return BatchingSender(self._send, FORGET_S, self._urgent)

    def _end_sessions(self) -> None:
        self._sender = self._new_sender()
        sessions, self._sessions = self._sessions, {}
        for events in sessions.values():
            events.put_nowait(EndpointDied("the endpoint's process died, or its events are lost"))

    async def _send(self, commands: Sequence[Command]) -> None:
        assert self._attached is not None
        self._urgent.clear()
        await self._attached.send(self._token, commands)

    async def _receive(self, client: EndpointClient) -> None:
        while True:
            for event in await client.events(self._token):
                if events := self._sessions.get(event.session):
                    events.put_nowait(event)
