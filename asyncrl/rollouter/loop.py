"""The rollout loop: prompts in, finished groups out, as many at a time as the staleness budget and the slots allow.

budget ──► prompt ──► n agent loops ──► rewards ──► group ──► queue
                          │                 │          └─ equal rewards: dropped, refilled
                          └ failed samples ─┴ fewer than min_group_size left: dropped

What is under way is snapshotted into the queue, so that another rollouter goes on with it after the death of this one.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from asyncrl.config.checks import Derived
from asyncrl.config.schema import Config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.rollouter.engine import SamplingParams
from asyncrl.rollouter.outbox import Outbox
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.rollouter.places import Places
from asyncrl.rollouter.samples import Failed, SampleMaker, Task
from asyncrl.sample import Group, Prompt, Sample, effective_reward
from asyncrl.sample_queue.messages import InFlight, Recovery, Ticket
from asyncrl.telemetry.recorder import Recorder, now_s

log = logging.getLogger(__name__)

_PUT_EVERY_S = 0.2  # while the engines are full: each call costs both its ends a millisecond or two


class QueueClient(Protocol):
    """The rollouter's side of the sample queue. A call may be repeated: what was done already is not done again."""

    async def issue(self, tickets: Sequence[Ticket]) -> int: ...
    async def put(self, groups: Sequence[bytes], now_s: float) -> None: ...
    async def drop(self, drops: Sequence[tuple[str, str]]) -> None: ...
    async def close(self, reason: str) -> None: ...

    async def recover(self) -> Recovery:
        """What an earlier rollouter left."""
        ...

    async def snapshot(self, items: Sequence[tuple[str, bytes]]) -> None:
        """(uid, snapshot) of groups in flight, in place of their earlier ones; those of others are ignored."""

    async def overdue(self) -> list[str]:
        """Wait until the queue has dropped groups in flight, and name them; empty once the queue is closed."""
        ...


class NothingToTrain(RuntimeError):
    """Group after group is dropped: the run would go on for ever without training."""


@dataclass(eq=False)
class _UnderWay:
    """A group in flight. ``generating``: how many of its samples have not ended. ``told``: `news` of the samples in the
    snapshot that was handed over last."""

    samples: list[PartialSample]
    told: list[tuple[int, int]]
    generating: int
    task: asyncio.Task[None] | None = None


def truncations(sampling: SamplingParams) -> list[str]:
    """The options that keep some tokens from being drawn, as ``name=value``."""
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return [f"{name}={getattr(sampling, name)}" for name, value in off.items() if getattr(sampling, name) != value]


def _trainable(sample: Sample | Failed) -> Sample | Failed:
    if isinstance(sample, Sample) and not sample.loss_mask.any():
        return Failed("no_trained_token", f"none of its {len(sample.tokens)} response tokens has loss_mask set")
    return sample


