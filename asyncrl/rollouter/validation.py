"""Validation beside training: held-out prompts, behind the training samples in priority, answered under one version."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from asyncrl.config.schema import Config
from asyncrl.rollouter.engine import SamplingParams
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.samples import Failed, SampleMaker, Task
from asyncrl.sample import PolicyVersion, Prompt, Sample
from asyncrl.telemetry.recorder import Recorder

ROUNDS = 4  # syncs wait for a validation, so that a second one is needed only after a restart


class Validation:
    """Samples end as in training, but are drawn at ``validation.temperature`` from the whole vocabulary."""

    def __init__(self, config: Config, maker: SampleMaker, recorder: Recorder) -> None:
        self._config, self._maker, self._recorder = config.validation, maker, recorder
        self._sampling = SamplingParams(
            config.validation.temperature,
            stop_token_ids=maker.tokenizer.stop_token_ids,
            stop_strings=tuple(config.rollout.stop_strings),
        )
        self._rounds = itertools.count()

    async def run(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Answer each prompt ``validation.samples`` times, all under one policy version.

        Returns the means of the reward and of what it reports, and the version (``lineage`` and ``version``, its
        number), under ``validation/``. Raises RuntimeError if the answers of the last round are still of several."""
        answers: dict[str, list[Sample | Failed]] = {}
        with self._recorder.span("rollout/validate", prompts=len(prompts)):
            old: Sequence[Prompt] = prompts
            for _ in range(ROUNDS):
                number = next(self._rounds)
                answers |= zip([p.uid for p in old], await asyncio.gather(*(self._answer(p, number) for p in old)))
                newest = max(_versions(s for samples in answers.values() for s in samples), default=None)
                old = [p for p in prompts if _versions(answers[p.uid]) - {newest}]
                if not old:
                    return self._values(answers.values(), newest)
        raise RuntimeError(
            f"validation: after {ROUNDS} rounds {len(old)} of {len(prompts)} prompts are not answered under the newest "
            f"version {newest}: it changes faster than they are answered"
        )

    async def _answer(self, prompt: Prompt, number: int) -> list[Sample | Failed]:
        task = Task(
            prompt,
            self._maker.tokenizer.encode(prompt),
            self._sampling,
            name=f"validation/{number}/{prompt.uid}",
            key=f"validation/{prompt.uid}",
            one_version=True,
            priority=1,
        )
        made = await self._maker.make(task, [PartialSample() for _ in range(self._config.samples)])
        return await self._maker.score(prompt, made)  # a call per prompt, as reward.timeout_s is for one group

    def _values(self, answers: Iterable[Sequence[Sample | Failed]], version: PolicyVersion | None) -> dict[str, float]:
        judged = [s for group in answers for s in group]
        scored = [s for s in judged if isinstance(s, Sample)]
        values: dict[str, float] = {
            "validation/samples": len(scored),
            "validation/failed": len(judged) - len(scored),
        }
        if version is not None:
            values |= {"validation/version": version.number, "validation/lineage": version.lineage}
        if scored:
            values["validation/reward"] = float(np.mean([s.reward for s in scored]))
            for name in sorted({k for s in scored for k in s.metrics}):
                values[f"validation/{name}"] = float(np.mean([s.metrics.get(name, 0.0) for s in scored]))
        return values


def _versions(samples: Iterable[Sample | Failed]) -> set[PolicyVersion]:
    """Those that the tokens of these samples are of."""
    return {span.version for s in samples if isinstance(s, Sample) for span in s.spans}
