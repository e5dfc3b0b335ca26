"""The rollout loop: issue → sample → score → hand over, as many groups at once as slots and staleness budget allow.

budget ──► prompt ──► n agent loops ──► rewards ──► group ──► queue
                          │                 │          └─ equal rewards: dropped, refilled
                          └ failed samples ─┴ fewer than min_group_size left: dropped

Groups in flight are snapshotted into the queue, so that a new rollouter resumes them when this one dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.measured import REWARDS, note
from asyncrl.observability.telemetry.recorder import Failure, Recorder
from asyncrl.processes.tasks import first_of
from asyncrl.rollouter.batching_sender import BatchingSender
from asyncrl.rollouter.drops import DropPolicy
from asyncrl.rollouter.in_flight import InFlightGroup, SnapshotStore, Snapshotter, recovered_samples
from asyncrl.rollouter.limiter import GroupPlaces, InFlightLimiter
from asyncrl.rollouter.pacing import GenerationPacer
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.samples import FailedSample, GroupTask, PromptTokens, SampleMaker
from asyncrl.rollouter.sampling import training_sampling
from asyncrl.rollouter.sources import SourceCounts
from asyncrl.sample_queue.messages import POISON, Admitted, Drop, InFlight, Recovery, Refusal, Ticket
from asyncrl.types.groups import Group
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample

log = logging.getLogger(__name__)

_GROUP_NUMBERS = itertools.count()  # over all loops of this process
_AHEAD = 64  # groups that other rollouters may issue while a call is under way
_PUT_INTERVAL_S = 0.2  # while all slots are busy and no group is to start: a call costs both ends a millisecond or two
_SCORING_S = 0.05  # for which new groups wait for those whose places they take, to be in one call with them


class QueueClient(SnapshotStore, Protocol):
    """The rollouter's view of the sample queue. All calls are idempotent: a repeated one has no further effect."""

    async def issue(self, tickets: Sequence[Ticket], count: int) -> Admitted: ...

    async def put_and_issue(
        self, groups: Sequence[bytes], tickets: Sequence[Ticket], count: int
    ) -> tuple[Sequence[Refusal], Admitted]:
        """Hand over finished groups and `issue` new ones, if some may start at once: the call does not wait."""
        ...

    async def drop(self, drops: Sequence[Drop]) -> None: ...

    async def end(self, reason: str) -> None:
        """Close the queue once no group is in flight, in any rollouter."""
        ...

    async def room(self, count: int) -> tuple[int, int]: ...

    async def recover(self, history: bool = False) -> Recovery:
        """Groups that an earlier rollouter had in flight; with ``history`` all groups of the run."""
        ...

    async def overdue(self) -> list[str]:
        """Wait until the queue has dropped groups in flight; returns their uids, none once the queue is closed."""
        ...


class _Upcoming(NamedTuple):
    """``samples``: recovered ones; none of a new group."""

    ticket: Ticket
    prompt: Prompt
    samples: Sequence[PartialSample] = ()


@dataclass(frozen=True)
class _Request:
    """Groups that may start in the call that hands over the next finished ones, up to ``count``."""

    tickets: Sequence[Ticket]
    count: int
    answer: asyncio.Future[Admitted]


@dataclass(frozen=True)
class _FinishedGroup:
    """A group on its way to the queue; ``answer`` is its refusal, or None once accepted."""

    uid: str
    payload: bytes
    answer: asyncio.Future[Refusal | None]


