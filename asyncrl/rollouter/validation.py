"""Validation: answers held-out prompts, during training at lower priority than it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.limiter import GroupPlaces, InFlightLimiter
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.samples import FailedSample, GroupTask, SampleMaker
from asyncrl.rollouter.sampling import validation_sampling
from asyncrl.rollouter.validated import ROUNDS, Validated, versions_of
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample


class Validation:
    """Runs validations one after another; rounds are numbered over all of them, so that requests have unique ids.

    ``slots``: of the replicas. Prompts begin as these are free: one that waited for a slot would use up
    `rollout.max_sample_s`, and have its agents running. Since no staleness budget bounds how many begin, a sample has
    its place from the start, and not only from its agent's first call on."""

    def __init__(self, config: Config, slots: int, maker: SampleMaker, recorder: Recorder) -> None:
        self._config, self._maker, self._recorder = config.validation, maker, recorder
        self._sampling = validation_sampling(config, maker.tokenizer.stop_token_ids)
        self._rounds = itertools.count()
        self.limiter, self._next = InFlightLimiter(slots, max_groups=0), asyncio.Lock()

    async def run(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Answer each prompt, see `answers`. Returns its `Validated.values`."""
        return (await self.part(prompts)).values()

    async def part(self, prompts: Sequence[Prompt]) -> Validated:
        """Answer each prompt of a part of those to validate, see `answers`."""
        answers = await self.answers(prompts)
        return Validated.of([(p.data_source, answers[p.uid]) for p in prompts])

    async def answers(self, prompts: Sequence[Prompt]) -> Mapping[str, Sequence[Sample | FailedSample]]:
        """By the prompt's uid: ``validation.samples`` answers to each.

        All answers are of one version unless a sync has passed the validation, see ``validation.hold_s``. Those of an
        older lineage are repeated in the next round. Raises RuntimeError if lineages are still mixed after `ROUNDS`
        rounds."""
        answers: dict[str, list[Sample | FailedSample]] = {}
        with self._recorder.span("rollout/validate", prompts=len(prompts)):
            outdated: Sequence[Prompt] = prompts
            for _ in range(ROUNDS):
                number = next(self._rounds)
                answered = await asyncio.gather(*(self._answer(p, number) for p in outdated))
                answers |= zip([p.uid for p in outdated], answered)
                versions = versions_of(s for samples in answers.values() for s in samples)
                lineage = max((version.lineage for version in versions), default=0)
                outdated = [p for p in prompts if any(v.lineage < lineage for v in versions_of(answers[p.uid]))]
                if not outdated:
                    return answers
        raise RuntimeError(
            f"validation: after {ROUNDS} rounds {len(outdated)} of {len(prompts)} prompts are not answered under the "
            f"newest lineage {lineage}: the trainer is restored faster than prompts are answered"
        )

    async def _answer(self, prompt: Prompt, number: int) -> list[Sample | FailedSample]:
        async with self._next:
            await self.limiter.room(self._config.samples)
            places = GroupPlaces(self.limiter, self._config.samples, reserved=True)
        try:
            return await self._answers(prompt, number, places)
        finally:
            places.close()

    async def _answers(self, prompt: Prompt, number: int, places: GroupPlaces) -> list[Sample | FailedSample]:
        encoded = self._maker.encode(prompt)
        task = GroupTask(
            prompt,
            encoded.tokens,
            self._sampling,
            name=f"validation/{number}/{prompt.uid}",
            key=f"validation/{prompt.uid}",
            one_version=False,  # while syncs wait there is only one; one that a sync has passed must come to its end
            priority=1,
            refused=encoded.refused,
        )
        made = await self._maker.make(task, [PartialSample() for _ in range(self._config.samples)], places)
        return await self._maker.score(prompt, made)  # one call per prompt, since reward.timeout_s is per group
