"""The engine core: continuous batching over slots, without threads, asyncio or Ray.

One `Core.step` places waiting requests, prefills up to a chunk of prompt tokens and decodes one token for every running
sequence, or several when it speculates. `Core.drain` returns the events::

    core = Core(model, slots=32, context_tokens=1024, prefill_chunk_tokens=512)
    core.start(PolicyVersion(0, 0))
    core.submit(requests)
    while core.active:
        core.step()
    events = core.drain()
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.models.device_copy import on_device
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import count_prompt
from asyncrl.rollouter.engines.admission import why_impossible
from asyncrl.rollouter.engines.base import EngineError, EventBatch, Request, Scheduling
from asyncrl.rollouter.engines.events import NO_VERSION, Event, EventLog
from asyncrl.rollouter.engines.native.grammar import GrammarError, Grammars
from asyncrl.rollouter.engines.native.kernels import LENGTH_STEP, round_up
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.passes import Drawn, Passes
from asyncrl.rollouter.engines.native.prefill import Prefiller
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, TokenMasks, sample, uniforms
from asyncrl.rollouter.engines.native.scheduler import Scheduler, Sequence
from asyncrl.rollouter.engines.native.speculation import Speculation, Speculator
from asyncrl.rollouter.engines.native.warm import WarmPrefix, WarmPrefixes
from asyncrl.rollouter.engines.occupancy import Occupancy
from asyncrl.rollouter.engines.stops import StopStrings, Tokenizer
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

_FIXED_CHUNK_TOKENS = 64  # small: deterministic mode pads prompts to a multiple of it
_Ended = tuple[Sequence, FinishReason, str]  # the last: reason of an ERROR


class _Pass(NamedTuple):
    """A decode pass, which may still be under way: the sequences for which it draws, by slot."""

    sequences: dict[int, Sequence]
    drawn: Drawn


class Core:
    """Steps one model. ``warm_bytes``: limit of the KV of finished requests that is kept for later turns.

    ``look_ahead`` (None: on a GPU): start the next pass before reading the tokens of the last one, so that the GPU
    computes while the CPU handles them. A sequence's state advances only when its token is read, so the pass ahead can
    be dropped at any time; what it wrote to the KV cache is written again.

    In deterministic mode, decode always runs all slots over the whole context, prompts are
    prefilled in chunks of one shape, and the tokens that an interrupted request already has are replayed in decode
    steps: the bits of a token then depend only on the weights and the request's tokens, key and position."""

    def __init__(
        self,
        model: NativeModel,
        *,
        slots: int,
        context_tokens: int,
        prefill_chunk_tokens: int,
        deterministic: bool = False,
        recorder: Recorder | None = None,
        load_tokenizer: Callable[[], Tokenizer] | None = None,
        speculation: Speculation | None = None,
        warm_bytes: int = 0,
        look_ahead: bool | None = None,
    ) -> None:
        if speculation is not None and deterministic:
            raise EngineError(
                "deterministic mode does not speculate: the number of accepted tokens changes the computed shapes; use "
                "rollout.engine.deterministic=false or mtp.enable_rollout=false"
            )
        if warm_bytes and deterministic:
            raise EngineError("deterministic mode keeps no warm KV: its bits differ from those of a prefill")
        self.model, self.slots, self.context_tokens = model, slots, context_tokens
        self.deterministic = deterministic
        self.kv = KVCache(model.config, slots, context_tokens, model.dtype, model.device, draft=speculation is not None)
        self._passes = Passes(model, self.kv, deterministic)
        ahead = model.device.type == "cuda" if look_ahead is None else look_ahead
        self._looks_ahead = ahead and not deterministic and speculation is None
        self._ahead: _Pass | None = None
        self.version: PolicyVersion | None = None
        self.generated_tokens = 0
        self._chunk_tokens = min(prefill_chunk_tokens, context_tokens)
        if deterministic:
            self._chunk_tokens = min(self._chunk_tokens, _FIXED_CHUNK_TOKENS)
        self._warm = WarmPrefixes(warm_bytes)
        self._scheduler = Scheduler(slots, self._chunk_tokens, deterministic, self._warm)
        self._held: list[Request] | None = None  # while the gate is closed
        self._recorder = recorder or Recorder("engine")
        self.occupancy = Occupancy(self._recorder, slots)
        self._load_tokenizer = load_tokenizer
        self._vocabulary = model.config.vocab_size
        self._log = EventLog()
        # the next decode step's input, by slot; a row that does not decode writes where its KV will be overwritten
        self._tokens = np.zeros(slots, dtype=np.int64)
        self._positions = np.zeros(slots, dtype=np.int64)
        self._uniforms = np.zeros((slots, context_tokens), dtype=np.float32)  # by input position
        self._columns: tuple[int, SamplingColumns] | None = None  # and their rows
        self._poisoned: set[int] = set()  # slots whose KV may hold NaN, see `KVCache`
        self._speculator: Speculator | None = None
        if speculation is not None:
            self._speculator = Speculator(model, self.kv, self._passes, *speculation, self._recorder)
        self._prefiller = Prefiller(
            model, self.kv, self._scheduler, self._warm, self._speculator, self._chunk_tokens, deterministic
        )
        self._counted_tokens = 0

    # -- requests --------------------------------------------------------------------------------------------------

    @property
    def active(self) -> int:
        """Number of requests that run or wait, without those behind a closed gate."""
        return len(self._scheduler.by_id)

    @property
    def running(self) -> int:
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        return self._scheduler.waiting + len(self._held or ())

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests; one that can never run ends with an ERROR event. Raises EngineError and queues none if an id
        is already used by an unfinished request."""
        requests = list(requests)
        count = Counter(r.id for r in [*requests, *(self._held or ())])
        if twice := sorted(i for i, n in count.items() if n > 1 or i in self._scheduler.by_id):
            raise EngineError(f"ids must be unique among unfinished requests; used twice: {', '.join(twice[:4])}")
        for request in requests:
            if self._held is not None:
                self._held.append(request)
            elif problem := why_impossible(
                request, self.context_tokens, self._vocabulary, self._load_tokenizer is not None
            ):
                self._emit_unstarted(request, FinishReason.ERROR, problem)
            else:
                sequence = self._sequence(request)
                if (grammar := request.sampling.grammar) is not None:
                    try:
                        sequence.matcher = self._grammars.matcher(grammar, request.sampling.stop_token_ids)
                    except GrammarError as refusal:
                        self._emit_unstarted(request, FinishReason.ERROR, str(refusal))
                        continue
                self._scheduler.add(sequence)

    def compile_grammars(self, requests: SequenceOf[Request]) -> None:
        """Ahead of `submit`, in another thread: a large grammar takes up to a second."""
        if self._load_tokenizer is not None:
            for grammar in {r.sampling.grammar for r in requests if r.sampling.grammar is not None}:
                self._grammars.compile(grammar)

    def abort(self, ids: Iterable[str] | None = None) -> int:
        """End these requests (None: all), each with an ABORT event that has its unreported tokens. Returns their
        number."""
        wanted = None if ids is None else set(ids)
        ended = [s for s in self._scheduler.all() if wanted is None or s.request.id in wanted]
        for sequence in ended:
            if sequence.slot < 0:
                self._emit(sequence, FinishReason.ABORT)
            else:
                self._finish(sequence, FinishReason.ABORT)
        self._scheduler.remove_waiting(s for s in ended if s.slot < 0)
        held = [r for r in self._held or () if wanted is None or r.id in wanted]
        for request in held:
            self._emit_unstarted(request, FinishReason.ABORT)
        if self._held is not None:
            self._held = [r for r in self._held if wanted is not None and r.id not in wanted]
        return len(ended) + len(held)

    def set_scheduling(self, scheduling: Scheduling) -> None:
        """Applies from the next step on."""
        self._scheduler.max_training = (
            self.slots if scheduling.max_running_requests is None else scheduling.max_running_requests
        )
        self._scheduler.validation_first = scheduling.validation_first

    def close_gate(self) -> None:
        """Hold back later requests."""
        self._held = self._held or []

    def open_gate(self) -> None:
        held, self._held = self._held or [], None
        self.submit(held)

    def _sequence(self, request: Request) -> Sequence:
        size = len(request.tokens)
        prompt = size - request.resumed if self.deterministic else self.context_tokens
        return Sequence(
            request=request,
            tokens=request.tokens.tolist(),
            prefillable=max(prompt, 1),
            limit=min(size + request.max_new_tokens, self.context_tokens),
            stop_tokens=frozenset(request.sampling.stop_token_ids),
        )

    # -- weights and KV --------------------------------------------------------------------------------------------

    def start(self, version: PolicyVersion) -> None:
        """Generate under ``version``, with the current contents of the model's views. KV kept across a change of
        version is marked as mixed."""
        self._ahead = None
        self.model.refresh()
        if self.version is None and self.deterministic:
            self._require_equal_rows()
        if version == self.version:
            return
        self._emit_all()
        for sequence in self._scheduler.placed:
            if sequence is not None and sequence.computed:
                sequence.mixed_kv = True
        self._warm.mix()
        self.version = version

    def flush_kv(self) -> None:
        """Discard all KV; placed sequences are prefilled again."""
        self._ahead = None
        self._emit_all()
        self._warm.clear()
        for sequence in self._scheduler.forget_kv():
            self._heal(sequence.slot)
            self._feed(sequence)
            if self._speculator is not None:
                self._speculator.forget(sequence.slot)

    def release_kv(self) -> int:
        """Free the cache's memory; returns its bytes. Raises EngineError while requests hold slots."""
        if self._scheduler.running:
            raise EngineError(f"{self._scheduler.running} requests still hold KV: abort them or let them finish first")
        self._ahead = None
        self._passes.forget()
        return self._warm.clear() + self.kv.release()

    def _require_equal_rows(self) -> None:
        """Check that kernels compute the same bits for a row at any batch index, as deterministic mode requires. Runs
        once, with the real weights and shapes."""
        for position in range(min(3, self.context_tokens)):
            tokens = torch.full((self.slots,), (position + 1) % self._vocabulary, device=self.model.device)
            positions = torch.full((self.slots,), position, device=self.model.device)
            logits_SV = self.model.decode(tokens, positions, self.kv, self.context_tokens)
            if not torch.equal(logits_SV, logits_SV[:1].expand_as(logits_SV)):
                raise EngineError(
                    f"this machine's kernels give different bits in different rows of a batch of {self.slots}, so "
                    f"deterministic mode is impossible: use another number of slots, or deterministic=false"
                )

    # -- the step --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Place, prefill up to one chunk of tokens, and decode one token per running sequence; with a pass ahead, one
        that has just joined waits a step. Raises EngineError if the KV cache is released or no version was started."""
        if not self.kv.allocated:
            raise EngineError("the KV cache is released; call restore_kv first")
        if self.version is None:
            raise EngineError("no version was started, so the version of the weights is unknown")
        for sequence in self._scheduler.place():
            self._place(sequence)
        computed, reused = self._prefiller.run(self._feed)
        if computed or reused:
            count_prompt(self._recorder, computed, reused)
        decoding = self._scheduler.decoding()
        self.occupancy.observe(len(decoding), self.active)
        if decoding:
            self._decode(decoding)

    def _place(self, sequence: Sequence) -> None:
        request, slot, size = sequence.request, sequence.slot, len(sequence.request.tokens)
        self._heal(slot)
        self._uniforms[slot, size - 1 : sequence.limit - 1] = uniforms(
            request.key, request.position, sequence.limit - size
        )
        if self._speculator is not None:
            left = sequence.limit - size
            self._speculator.begin(slot, sequence.tokens, request.key, request.position, left)
        self._feed(sequence)
        self._columns = None

    def _heal(self, slot: int) -> None:
        """Clear NaN from the slot before its KV is written from the start."""
        if slot in self._poisoned:
            self.kv.clear(slot)
            self._poisoned.remove(slot)

    def _feed(self, sequence: Sequence) -> None:
        """Set the input of the sequence's row for the next decode step."""
        self._tokens[sequence.slot] = sequence.tokens[sequence.computed]
        self._positions[sequence.slot] = sequence.computed

    def _keep_warm(self, sequence: Sequence) -> None:
        tokens = np.array(sequence.tokens[: sequence.computed], np.int32)
        drafted = self._speculator.drafted(sequence.slot) if self._speculator is not None else 0
        kv = self.kv.view(sequence.slot, len(tokens))
        self._warm.keep(WarmPrefix(sequence.request.group, tokens, kv, drafted, sequence.mixed_kv))

    def _decode(self, decoding: SequenceOf[Sequence]) -> None:
        began_s = now_s()
        decoding, masks = self._masks(decoding)
        if not decoding:
            return
        k, drafts = 0, self._speculator is not None and all(s.drafts for s in decoding)
        if self._speculator is not None and drafts:
            k = self._speculator.guard.choose(len(decoding))
        gained: list[int] = []
        if k:
            ended, gained = self._verify(decoding, k)
        else:
            ended = self._draw_next(decoding, masks)
        if self._speculator is not None and drafts:  # the guard compares steps without masks
            self._speculator.took(k, len(decoding), gained, now_s() - began_s)
        for sequence, finish, error in ended:
            self._finish(sequence, finish, error)
        if ended and not self.deterministic and not self._scheduler.would_place:
            self._compact()

    def _shape(self, k: int) -> tuple[int, int]:
        """Rows and attended length of a pass over k + 1 tokens of each row. Also makes the rows' columns current."""
        rows, length = self.slots, self.context_tokens
        if not self.deterministic:
            rows = self._passes.rows(self._scheduler.highest())
            length = min(round_up(int(self._positions[:rows].max()) + 1 + k, LENGTH_STEP), self.context_tokens)
        if self._columns is None or self._columns[0] != rows:
            params = [None if s is None else s.request.sampling for s in self._scheduler.placed[:rows]]
            self._columns = rows, SamplingColumns.of(params, self.model.device)
        return rows, length

    def _masks(self, decoding: SequenceOf[Sequence]) -> tuple[SequenceOf[Sequence], TokenMasks | None]:
        """The tokens that grammars allow next, None without any; and the sequences without those that this ends, as
        nothing may follow."""
        if not (matched := [s for s in decoding if s.matcher is not None]):
            return decoding, None
        words_GW = np.zeros((len(matched), math.ceil(self._vocabulary / 32)), np.int32)
        slots: list[int] = []
        ended: set[int] = set()
        for sequence in matched:
            assert sequence.matcher is not None
            try:
                sequence.matcher.fill(words_GW[len(slots)])
                slots.append(sequence.slot)
            except GrammarError as problem:
                ended.add(sequence.slot)
                self._finish(sequence, FinishReason.ERROR, str(problem))
        left, device = [s for s in decoding if s.slot not in ended], self.model.device
        if not slots:
            return left, None
        return left, TokenMasks(on_device(np.array(slots), device), on_device(words_GW[: len(slots)], device))

    def _draw_next(self, decoding: SequenceOf[Sequence], masks: TokenMasks | None) -> list[_Ended]:
        """Draw one token for each decoding sequence, or read what was drawn ahead. Returns the sequences that end."""
        current, self._ahead = self._ahead, None
        if current is None or not any(self._waits_for(current, s) for s in decoding):
            current = self._launch(decoding, masks)
        if self._looks_ahead and masks is None:
            # those for which the pass under way does not draw their last token, and those that have joined since
            following = [s for s in decoding if not self._waits_for(current, s) or len(s.tokens) + 1 < s.limit]
            if following and all(s.matcher is None for s in following):
                self._ahead = self._launch(following, None, current)
        drawn, logprobs = current.drawn.wait()
        ended: list[_Ended] = []
        for slot, sequence in current.sequences.items():
            if not self._waits_for(current, sequence):
                continue
            sequence.computed += 1
            again = sequence.computed < len(sequence.tokens)  # an earlier token was replayed
            if not again and (end := self._append(sequence, drawn[slot], logprobs[slot])) is not None:
                ended.append(end)
            else:
                self._feed(sequence)
        return ended

    def _launch(self, decoding: SequenceOf[Sequence], masks: TokenMasks | None, after: _Pass | None = None) -> _Pass:
        """Start a pass that draws for ``decoding``. ``after``: the pass under way, whose tokens are fed where it draws
        for the same sequences."""
        rows, length = self._shape(k=int(after is not None))
        assert self._columns is not None
        device, positions = self.model.device, self._positions[:rows]
        tokens_N = on_device(self._tokens[:rows], device)
        if after is not None:
            follows = np.zeros(min(rows, len(after.drawn.tokens_N)), bool)
            follows[[s.slot for s in decoding if self._waits_for(after, s)]] = True
            positions = positions.copy()
            positions[: len(follows)] += follows
            fed_N = torch.where(
                on_device(follows, device), after.drawn.tokens_N[: len(follows)], tokens_N[: len(follows)]
            )
            tokens_N = torch.cat([fed_N, tokens_N[len(follows) :]])
        positions_N = on_device(positions, device)
        draws_N = on_device(self._uniforms[np.arange(rows), positions], device)
        columns = self._columns[1]
        if self._speculator is None:
            drawn = self._passes.draw(tokens_N, positions_N, draws_N, columns, masks, length)
        else:
            hidden_NM = self._passes.hidden_states(tokens_N.unsqueeze(1), positions_N.unsqueeze(1), length)
            self._speculator.keep_hidden(positions[:, None], hidden_NM)
            drawn = Drawn(*sample(self.model.head(hidden_NM), columns, draws_N, masks))
        return _Pass({s.slot: s for s in decoding}, drawn)

    def _waits_for(self, under_way: _Pass, sequence: Sequence) -> bool:
        """True if the pass draws this sequence's next token: it was in the pass, and is still placed as it was."""
        slot = sequence.slot
        return under_way.sequences.get(slot) is sequence and self._scheduler.placed[slot] is sequence

    def _verify(self, decoding: SequenceOf[Sequence], k: int) -> tuple[list[_Ended], list[int]]:
        """Draft and verify: one to ``k`` + 1 tokens for each sequence. Returns the sequences that end, and how many
        tokens beyond one each sequence took."""
        assert self._speculator is not None
        rows, length = self._shape(k)
        assert self._columns is not None
        slots = np.array([sequence.slot for sequence in decoding])
        verified = self._speculator.step(slots, self._positions[:rows], self._uniforms, self._columns[1], k, length)
        sizes = [len(s.tokens) for s in decoding]
        rooms = [min(k, s.limit - size) for s, size in zip(decoding, sizes)]
        ended: list[_Ended] = []
        for i, sequence in enumerate(decoding):
            slot = sequence.slot
            for j in range(verified.accepted[slot] + 1):
                end = self._append(sequence, verified.tokens[slot][j], verified.logprobs[slot][j])
                if end is not None:  # accepted tokens after the end are dropped
                    ended.append(end)
                    rooms[i] = min(k, len(sequence.tokens) - sizes[i])
                    break
                sequence.computed += 1
            else:
                self._feed(sequence)
        took = [len(s.tokens) - size for s, size in zip(decoding, sizes)]
        accepted = [min(verified.accepted[s.slot], count) for s, count in zip(decoding, took)]
        self._speculator.count(k, rooms, accepted, sum(took))
        return ended, [max(count - 1, 0) for count in took]

    def _append(self, sequence: Sequence, token: int, logprob: float) -> _Ended | None:
        """Append a drawn token; returns the sequence's end if it is the last one."""
        if math.isnan(logprob):
            self._poisoned.update(range(self.slots))  # idle rows were computed too, so any slot may hold NaN
            return sequence, FinishReason.ERROR, self._diverged()
        if self._speculator is not None:
            self._speculator.append(sequence.slot, len(sequence.tokens), token)
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        self.generated_tokens += 1
        reason = self._reached(sequence)
        if reason is None and sequence.matcher is not None:
            sequence.matcher.advance(token)
        return None if reason is None else (sequence, reason, "")

    def _reached(self, sequence: Sequence) -> FinishReason | None:
        """Why the token just drawn is the last one, or None."""
        if sequence.tokens[-1] in sequence.stop_tokens:
            return FinishReason.STOP
        if strings := sequence.request.sampling.stop_strings:
            drawn_from = len(sequence.request.tokens) - sequence.request.resumed
            if self._stops.found(sequence.tokens, drawn_from, strings):
                return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    @cached_property
    def _stops(self) -> StopStrings:
        assert self._load_tokenizer is not None  # else `submit` refuses the request
        return StopStrings(self._load_tokenizer())

    @cached_property
    def _grammars(self) -> Grammars:
        assert self._load_tokenizer is not None
        return Grammars(self._load_tokenizer(), self._vocabulary)

    def _diverged(self) -> str:
        return f"the logits under version {self.version} are NaN: the weights have diverged"

    def _finish(self, sequence: Sequence, finish: FinishReason, error: str = "") -> None:
        """End a placed sequence."""
        self._emit(sequence, finish, error)
        if self._warm.limit and finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._keep_warm(sequence)
        self._scheduler.remove(sequence)
        self._positions[sequence.slot] = 0
        self._columns = None
        if self._speculator is not None:
            self._speculator.forget(sequence.slot)

    def _compact(self) -> None:
        """Move sequences from the last slots into free ones if fewer rows are decoded then. Only useful when nothing
        waits."""
        scheduler, rows = self._scheduler, self._passes.rows
        while rows(scheduler.running) < rows(scheduler.highest()) and (moved := scheduler.move_down()):
            self._ahead = None  # it writes to the old slots
            sequence, source = moved
            self._heal(sequence.slot)
            self.kv.load(sequence.slot, self.kv.view(source, sequence.computed))
            for column in (self._tokens, self._positions, self._uniforms):
                column[sequence.slot] = column[source]
            self._positions[source] = 0
            self._columns = None
            if self._speculator is not None:
                self._speculator.move(source, sequence.slot)

    # -- events ----------------------------------------------------------------------------------------------------

    @property
    def warm_bytes(self) -> int:
        """Bytes of KV of finished requests."""
        return self._warm.nbytes

    @property
    def has_finished(self) -> bool:
        """True if `drain` would return the end of a request."""
        return self._log.has_finished

    @property
    def has_events(self) -> bool:
        """True if `drain` would return any event."""
        return len(self._log) > 0 or any(s is not None and s.logprobs for s in self._scheduler.placed)

    def drain(self, progress: bool = True) -> EventBatch:
        """Events that no call has returned yet; without ``progress`` only those of requests that ended."""
        if progress:
            self._emit_all()
        self._recorder.count("rollout/tokens", self.generated_tokens - self._counted_tokens)
        self._counted_tokens = self.generated_tokens
        if self._speculator is not None:
            self._speculator.report()
        if self._warm.limit:
            self._recorder.gauge("rollout/warm_kv_bytes", self._warm.nbytes)
        return self._log.take(progress)

    def settle(self) -> None:
        """Drop the pass ahead, and wait until the device no longer reads weights."""
        self._ahead = None
        if self.model.device.type == "cuda":
            torch.cuda.current_stream(self.model.device).synchronize()

    def rest(self) -> None:
        """Mark the engine idle until the next step, so that the time does not count as generation."""
        self.occupancy.observe(0, 0)

    def _emit_all(self) -> None:
        for sequence in self._scheduler.placed:
            if sequence is not None and sequence.logprobs:
                self._emit(sequence, None)

    def _emit(self, sequence: Sequence, finish: FinishReason | None, error: str = "") -> None:
        logprobs, sequence.logprobs = sequence.logprobs, []
        tokens = sequence.tokens[len(sequence.tokens) - len(logprobs) :]
        version = self.version or NO_VERSION
        self._log.add(Event(sequence.request.id, tokens, logprobs, version, finish, sequence.mixed_kv, error))

    def _emit_unstarted(self, request: Request, finish: FinishReason, error: str = "") -> None:
        self._log.add(Event(request.id, [], [], self.version or NO_VERSION, finish, error=error))