class RolloutLoop:
    """One per run, on one asyncio loop. ``prompts`` may end (then no group starts any more) or be endless."""

    def __init__(
        self,
        config: Config,
        derived: Derived,
        prompts: PromptOrder,
        maker: SampleMaker,
        queue: QueueClient,
        recorder: Recorder,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._maker = maker
        self._queue = queue
        self._recorder = recorder
        self._sampling = SamplingParams(
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            min_p=config.rollout.min_p,
            stop_token_ids=maker.tokenizer.stop_token_ids,
            stop_strings=tuple(config.rollout.stop_strings),
        )
        self._places = Places(derived.slots, config.rollout.max_concurrent_groups)
        # where slots are idle, generation may be held up until the trainer has what is finished
        self._finished: Outbox[bytes] = Outbox(
            lambda groups: queue.put(groups, now_s()), _PUT_EVERY_S, hurry=self._places.idle
        )
        self._drops: Outbox[tuple[str, str]] = Outbox(queue.drop)
        self._under_way: dict[str, _UnderWay] = {}
        self._upcoming: dict[str, tuple[Prompt, list[PartialSample]]] = {}  # those to be issued next, in order
        self._drops_in_a_row: Counter[str] = Counter()
        self._snapshotting: asyncio.Task[None] | None = None
        self._held_up_s = 0.0
        self._asked_s: float | None = None  # when the queue was asked for budget, while it has not answered

    async def run(self, recovery: Recovery) -> None:
        """Until the queue is closed. First issues again what ``recovery`` found in flight, and goes on with it; then
        come the prompts behind its last uid. Raises what a group's task, an outbox or the queue raised."""
        if cuts := truncations(self._sampling):
            log.warning(
                "rollout: %s cuts the distribution that tokens are drawn from, but behaviour logprobs are over the "
                "whole vocabulary: importance ratios are biased. Expected top_p=1, top_k=0 and min_p=0",
                ", ".join(cuts),
            )
        if recovery.last_uid is not None:
            self._prompts.continue_after(recovery.last_uid)
        self._upcoming = dict(map(self._recovered, recovery.in_flight))
        async with asyncio.TaskGroup() as tasks:
            beside = (self._finished.run(), self._drops.run(), self._cancel_overdue())
            carriers = [tasks.create_task(work) for work in beside]
            if not self._config.rollout.engine.deterministic:
                self._snapshotting = tasks.create_task(self._snapshot())
                carriers.append(self._snapshotting)
            async with asyncio.TaskGroup() as groups:
                prompts_ended = await self._issue(groups)
            await self._finished.emptied()
            await self._drops.emptied()
            if prompts_ended:
                await self._queue.close("the prompts ended")
            for task in carriers:
                task.cancel()

    @property
    def held_up_s(self) -> float:
        """Seconds so far that a group had a place and could not start."""
        return self._held_up_s + (now_s() - self._asked_s if self._asked_s is not None else 0.0)

    async def park(self) -> None:
        """Hand over what is finished, and a last snapshot of the rest: `run` is to be cancelled then, and another goes
        on."""
        await self._finished.emptied()
        await self._drops.emptied()
        if self._snapshotting is not None:
            self._snapshotting.cancel()  # it would take samples that are being given up for those there are
            await self._tell_news()

    # -- starting groups -------------------------------------------------------------------------------------------

    def _recovered(self, item: InFlight) -> tuple[str, tuple[Prompt, list[PartialSample]]]:
        """By its uid, a group that an earlier rollouter left: as it was, or anew. In deterministic mode it starts anew:
        tokens that are prefilled have other bits than those that are decoded."""
        prompt = self._prompts.at(item.uid)
        if prompt.prompt_id != item.prompt_id:
            raise DataError(
                f"group {item.uid} was issued for prompt {item.prompt_id}, but these files have {prompt.prompt_id} "
                "there: resume with the prompt files of the first run"
            )
        samples = self._new_samples() if item.snapshot is None else unpack(item.snapshot)
        if self._config.rollout.engine.deterministic or len(samples) != self._config.rollout.n:
            self._recorder.count("rollout/restarted_samples", sum(s.begun for s in samples))
            samples = self._new_samples()
        self._recorder.count("rollout/recovered_groups")
        self._recorder.count("rollout/recovered_tokens", sum(s.drawn for s in samples))
        return item.uid, (prompt, samples)

    def _new_samples(self) -> list[PartialSample]:
        return [PartialSample() for _ in range(self._config.rollout.n)]

    async def _issue(self, groups: asyncio.TaskGroup) -> bool:
        """Until the prompts end (True) or the queue is closed (False)."""
        while True:
            wanted = await self._places.free(self._config.rollout.n)
            while len(self._upcoming) < wanted and (prompt := next(self._prompts, None)) is not None:
                self._upcoming[prompt.uid] = prompt, self._new_samples()
            if not self._upcoming:
                return True
            asked = list(itertools.islice(self._upcoming.values(), wanted))
            self._asked_s = now_s()
            issued = await self._queue.issue([Ticket(p.uid, p.prompt_id, p.epoch) for p, _ in asked])
            self._held_up_s, self._asked_s = self.held_up_s, None
            if issued == 0:
                return False
            for prompt, samples in asked[:issued]:
                if self._upcoming.pop(prompt.uid, None):  # else it is overdue meanwhile
                    self._start(groups, prompt, samples)

    def _start(self, groups: asyncio.TaskGroup, prompt: Prompt, samples: list[PartialSample]) -> None:
        """The group's samples have their places until they are generated."""
        group = self._under_way[prompt.uid] = _UnderWay(samples, [s.news for s in samples], len(samples))
        self._places.take(group.generating)
        group.task = groups.create_task(self._group(prompt, group))
        group.task.add_done_callback(lambda _: self._end(prompt.uid))

    def _end(self, uid: str) -> None:
        group = self._under_way.pop(uid)
        if group.generating:
            self._leave(group, group.generating)

    def _leave(self, group: _UnderWay, samples: int = 1) -> None:
        """So many of its samples have ended."""
        group.generating -= samples
        self._places.leave(samples, groups=int(not group.generating))

    # -- what is under way -----------------------------------------------------------------------------------------

    async def _snapshot(self) -> None:
        """Hand over what is new, as often as rollout.snapshot_every_s asks for."""
        while True:
            began_s = now_s()
            await self._tell_news()
            await asyncio.sleep(max(0.0, began_s + self._config.rollout.snapshot_every_s - now_s()))

    async def _tell_news(self) -> None:
        items: list[tuple[str, bytes]] = []
        for uid, group in list(self._under_way.items()):
            news = [s.news for s in group.samples]
            if news != group.told:
                items.append((uid, pack(uid, group.samples)))
                group.told = news
                await asyncio.sleep(0)  # packing many groups must not hold up those that wait for tokens
        if items:
            await self._queue.snapshot(items)

    async def _cancel_overdue(self) -> None:
        """Give up what the queue has dropped already. One that has just finished is the queue's to ignore."""
        while uids := await self._queue.overdue():
            for uid in uids:
                group, upcoming = self._under_way.get(uid), self._upcoming.pop(uid, None)
                if group is not None and group.task is not None:
                    group.task.cancel()
                if group or upcoming:
                    self._recorder.count("rollout/cancelled_groups")

    # -- one group -------------------------------------------------------------------------------------------------

    async def _group(self, prompt: Prompt, group: _UnderWay) -> None:
        issued_s = now_s()
        tokens = self._maker.tokenizer.encode(prompt)
        one_version = not self._config.async_training.partial_rollout
        task = Task(prompt, tokens, self._sampling, name=prompt.uid, key=prompt.uid, one_version=one_version)
        made = await self._maker.make(task, group.samples, ended=lambda: self._leave(group))
        generated_s = now_s()
        judged = await self._maker.score(prompt, [_trainable(s) for s in made])
        failed = [s for s in judged if isinstance(s, Failed)]
        samples = [s for s in judged if isinstance(s, Sample)]
        for f in failed:
            self._recorder.count(f"rollout/failed_samples/{f.reason}")
        self._count(samples)
        if reason := self._drop_reason(samples, failed):
            self._drop(prompt, reason, failed)
            return
        self._drops_in_a_row.clear()
        times = {"issued_s": issued_s, "generated_s": generated_s, "finished_s": now_s()}
        if began := [s.first_token_s for s in group.samples if s.first_token_s is not None]:
            times["started_s"] = min(began)
        whole = Group.from_samples(prompt.uid, prompt.prompt_id, prompt.epoch, tokens, samples, times)
        self._finished.add(whole.to_bytes())

    def _drop(self, prompt: Prompt, reason: str, failed: Sequence[Failed]) -> None:
        self._drops.add((prompt.uid, reason))
        self._drops_in_a_row[reason] += 1
        if self._drops_in_a_row.total() >= self._config.rollout.max_consecutive_drops:
            counts = ", ".join(f"{n} × {reason}" for reason, n in self._drops_in_a_row.most_common())
            last = f"; the last one: {failed[0].message}" if failed and failed[0].message else ""
            raise NothingToTrain(
                f"the last {self._drops_in_a_row.total()} groups were all dropped ({counts}){last}. "
                "Look at the task, the reward, or algorithm.filter_zero_variance"
            )

    def _drop_reason(self, samples: Sequence[Sample], failed: Sequence[Failed]) -> str | None:
        if len(samples) < self._config.rollout.min_group_size:
            return failed[0].reason if failed else "too_small"
        a = self._config.algorithm
        rewards = {effective_reward(s.reward, s.finish, a.overlong, a.overlong_penalty) for s in samples} - {None}
        if len(rewards) <= 1:
            self._recorder.count("rollout/zero_variance_groups")
            if a.filter_zero_variance:
                return "zero_variance"
        return None

    def _count(self, samples: Sequence[Sample]) -> None:
        """What generation gives, before any filter: the honest accuracy of the policy at work."""
        self._recorder.count("rollout/groups")
        self._recorder.count("rollout/samples", len(samples))
        self._recorder.count("rollout/partial_samples", sum(len({x.version for x in s.spans}) > 1 for s in samples))
        for s in samples:
            self._recorder.count("rollout/sum/reward", s.reward)
            for name, value in s.metrics.items():
                self._recorder.count(f"rollout/sum/{name}", value)
