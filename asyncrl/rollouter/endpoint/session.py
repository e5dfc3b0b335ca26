"""One sample's session at the endpoint: its key, its calls, and the answers to calls that are repeated."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import xxhash

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.endpoint import link
from asyncrl.rollouter.endpoint.calls import Answer, BadRequest, Call, ToolCall
from asyncrl.rollouter.endpoint.link import CallError, EndedSession, Event, FinishedCall, KnownCall, StartedCall
from asyncrl.rollouter.endpoint.renderer import ChatRenderer
from asyncrl.rollouter.endpoint.turns import CallPrompt, Turn, Turns, as_message
from asyncrl.types.samples import FinishReason

MAX_CALLS_AT_ONCE = 256  # of one sample

#: parameters that change nothing at this value
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "ignore_eos": (False,),
}
SERVED = frozenset({"temperature", "top_p", "top_k", "min_p"})  # untrained, by every engine


class SessionEnded(RuntimeError):
    """A call after its sample ended: status 409."""


class TooManyCalls(RuntimeError):
    """More calls at once than a sample may have: status 429."""


class CallFailed(RuntimeError):
    """The policy could not answer: status 500."""


@dataclass(eq=False)
class PendingCall:
    """A call and, once it is answered, its turn. ``repeats`` counts clients that wait for it."""

    number: int
    call: Call
    prompt: CallPrompt
    sampling: Mapping[str, float] | None
    result: asyncio.Future[Completion | CallError]
    body: int  # digest
    turn: Turn | None = None
    clients: int = 0

    def started(self, session: str) -> StartedCall:
        return StartedCall(
            session, self.number, self.prompt.tokens, self.call.max_tokens, self.call.stop, self.sampling
        )


class AgentSession:
    """``key`` is the API key of its agent. ``emit`` passes events to the rollouter."""

    def __init__(
        self,
        start: link.Session,
        renderer: ChatRenderer,
        temperature: float,
        mask: bool,
        emit: Callable[[Event], None],
        recorder: Recorder,
    ) -> None:
        self.start, self._renderer, self._emit, self._recorder = start, renderer, emit, recorder
        self._temperature, self._mask = temperature, mask
        self._numbers = 0
        self.limit: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()  # that ended the sample
        self._begin()

    def _begin(self) -> None:
        self.key = f"sk-asyncrl-{secrets.token_urlsafe(24)}"
        self.turns = Turns(self._renderer)
        self._pending: dict[int, PendingCall] = {}  # without a turn
        self._by_body: dict[int, list[PendingCall]] = {}
        self._by_idempotency_key: dict[str, PendingCall] = {}
        self.ended: EndedSession | None = None
        self.refused_for_length = False
        self._closed = False

    # -- calls of the agent ----------------------------------------------------------------------------------------

    async def answer(self, call: Call, body: bytes, idempotency_key: str | None, retries: int) -> Turn:
        """The turn that answers a call: the recorded one if it repeats another call, else a new one.

        Raises BadRequest, SessionEnded, TooManyCalls and CallFailed."""
        digest = xxhash.xxh3_64_intdigest(body)
        pending = self._repeated(digest, idempotency_key, retries)
        if pending is None:
            pending = self._start(call, digest)
            if idempotency_key is not None:
                self._by_idempotency_key[idempotency_key] = pending
        else:
            self._recorder.count("rollout/agent/repeated_calls")
        pending.clients += 1
        try:
            result = await asyncio.shield(pending.result)
        except asyncio.CancelledError:
            if pending.result.cancelled():
                raise SessionEnded("the sample has ended") from None
            raise
        finally:
            pending.clients -= 1
        if isinstance(result, CallError):
            if result.kind == "context":
                self.refused_for_length = True
                raise BadRequest(result.message, "messages")
            raise (SessionEnded if result.kind == "limit" else CallFailed)(result.message)
        assert pending.turn is not None
        return pending.turn

    def _repeated(self, body: int, idempotency_key: str | None, retries: int) -> PendingCall | None:
        """The earlier call that this one repeats: by its key, or by a count of retries and an equal body, then the
        first whose answer nobody has or waits for."""
        if idempotency_key is not None:
            if (found := self._by_idempotency_key.get(idempotency_key)) is not None and found.body != body:
                raise BadRequest("Idempotency-Key: expected the body of the call that used it first", "Idempotency-Key")
            return found
        if not retries or not (equal := self._by_body.get(body)):
            return None
        lost = (p for p in equal if not p.clients and not (p.turn is not None and p.turn.delivered))
        return next(lost, equal[-1])

    def _start(self, call: Call, body: int) -> PendingCall:
        if self._closed:
            raise SessionEnded("the sample has ended")
        if len(self._pending) >= MAX_CALLS_AT_ONCE:
            raise TooManyCalls(f"{MAX_CALLS_AT_ONCE} calls of this sample are under way; expected to wait for some")
        began_s = time.thread_time()
        try:
            sampling = self._sampling(call.sampling)
            prompt = self.turns.prompt_of(call)
        except BadRequest:
            self._recorder.count("rollout/agent/refused")
            raise
        except KeyError:
            self._recorder.count("rollout/agent/refused")
            raise BadRequest(
                f"previous_response_id: this sample has no answer {call.previous!r}", "previous_response_id"
            ) from None
        self._recorder.count("rollout/agent/render_s", time.thread_time() - began_s)
        self._recorder.count(f"rollout/agent/{prompt.how}")
        if prompt.reason:
            self._recorder.count(f"rollout/agent/branched/{prompt.reason}")
        self._numbers += 1
        result: asyncio.Future[Completion | CallError] = asyncio.get_running_loop().create_future()
        pending = PendingCall(self._numbers, call, prompt, sampling, result, body)
        self._pending[pending.number] = pending
        self._by_body.setdefault(body, []).append(pending)
        self._emit(pending.started(self.start.id))
        return pending

    def _sampling(self, asked: Mapping[str, object]) -> Mapping[str, float] | None:
        """None if the call samples as the run does; else the parameters of an untrained call. Raises BadRequest."""
        neutral = {**_NEUTRAL, "temperature": (self._temperature,)}
        changes = {name: value for name, value in asked.items() if value not in neutral.get(name, ())}
        if not changes:
            return None
        if not self._mask or not changes.keys() <= SERVED:
            name, value = min(changes.items(), key=lambda item: (item[0] in SERVED, item[0]))
            expected = f"{neutral[name][0]!r}" if name in neutral else "none"
            served = "" if name not in SERVED else "; rollout.agent.untrained=mask serves it without training"
            raise BadRequest(
                f"{name}: expected {expected}, the distribution that is trained, found {value!r}{served}", name
            )
        return {name: float(value) for name, value in changes.items()}  # type: ignore[arg-type]

    # -- results from the rollouter --------------------------------------------------------------------------------

    def finish(self, finished: FinishedCall) -> None:
        """A result; of calls that this session does not have it is ignored."""
        if (pending := self._pending.pop(finished.number, None)) is None:
            return
        result = finished.result
        if isinstance(result, CallError):
            if result.kind == "limit" and not self.limit.done():
                self.limit.set_result(result)
        else:
            began_s = time.thread_time()
            answer = self._answer(pending, result)
            self._recorder.count("rollout/agent/render_s", time.thread_time() - began_s)
            trained = pending.sampling is None
            pending.turn = Turn(pending.number, pending.call, pending.prompt, result, answer, trained)
            self.turns.add(pending.turn)
        pending.result.set_result(result)

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
        number = xxhash.xxh3_128_hexdigest(f"{self.start.id}/{pending.number}".encode())
        content, reasoning, calls = text, None, []
        if call.messages is not None:
            rendered = pending.prompt.rendered
            opened = rendered is not None and rendered.opens_reasoning
            written = renderer.parse(text, opened, call.tools if call.tools_allowed else ())
            content, reasoning = written.content, written.reasoning
            calls = [ToolCall(f"call{number[:12]}{i}", c.name, c.arguments) for i, c in enumerate(written.tool_calls)]
        return Answer(
            id=number,
            model=call.model,
            created_s=int(time.time()),
            text=text,
            content=content if content or not calls else None,
            reasoning=reasoning,
            tool_calls=calls,
            finish="tool_calls" if calls and finish == "stop" else finish,
            stop_string=stop_string,
            prompt_tokens=pending.prompt.tokens,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            token_texts=renderer.token_texts(completion.tokens) if call.wants_logprobs else (),
        )

    # -- life ------------------------------------------------------------------------------------------------------

    def emit_all(self) -> None:
        """All that a new rollouter must know of the session."""
        for turn in self.turns.all:
            sampling = None if turn.trained else self._sampling(turn.call.sampling)
            started = StartedCall(
                self.start.id, turn.number, turn.prompt.tokens, turn.call.max_tokens, turn.call.stop, sampling
            )
            self._emit(KnownCall(started, turn.completion))
        for pending in self._pending.values():
            self._emit(pending.started(self.start.id))
        if self.ended is not None:
            self._emit(self.ended)

    def restart(self) -> None:
        """The agent begins again, with another key."""
        self.close()
        self._begin()
        self._emit(link.RestartedSession(self.start.id))

    async def settled(self) -> None:
        """Wait for calls under way: a sample with a call that has no result is never trained."""
        while self._pending:
            await asyncio.wait([pending.result for pending in self._pending.values()])

    def end(self, reward: float | None, metrics: Mapping[str, float]) -> None:
        """The agent has ended well, or by a limit of its sample."""
        turns = self.turns
        for reason, left_out in (
            ("never_delivered", turns.phantoms()),
            ("other_distribution", [turn for turn in turns.all if not turn.trained]),
        ):
            if count := sum(len(turn.answer.tokens) for turn in left_out):
                self._recorder.count(f"rollout/agent/untrained_tokens/{reason}", count)
        last = max(turns.all, key=lambda turn: turn.number)
        messages = [*last.prompt.messages, as_message(last.answer)] if last.prompt.messages else []
        self._ended(EndedSession(self.start.id, turns.sequences(), reward, metrics, messages))

    def fail(self, reason: str, message: str) -> None:
        self._ended(EndedSession(self.start.id, failure=(reason, message)))

    def _ended(self, ended: EndedSession) -> None:
        self.ended = ended
        self.close()
        self._emit(ended)

    def close(self) -> None:
        """No call is accepted any more; those under way end with SessionEnded."""
        self._closed = True
        pending, self._pending = self._pending, {}
        for one in pending.values():
            one.result.cancel()
