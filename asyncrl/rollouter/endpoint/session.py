"""One sample's session at the endpoint: its key, its calls, and the answers to calls that are repeated."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.endpoint import link
from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call, ToolCall
from asyncrl.rollouter.endpoint.distribution import TrainedDistribution
from asyncrl.rollouter.endpoint.link import CallError, EndedSession, Event, FinishedCall, KnownCall, StartedCall
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer
from asyncrl.rollouter.endpoint.turns import CallPrompt, Turn, Turns
from asyncrl.rollouter.engines.base import Grammar
from asyncrl.types.samples import FinishReason

MAX_CALLS_AT_ONCE = 256  # of one sample
ID_LENGTH = 9  # of a tool call; the only one that Mistral's templates take

log = logging.getLogger(__name__)


class SessionEnded(RuntimeError):
    """A call after its sample ended: status 409."""


class TooManyCalls(RuntimeError):
    """More calls at once than a sample may have: status 429."""


class CallFailed(RuntimeError):
    """The policy could not answer: status 500."""


@dataclass(eq=False)
class PendingCall:
    """A call and, once it is answered, its turn. ``body``: digest of it. ``clients``: for each client that waits for
    the answer, or has waited, whether its connection is gone. ``earlier``: equal calls before, of which every client
    was gone when this one began."""

    number: int
    call: Call
    prompt: CallPrompt
    sampling: Mapping[str, Any] | None
    result: asyncio.Future[Completion | CallError]
    body: int
    earlier: list[PendingCall]
    turn: Turn | None = None
    clients: list[Callable[[], bool]] = field(default_factory=list)
    repeated: bool = False  # by a later call whose answer was delivered

    @property
    def abandoned(self) -> bool:
        """True if nobody has its answer, nor waits for it."""
        return not (self.turn is not None and self.turn.delivered) and all(gone() for gone in self.clients)


class AgentSession:
    """``key`` is the API key of its agent, ``start`` what the rollouter opened last. ``emit`` passes events to it.

    ``over`` is set when the sample must end before its agent does: by a limit, or because it cannot be served."""

    def __init__(
        self,
        start: link.Session,
        renderer: ChatRenderer,
        distribution: TrainedDistribution,
        emit: Callable[[Event], None],
        recorder: Recorder,
    ) -> None:
        self._renderer, self._emit, self._recorder = renderer, emit, recorder
        self._take(start)
        self._distribution = distribution
        self._numbers = 0
        self.over: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()
        self._begin()

    def _begin(self) -> None:
        self.key = f"sk-asyncrl-{secrets.token_urlsafe(24)}"
        self.turns = Turns(self._renderer)
        self._pending: dict[int, PendingCall] = {}  # without a turn
        self._by_body: dict[int, list[PendingCall]] = {}
        self._by_idempotency_key: dict[str, PendingCall] = {}
        self._equal_prompts: Counter[int] = Counter()  # calls by digest of their prompt
        self.ended: EndedSession | None = None
        self.refused_for_length = False
        self._refused: dict[Grammar, str] = {}  # why the engine cannot serve a grammar
        self._accepts = True

    # -- calls of the agent ----------------------------------------------------------------------------------------

    async def answer(
        self, call: Call, body: bytes, idempotency_key: str | None, retried: bool, gone: Callable[[], bool]
    ) -> PendingCall:
        """The answered call: the recorded one if ``call`` repeats it, else a new one. ``retried``: the client says that
        it may; ``gone()``: its connection is closed.

        Raises BadRequest, SessionEnded, TooManyCalls and CallFailed."""
        digest = xxhash.xxh3_64_intdigest(body)
        pending = self._repeated(digest, idempotency_key, retried)
        if pending is None:
            pending = self._start(call, digest)
            if idempotency_key is not None:
                self._by_idempotency_key[idempotency_key] = pending
        else:
            self._recorder.count("rollout/agent/repeated_calls")
        pending.clients.append(gone)
        try:
            result = await asyncio.shield(pending.result)
        except asyncio.CancelledError:
            if pending.result.cancelled():
                raise SessionEnded("the sample has ended") from None
            raise
        if isinstance(result, CallError):
            if result.kind == "context":
                self.refused_for_length = True
                raise BadRequest(result.message, "messages", "context_length_exceeded")
            if result.kind == "refused":
                raise BadRequest(result.message)
            raise (SessionEnded if result.kind == "limit" else CallFailed)(result.message)
        return pending

    def delivered(self, pending: PendingCall) -> None:
        """The client has got the answer: equal calls that it has given up before count no more."""
        assert pending.turn is not None
        pending.turn.delivered = True
        for earlier in pending.earlier:
            earlier.repeated = True
            if earlier.turn is not None:
                earlier.turn.repeated = True

    def _repeated(self, body: int, idempotency_key: str | None, retried: bool) -> PendingCall | None:
        """The earlier call that this one repeats: by its key; or, if ``retried``, by an equal body, the first
        whose answer nobody has or waits for, or the only one, whose answer may have been lost on its way."""
        if idempotency_key is not None:
            if (found := self._by_idempotency_key.get(idempotency_key)) is not None and found.body != body:
                raise BadRequest("Idempotency-Key: expected the body of the call that used it first", "Idempotency-Key")
            return found
        equal = self._by_body.get(body, []) if retried else []
        return next((p for p in equal if p.abandoned), equal[0] if len(equal) == 1 else None)

    def _start(self, call: Call, body: int) -> PendingCall:
        if not self._accepts:
            raise SessionEnded("the sample has ended")
        if len(self._pending) >= MAX_CALLS_AT_ONCE:
            raise TooManyCalls(f"{MAX_CALLS_AT_ONCE} calls of this sample are under way; expected to wait for some")
        began_s = time.thread_time()
        sampling = self._distribution.replaced_by(call.sampling, self._renderer.in_vocabulary)
        grammar: Grammar | None = (sampling or {}).get("grammar")
        if grammar is not None and grammar in self._refused:
            raise BadRequest(self._refused[grammar])  # else a sample that goes on asking would never be idle
        try:
            for text in (call.text or "", *call.stop, "" if grammar is None else grammar.text):
                text.encode()  # tokenizers and engines refuse them in ways of their own
            call = self.turns.with_tools(call)
            prompt = self.turns.prompt_of(call, plain=grammar is not None)
        except KeyError:
            name = "thread.previous_message_id" if call.keeps_tools else "previous_response_id"
            raise BadRequest(f"{name}: this sample has no answer {call.previous!r}", name) from None
        except UnicodeEncodeError:
            raise BadRequest("body: expected texts of valid Unicode, found half of a surrogate pair") from None
        self._recorder.count("rollout/agent/render_s", time.thread_time() - began_s)
        self._recorder.count(f"rollout/agent/{prompt.how}")
        if prompt.reason:
            self._recorder.count(f"rollout/agent/branched/{prompt.reason}")
        self._numbers += 1
        result: asyncio.Future[Completion | CallError] = asyncio.get_running_loop().create_future()
        equal = self._by_body.setdefault(body, [])
        earlier = [p for p in equal if p.abandoned]
        pending = PendingCall(self._numbers, call, prompt, sampling, result, body, earlier)
        self._pending[pending.number] = pending
        equal.append(pending)
        self._emit(self._started(pending))
        return pending

    # -- results from the rollouter --------------------------------------------------------------------------------

    def finish(self, finished: FinishedCall) -> None:
        """A result; of calls that this session does not have it is ignored."""
        if (pending := self._pending.pop(finished.number, None)) is None:
            return
        result = finished.result
        if isinstance(result, CallError) and result.kind == "refused" and pending.sampling is not None:
            self._refused[pending.sampling["grammar"]] = result.message
        if isinstance(result, Completion):
            try:
                self._add(pending, result)
            except Exception as e:  # of what a policy or an agent wrote: it costs the sample, no more
                log.exception("endpoint: an answer cannot be parsed")
                result = CallError("failed", f"the answer cannot be parsed ({type(e).__name__}: {e})")
        if isinstance(result, CallError) and result.kind not in ("context", "refused") and not self.over.done():
            self.over.set_result(result)
        pending.result.set_result(result)

    def _add(self, pending: PendingCall, completion: Completion) -> None:
        began_s = time.thread_time()
        answer, trained = self._answer(pending, completion), pending.sampling is None
        turn = Turn(
            pending.number, pending.call, pending.prompt, completion, answer, trained, repeated=pending.repeated
        )
        self.turns.add(turn)
        pending.turn, pending.call = turn, turn.call
        self._recorder.count("rollout/agent/render_s", time.thread_time() - began_s)

    def _answer(self, pending: PendingCall, completion: Completion) -> Answer:
        call, renderer = pending.call, self._renderer
        text = renderer.text_of(completion.tokens)
        finish, stop_string = "stop", None
        if completion.finish is not FinishReason.STOP:
            finish = "length"
        else:
            places = [(text.find(stop), stop) for stop in call.stop if stop in text]
            if places:
                at, stop_string = min(places)
                text = text[:at]
        text = pending.prompt.begun + text
        content, reasoning, calls = text, None, []
        identity = self._identity(pending)
        if call.messages is not None:
            tools = call.tools if call.tools_allowed else ()
            written = renderer.parse(text, pending.prompt.opens_reasoning, tools)
            content, reasoning = written.content, written.reasoning
            calls = [
                ToolCall(c.id or xxhash.xxh3_64_hexdigest(f"{identity}/{i}".encode())[:ID_LENGTH], c.name, c.arguments)
                for i, c in enumerate(written.tool_calls)
            ]
        return Answer(
            id=identity,
            model=call.model,
            created_s=int(time.time()),
            text=text,
            content=content if content or not calls else None,
            reasoning=reasoning,
            tool_calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            stop_string=stop_string,
            prompt=pending.prompt.tokens,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            token_texts=renderer.token_texts(completion.tokens) if call.wants_logprobs else (),
        )

    def _identity(self, pending: PendingCall) -> str:
        """Unique in the run; the same for an agent that begins again and repeats its calls."""
        prompt = pending.prompt.tokens.digest
        self._equal_prompts[prompt] += 1
        name = f"{self.start.id}/{prompt}/{self._equal_prompts[prompt]}"
        return xxhash.xxh3_128_hexdigest(name.encode())

    # -- life ------------------------------------------------------------------------------------------------------

    def reopen(self, start: link.Session) -> None:
        """Tell a new rollouter all that it must know. The sample's time counts again."""
        self._take(start)
        # as they began, so that each of several equal ones gets its own record
        calls: list[PendingCall | Turn] = [*self.turns.all, *self._pending.values()]
        for call in sorted(calls, key=lambda call: call.number):
            started = self._started(call)
            self._emit(KnownCall(started, call.completion) if isinstance(call, Turn) else started)
        if self.ended is not None:
            self.ended = replace(self.ended, session=start.address)
            self._emit(self.ended)

    @property
    def seconds_left(self) -> float | None:
        """Of the sample's time, whatever its agent's attempts; None: no limit."""
        return None if self._ends_s is None else max(0.0, self._ends_s - now_s())

    def _take(self, start: link.Session) -> None:
        self.start = start
        self._ends_s = None if start.seconds is None else now_s() + start.seconds

    def _started(self, of: PendingCall | Turn) -> StartedCall:
        parent, call = of.prompt.parent, of.call
        return StartedCall(
            session=self.start.address,
            number=of.number,
            after=None if parent is None else parent.number,
            tokens=of.prompt.tokens.own,
            max_tokens=call.max_tokens,
            stop=call.stop,
            sampling=self._distribution.replaced_by(call.sampling, self._renderer.in_vocabulary),
        )

    def restart(self) -> None:
        """The agent begins again, with another key."""
        self.close()
        self._begin()
        self._emit(link.RestartedSession(self.start.address))

    async def settle(self) -> None:
        """Accept no further calls, and wait for those under way: a sample with a call that has no result is never
        trained."""
        self._accepts = False
        while self._pending:
            await asyncio.wait([pending.result for pending in self._pending.values()])

    def end(self, reward: float | None, metrics: Mapping[str, float], finish: FinishReason | None) -> None:
        """The agent has ended well, or by a limit of its sample."""
        turns = self.turns
        for reason, left_out in (
            ("never_delivered", turns.phantoms()),
            ("other_distribution", [turn for turn in turns.all if not turn.trained]),
        ):
            if count := sum(len(turn.answer.tokens) for turn in left_out):
                self._recorder.count(f"rollout/agent/untrained_tokens/{reason}", count)
        last = turns.last(delivered=finish is None)
        messages = [] if last is None else last.conversation()
        self._ended(EndedSession(self.start.address, turns.sequences(last), reward, metrics, messages, finish))

    def fail(self, reason: str, message: str) -> None:
        self._ended(EndedSession(self.start.address, failure=(reason, message)))

    def _ended(self, ended: EndedSession) -> None:
        self.ended = ended
        self.close()
        self._emit(ended)

    def close(self) -> None:
        """No call is accepted any more; those under way end with SessionEnded."""
        self._accepts = False
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.result.cancel()