class RolloutLoop:
    """One per rollouter, on one asyncio loop. ``slots``: of its replicas; ``prompts`` may be endless; when they end,
    the queue is closed once no rollouter has a group in flight. ``pacer``: None if generation is not paced."""

    def __init__(
        self,
        config: Config,
        slots: int,
        prompts: PromptOrder,
        maker: SampleMaker,
        queue: QueueClient,
        recorder: Recorder,
        pacer: GenerationPacer | None = None,
    ) -> None:
        self._config, self._rollout = config, config.rollout
        self._prompts = prompts
        self._maker = maker
        self._queue = queue
        self._recorder, self._pacer = recorder, pacer
        self._sources = SourceCounts()
        self._sampling = training_sampling(config, maker.tokenizer.stop_token_ids)
        self._drop_policy = DropPolicy(config)
        self.limiter = InFlightLimiter(slots, config.rollout.max_concurrent_groups // config.rollout.shards)
        # an idle slot may mean that new groups wait until the trainer gets the finished ones
        self._finished: BatchingSender[_FinishedGroup] = BatchingSender(self._put, _PUT_INTERVAL_S, self.limiter.idle)
        self._drops: BatchingSender[Drop] = BatchingSender(queue.drop)
        self.in_flight: dict[str, InFlightGroup] = {}
        self.snapshotter: Snapshotter | None = None
        if not config.rollout.engine.deterministic:  # which restarts groups instead of restoring them
            self.snapshotter = Snapshotter(self.in_flight, queue, config.rollout.snapshot_every_s)
        self._upcoming: dict[str, _Upcoming] = {}  # to be issued next, in order
        self._drawn = 0  # groups of the run up to the last of these
        self._request: _Request | None = None
        self._warned_reasons: set[str] = set()  # of refusals
        self._blocked_s = 0.0  # for which a group had room and waited for staleness budget

    async def run(self, recovery: Recovery) -> None:
        """Roll out until the queue is closed: first the groups of ``recovery``, then the prompts after its last uid.

        Raises the errors of agent loops and of the queue, and NothingToTrain."""
        # in a thread: mixtures and curricula go through all groups of the run, which takes long after millions
        if self._prompts.adapts:
            await asyncio.to_thread(self._prompts.continue_from, recovery.history)
        elif recovery.last_uid is not None:
            await asyncio.to_thread(self._prompts.continue_after, recovery.last_uid)
        self._drawn = recovery.issued
        self._upcoming = {item.uid: self._recover(item) for item in recovery.in_flight}
        async with asyncio.TaskGroup() as tasks:
            services = [tasks.create_task(service) for service in self._services()]
            async with asyncio.TaskGroup() as groups:
                prompts_ended = await self._issue(groups)
            await self._drain()
            if prompts_ended:
                await self._queue.end("the prompts ended")
            for service in services:
                service.cancel()

    async def park(self) -> None:
        """Hand over finished groups and snapshot the others. Cancel ``run`` after this; another loop resumes them."""
        await self._drain()
        if self.snapshotter is not None:
            await self.snapshotter.finish()

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        snapshots = [self.snapshotter.run()] if self.snapshotter is not None else []
        return [self._finished.run(), self._drops.run(), self._cancel_overdue(), *snapshots]

    async def _drain(self) -> None:
        await self._finished.drained()
        await self._drops.drained()

    # -- issue -----------------------------------------------------------------------------------------------------

    def _recover(self, item: InFlight) -> _Upcoming:
        prompt, known = self._prompts.at(item.uid), item.ticket.prompt_id
        if prompt.prompt_id != known:
            raise DataError(
                f"group {item.uid} was issued for prompt {known}, but these files have {prompt.prompt_id} "
                "there: resume with the prompt files of the first run"
            )
        deterministic = self._rollout.engine.deterministic
        return _Upcoming(item.ticket, prompt, recovered_samples(item, self._rollout.n, deterministic, self._recorder))

    async def _issue(self, groups: asyncio.TaskGroup) -> bool:
        """Start groups until the prompts end (returns True) or the queue is closed (False)."""
        while True:
            wanted = await self.limiter.room(self._rollout.n)
            admitted = await self._issue_up_to(wanted)
            if admitted is None:
                return True
            if self._pacer is not None:
                self._pacer.note_version(admitted.number, self._blocked_s, admitted.starved_s)
            if not (admitted.started or admitted.passed):
                return False
            for uid in admitted.started:
                if (group := self._upcoming.pop(uid, None)) is not None:  # unless it became overdue meanwhile
                    self._start(groups, group)
            for uid in admitted.passed:
                self._upcoming.pop(uid, None)

    async def _issue_up_to(self, wanted: int) -> Admitted | None:
        """At most ``wanted`` groups that may start, nothing once the queue is closed; None if the prompts ended."""
        draw = wanted + (_AHEAD if self._rollout.shards > 1 else 0)
        if self._prompts.adapts:  # each is drawn when it may start: all that may count is known then
            draw = 0
            if not self._upcoming:
                with self._blocked():
                    draw, self._prompts.version = await self._queue.room(wanted)
                if not draw:
                    return Admitted([], [], 0)
                for name, value in self._prompts.figures().items():
                    self._recorder.gauge(f"rollout/curriculum/{name}", value)
        while len(self._upcoming) < draw and (prompt := next(self._prompts, None)) is not None:
            ticket = Ticket(prompt.uid, prompt.prompt_id, prompt.epoch, self._drawn)
            self._upcoming[prompt.uid] = _Upcoming(ticket, prompt)
            self._drawn += 1
        if not self._upcoming:
            return None
        tickets = [group.ticket for group in itertools.islice(self._upcoming.values(), draw or wanted)]
        admitted = await self._admitted(tickets, wanted)
        while self._drawn < admitted.issued and next(self._prompts, None) is not None:  # other shards issued these
            self._drawn += 1
        return admitted

    async def _admitted(self, tickets: Sequence[Ticket], count: int) -> Admitted:
        """Which of these groups may start; waits until one may. Asks in one call with the groups that are handed over,
        if there are some and no slot is idle."""
        if not self._prompts.adapts and not self.limiter.idle.is_set():
            request = self._request = _Request(tickets, count, asyncio.get_running_loop().create_future())
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_SCORING_S):
                        await first_of(self.limiter.idle.wait(), beside=request.answer)
                if self._request is not request or self._finished.hurry():
                    admitted = await request.answer
                    if admitted.started or admitted.passed:
                        return admitted
            finally:
                self._request = None
        with self._blocked():
            return await self._queue.issue(tickets, count)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        since_s = now_s()
        yield
        self._blocked_s += now_s() - since_s

    def _start(self, groups: asyncio.TaskGroup, upcoming: _Upcoming) -> None:
        prompt = upcoming.prompt
        samples = list(upcoming.samples) or [PartialSample() for _ in range(self._rollout.n)]
        group = self.in_flight[prompt.uid] = InFlightGroup(samples, GroupPlaces(self.limiter, len(samples)))
        group.task = groups.create_task(self._roll_out(prompt, group))
        group.task.add_done_callback(lambda _: self._end(prompt.uid))

    def _end(self, uid: str) -> None:
        self.in_flight.pop(uid).places.close()

    async def _cancel_overdue(self) -> None:
        """Cancel groups that the queue has dropped. The queue ignores one that finishes at the same time."""
        while uids := await self._queue.overdue():
            for uid in uids:
                self._prompts.ended(uid, None)
                group, upcoming = self.in_flight.get(uid), self._upcoming.pop(uid, None)
                if group is not None and group.task is not None:
                    group.task.cancel()
                if group or upcoming:
                    self._recorder.count("rollout/cancelled_groups")

    # -- one group: sample → score → hand over ---------------------------------------------------------------------

    async def _roll_out(self, prompt: Prompt, group: InFlightGroup) -> None:
        """Roll out one group until the queue accepts or drops it; a refused one is sampled again."""
        encoded = self._maker.encode(prompt)
        while (refusal := await self._attempt(prompt, encoded, group)) is not None:
            self._recorder.count(f"rollout/refused_groups/{refusal.reason}")
            if refusal.attempt is None:
                self._prompts.ended(prompt.uid, None)
                self._drop_policy.dropped(POISON, refusal.reason)
                return
            level = logging.DEBUG if refusal.reason in self._warned_reasons else logging.WARNING
            self._warned_reasons.add(refusal.reason)
            log.log(
                level,
                "group %s was refused (%s) and is sampled again; further ones are logged at debug level",
                prompt.uid,
                refusal.reason,
            )
            group.restart(refusal.attempt)
            group.places = GroupPlaces(self.limiter, len(group.samples))

    async def _attempt(self, prompt: Prompt, encoded: PromptTokens, group: InFlightGroup) -> Refusal | None:
        """Returns the queue's refusal; None if the group was accepted or dropped."""
        times, tokens = {"issued_s": now_s()}, encoded.tokens
        made = await self._sample(prompt, encoded, group)
        times["generated_s"] = now_s()
        intact = self._maker.decodable(made) and _finite(made)
        if intact:  # otherwise the queue refuses the group, whatever its rewards
            made = await self._maker.score(prompt, made)
        failed = [s for s in made if isinstance(s, FailedSample)]
        samples = [s for s in made if isinstance(s, Sample)]
        for index, f in enumerate(made):
            if isinstance(f, FailedSample):
                self._report_failed(prompt, tokens, index, f)
        success = float(np.mean([s.succeeded for s in samples])) if samples else None
        if intact:  # before the queue knows, and so before a version is published that follows
            self._prompts.ended(prompt.uid, success)
            if not failed:
                self._profile(tokens, samples, group, now_s() - times["generated_s"])
        flat = intact and self._drop_policy.without_variance(samples)
        if intact and (reason := self._drop_policy.reason(samples, failed, flat)):
            self._count(prompt, samples, flat)
            self._drops.add(Drop(prompt.uid, reason, success))
            self._drop_policy.dropped(reason, failed[0].message if failed else "")
            return None
        times["finished_s"] = now_s()
        if first_token_s := [s.first_token_s for s in group.samples if s.first_token_s is not None]:
            times["started_s"] = min(first_token_s)
        attempt = group.samples[0].attempt
        whole = Group.from_samples(
            prompt.uid, prompt.prompt_id, prompt.epoch, tokens, samples, times, attempt, prompt.data_source
        )
        # the queue also answers None for a group that it ignores: a repeated call, or one that was overdue
        if (refusal := await self._hand_over(whole)) is None and intact:
            self._count(prompt, samples, flat)
            self._drop_policy.accepted()
        return refusal

    async def _sample(self, prompt: Prompt, encoded: PromptTokens, group: InFlightGroup) -> list[Sample | FailedSample]:
        task = GroupTask(
            prompt,
            encoded.tokens,
            self._sampling,
            name=f"{prompt.uid}/{next(_GROUP_NUMBERS)}",  # replicas may still hold an earlier loop's requests
            key=prompt.uid,
            one_version=not self._config.async_training.partial_rollout,
            refused=encoded.refused,
        )
        made = await self._maker.make(task, group.samples, group.places)
        return [_without_untrained(s) for s in made]

    def _report_failed(self, prompt: Prompt, tokens: np.ndarray, index: int, failed: FailedSample) -> None:
        self._recorder.count(f"rollout/failed_samples/{failed.reason}")
        if self._recorder.wants_failures:
            tokenizer = self._maker.tokenizer
            known = [o if tokenizer.in_vocabulary(o) else o[:0] for o in failed.sampled]
            text, *texts = tokenizer.decode_batch([tokens, *known], special_tokens=True)
            self._recorder.failed(
                Failure(
                    uid=prompt.uid,
                    prompt_id=prompt.prompt_id,
                    data_source=prompt.data_source,
                    epoch=prompt.epoch,
                    sample=index,
                    prompt=text,
                    failure=failed.reason,
                    error=failed.message,
                    sampled=list(zip(map(len, failed.sampled), texts, strict=True)),
                )
            )

    async def _hand_over(self, group: Group) -> Refusal | None:
        answer: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._finished.add(_FinishedGroup(group.uid, group.to_bytes(), answer))
        return await answer

    async def _put(self, groups: Sequence[_FinishedGroup]) -> None:
        payloads = [group.payload for group in groups]
        request, self._request = self._request, None
        tickets, count = (request.tickets, request.count) if request is not None else ((), 0)
        refused, admitted = await self._queue.put_and_issue(payloads, tickets, count)
        # an answer that is done already is that of a cancelled task
        if request is not None and not request.answer.done():
            request.answer.set_result(admitted)
        refusals = {refusal.uid: refusal for refusal in refused}
        for group in groups:
            if not group.answer.done():
                group.answer.set_result(refusals.get(group.uid))

    def _profile(self, tokens: np.ndarray, samples: Sequence[Sample], group: InFlightGroup, scoring_s: float) -> None:
        """Keep the group's shape for the run's profile, see `asyncrl.simulation.profile`, before any filter."""
        note(self._recorder, REWARDS, scoring_s)
        shapes = [[float(s.reward or 0.0), *group.samples[s.index].turns] for s in samples]
        if all(len(shape) > 1 for shape in shapes):
            self._recorder.profiled([len(tokens), shapes])

    def _count(self, prompt: Prompt, samples: Sequence[Sample], flat: bool) -> None:
        """Metrics of all generated samples, before any filter: the true accuracy of the current policy."""
        self._recorder.count("rollout/groups")
        self._recorder.count("rollout/zero_variance_groups", flat)
        self._recorder.count("rollout/samples", len(samples))
        self._recorder.count("rollout/partial_samples", sum(len(s.versions) > 1 for s in samples))
        for name, value in self._sources.of(prompt.data_source, samples).items():
            self._recorder.count(name, value)
        for name in {name for s in samples for name in s.metrics}:
            self._recorder.count(f"rollout/sum/{name}", sum(s.metrics.get(name, 0.0) for s in samples))
        rewards = [s.reward for s in samples if s.reward is not None]
        assert len(rewards) == len(samples)
        self._recorder.count("rollout/sum/reward", sum(rewards))


def _finite(made: Sequence[Sample | FailedSample]) -> bool:
    """True if every trained token has a finite behaviour logprob."""
    sequences = [q for s in made if isinstance(s, Sample) for q in s.sequences]
    return all(math.isfinite(np.add.reduce(q.logprobs, dtype=np.float64, where=q.loss_mask)) for q in sequences)


def _without_untrained(sample: Sample | FailedSample) -> Sample | FailedSample:
    """The sample, or its failure if it has no token to train."""
    if isinstance(sample, Sample) and not any(q.loss_mask.any() for q in sample.sequences):
        tokens = sum(len(q.tokens) for q in sample.sequences)
        message = f"none of its {tokens} response tokens has loss_mask set"
        return FailedSample("no_trained_token", message, [q.tokens for q in sample.sequences])
    return sample
