"""The endpoint: agents on one side, the rollouter on the other, whose death it survives, holding the agents' calls."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

from asyncrl.config.schema import AgentConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.agent_processes.pool import AgentError, AgentFailed, AgentOutcome, AgentTask
from asyncrl.rollouter.endpoint import link
from asyncrl.rollouter.endpoint.distribution import TrainedDistribution
from asyncrl.rollouter.endpoint.link import Command, Event, FinishedCall
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer
from asyncrl.rollouter.endpoint.session import AgentSession, SessionEnded
from asyncrl.types.samples import FinishReason

ENDED_KEYS = 100_000  # of ended samples, whose calls get 409 instead of 401
EVENTS_S = 5.0  # that `events` waits for one
MAX_TRACEBACKS = 20  # logged
REPLY_BYTES = 16 * 1024 * 1024  # of the tokens in a reply of `events`, but for the last event

log = logging.getLogger(__name__)


class UnknownKey(RuntimeError):
    """A call without a key, or with one that no sample has: status 401."""


class LeaseLost(RuntimeError):
    """A call of a rollouter after its successor attached."""


class Agents(Protocol):
    """See `asyncrl.rollouter.agent_processes.pool.AgentProcesses`."""

    async def run(self, task: AgentTask) -> AgentOutcome: ...


class Endpoint:
    """``address()``: of the HTTP server, such as http://127.0.0.1:4567, once it listens."""

    def __init__(
        self,
        config: AgentConfig,
        renderer: ChatRenderer,
        distribution: TrainedDistribution,
        agents: Agents,
        model: str,
        orphan_s: float,
        recorder: Recorder,
    ) -> None:
        self._config, self._renderer, self._distribution = config, renderer, distribution
        self._agents, self._model, self._orphan_s, self._recorder = agents, model, orphan_s, recorder
        self.address = ""
        self._token, self._attached = -1, 0  # how often a rollouter has attached
        self._sessions: dict[str, AgentSession] = {}
        self._by_key: dict[str, AgentSession] = {}
        self._ended_keys: OrderedDict[str, None] = OrderedDict()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._orphans: dict[str, asyncio.TimerHandle] = {}  # sessions that no rollouter has opened since its successor
        self._events: list[Event] = []
        self._filled = asyncio.Event()
        self._logged: set[tuple[str, tuple[str, ...]]] = set()  # tracebacks: reason and lines
        self._problem: Exception | None = None  # for which no agent can run

    def refused(self) -> None:
        """Count a call that is refused with status 400."""
        self._recorder.count("rollout/agent/refused")

    def session(self, key: str | None) -> AgentSession:
        """The session of an API key. Raises UnknownKey and SessionEnded."""
        if (session := self._by_key.get(key or "")) is not None:
            return session
        if key in self._ended_keys:
            raise SessionEnded("the sample of this API key has ended")
        raise UnknownKey("expected the API key of a sample that is under way")

    # -- calls of the rollouter ------------------------------------------------------------------------------------

    async def attach(self, token: int) -> None:
        if token < self._token:
            raise LeaseLost("a newer rollouter uses this endpoint")
        self._token = token
        self._attached += 1
        self._events.clear()
        if self._problem is None:
            self._filled.clear()
        loop = asyncio.get_running_loop()
        for session_id in self._sessions:
            if (earlier := self._orphans.get(session_id)) is not None:
                earlier.cancel()
            self._orphans[session_id] = loop.call_later(self._orphan_s, self._forget, session_id)

    async def send(self, token: int, commands: Sequence[Command]) -> None:
        self._check(token)
        for command in commands:  # in order: a sample's agent may end and begin again
            if isinstance(command, link.Session):
                self._open(command)
            elif (session := self._at(command.session)) is not None:
                if isinstance(command, FinishedCall):
                    session.finish(command)
                else:
                    self._forget(session.start.id)

    async def events(self, token: int) -> Sequence[Event]:
        """At least one, unless none comes for `EVENTS_S`. Raises the error for which agents cannot run at all."""
        self._check(token)
        attached = self._attached
        try:
            async with asyncio.timeout(EVENTS_S):
                await self._filled.wait()
        except TimeoutError:
            return []
        self._check(token)
        if attached != self._attached:  # the rollouter attached again meanwhile: it has given this call up
            return []
        if self._problem is not None:
            raise self._problem
        count, size = 0, 0
        while count < len(self._events) and size < REPLY_BYTES:
            size += self._events[count].nbytes
            count += 1
        events, self._events = self._events[:count], self._events[count:]
        if not self._events:
            self._filled.clear()
        return events

    async def close(self) -> None:
        for session_id in list(self._sessions):
            self._forget(session_id)

    # -- one session -----------------------------------------------------------------------------------------------

    def _open(self, start: link.Session) -> None:
        if (orphan := self._orphans.pop(start.id, None)) is not None:
            orphan.cancel()
            self._recorder.count("rollout/agent/continued")
            self._sessions[start.id].reopen(start)
            return
        self._forget(start.id)
        session = AgentSession(start, self._renderer, self._distribution, self._emit, self._recorder)
        self._sessions[start.id] = session
        self._running[start.id] = asyncio.create_task(self._run(session))

    async def _run(self, session: AgentSession) -> None:
        try:
            await self._attempts(session)
        except AgentError as e:
            self._problem = e
            self._filled.set()
        except Exception as e:  # costs the sample, no more
            log.exception("endpoint: a sample failed")
            self._drop_key(session.key)
            session.fail("endpoint_error", f"{type(e).__name__}: {e}")

    async def _attempts(self, session: AgentSession) -> None:
        """Run the agent to its end, again after a failure that is not its own fault."""
        for retries_left in range(self._config.retries, -1, -1):
            key = session.key
            self._by_key[key] = session
            try:
                outcome, finish = await self._agent(session)
            except AgentFailed as e:
                self._drop_key(key)
                self._log_traceback(e)
                if e.retry and retries_left:
                    self._recorder.count("rollout/agent/restarted")
                    session.restart()
                    continue
                session.fail(e.reason, str(e))
                return
            self._drop_key(key)
            session.end(outcome.reward, outcome.metrics, finish)
            return

    def _log_traceback(self, failed: AgentFailed) -> None:
        """Of the first failure at each place: others of it are counted."""
        if failed.traceback and len(self._logged) < MAX_TRACEBACKS:
            place = failed.reason, tuple(line for line in failed.traceback.splitlines() if line.startswith("  File "))
            if place not in self._logged:
                self._logged.add(place)
                log.warning("agent: %s: %s\n%s", failed.reason, failed, failed.traceback.strip())

    async def _agent(self, session: AgentSession) -> tuple[AgentOutcome, FinishReason | None]:
        """What an agent returned when it ended, and the limit of its sample if one ended it; no call is under way any
        more. Raises AgentFailed."""
        running = asyncio.ensure_future(self._agents.run(self._task(session)))
        outcome, finish = AgentOutcome(), None
        try:
            ends: list[asyncio.Future[Any]] = [running, session.over]
            done: set[asyncio.Future[Any]] = set()
            while not done and (left_s := session.seconds_left) != 0:
                done, _ = await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if session.over.done():
                why = session.over.result()
                if why.kind == "failed":
                    raise AgentFailed("endpoint_error", why.message, retry=False)
                finish = why.finish
            elif not done:
                finish = FinishReason.TIME
            else:
                try:
                    outcome = running.result()
                except AgentFailed as e:
                    # its own end, of which a command's exit status says no more
                    own = not e.retry or (bool(self._config.command) and e.reason == "agent_exited")
                    if not (own and session.refused_for_length and session.turns.all):
                        raise
                    finish = FinishReason.LENGTH
            await cancelled([running])
            await session.settle()
        finally:
            await cancelled([running])
        if not session.turns.all:
            limit = f"; {session.over.result().message}" if session.over.done() else ""
            raise AgentFailed("no_calls", f"the agent ended without any answer of the policy{limit}", retry=False)
        return outcome, finish

    def _task(self, session: AgentSession) -> AgentTask:
        start, prompt = session.start, session.start.prompt
        return AgentTask(
            uid=prompt.uid,
            index=start.index,
            messages=[dict(message) for message in prompt.messages],
            text=prompt.text,
            answer=prompt.answer,
            data=dict(prompt.extra),
            model=self._model,
            base_url=f"{self.address}/v1",
            anthropic_base_url=self.address,
            api_key=session.key,
            seconds=session.seconds_left,
        )

    def _drop_key(self, key: str) -> None:
        self._by_key.pop(key, None)
        self._ended_keys[key] = None
        while len(self._ended_keys) > ENDED_KEYS:
            self._ended_keys.popitem(last=False)

    def _forget(self, session_id: str) -> None:
        if (orphan := self._orphans.pop(session_id, None)) is not None:
            orphan.cancel()
        if (session := self._sessions.pop(session_id, None)) is not None:
            if session.ended is None:
                self._recorder.count("rollout/agent/cancelled")
            self._running.pop(session_id).cancel()
            self._drop_key(session.key)
            session.close()

    def _emit(self, event: Event) -> None:
        """For the rollouter that has opened the session; `AgentSession.reopen` has all for the next one."""
        if event.session.rpartition(".")[0] not in self._orphans:
            self._events.append(event)
            self._filled.set()

    def _at(self, address: str) -> AgentSession | None:
        """The session, if its rollouter has not opened it again since."""
        session = self._sessions.get(address.rpartition(".")[0])
        return session if session is not None and session.start.address == address else None

    def _check(self, token: int) -> None:
        if token != self._token:
            raise LeaseLost("a newer rollouter uses this endpoint")
