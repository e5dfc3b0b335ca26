"""Validation during training: answers held-out prompts, at lower priority than training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.samples import FailedSample, GroupTask, SampleMaker
from asyncrl.rollouter.sampling import validation_sampling
from asyncrl.rollouter.sources import validation_means
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample
from asyncrl.types.versions import PolicyVersion

ROUNDS = 4  # a restore of the trainer makes a second one necessary


class Validation:
    """Runs validations one after another; rounds are numbered over all of them, so that requests have unique ids."""

    def __init__(self, config: Config, maker: SampleMaker, recorder: Recorder) -> None:
        self._config, self._maker, self._recorder = config.validation, maker, recorder
        self._sampling = validation_sampling(config, maker.tokenizer.stop_token_ids)
        self._rounds = itertools.count()

    async def run(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Answer each prompt, see `answers`. Returns means of the reward and its metrics, ``lineage`` and the
        number of the newest version that gave an answer (``version``), and that of the oldest (``oldest_version``) if
        it is another, all under ``validation/``."""
        answers = await self.answers(prompts)
        return self._values(prompts, answers, _versions(s for samples in answers.values() for s in samples))

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
                versions = _versions(s for samples in answers.values() for s in samples)
                lineage = max((version.lineage for version in versions), default=0)
                outdated = [p for p in prompts if any(v.lineage < lineage for v in _versions(answers[p.uid]))]
                if not outdated:
                    return answers
        raise RuntimeError(
            f"validation: after {ROUNDS} rounds {len(outdated)} of {len(prompts)} prompts are not answered under the "
            f"newest lineage {lineage}: the trainer is restored faster than prompts are answered"
        )

    async def _answer(self, prompt: Prompt, number: int) -> list[Sample | FailedSample]:
        task = GroupTask(
            prompt,
            self._maker.tokenizer.encode(prompt),
            self._sampling,
            name=f"validation/{number}/{prompt.uid}",
            key=f"validation/{prompt.uid}",
            one_version=False,  # while syncs wait there is only one; one that a sync has passed must come to its end
            priority=1,
        )
        made = await self._maker.make(task, [PartialSample() for _ in range(self._config.samples)])
        return await self._maker.score(prompt, made)  # one call per prompt, since reward.timeout_s is per group

    def _values(
        self,
        prompts: Sequence[Prompt],
        answers: Mapping[str, Sequence[Sample | FailedSample]],
        versions: set[PolicyVersion],
    ) -> dict[str, float]:
        all_samples = [s for group in answers.values() for s in group]
        scored = [s for s in all_samples if isinstance(s, Sample)]
        values: dict[str, float] = {
            "validation/samples": len(scored),
            "validation/failed": len(all_samples) - len(scored),
        }
        if versions:
            oldest, newest = min(versions), max(versions)
            values |= {"validation/lineage": newest.lineage, "validation/version": newest.number}
            if oldest != newest:
                values["validation/oldest_version"] = oldest.number
        if scored:
            values["validation/reward"] = float(np.mean([s.reward for s in scored if s.reward is not None]))
            for name in sorted({k for s in scored for k in s.metrics}):
                values[f"validation/{name}"] = float(np.mean([s.metrics.get(name, 0.0) for s in scored]))
        answered = [(p.data_source, [s for s in answers[p.uid] if isinstance(s, Sample)]) for p in prompts]
        return values | validation_means(answered)


def _versions(samples: Iterable[Sample | FailedSample]) -> set[PolicyVersion]:
    """Versions that sampled these tokens."""
    return {version for s in samples if isinstance(s, Sample) for version in s.versions}
