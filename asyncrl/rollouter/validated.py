"""Figures of a validation, which several rollouters may share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.rollouter.sources import SourceCounts, several_sources, source_means
from asyncrl.types.samples import Sample
from asyncrl.types.versions import PolicyVersion

NO_LINEAGE = -1  # older than any
ROUNDS = 4  # a restore of the trainer makes a second one necessary


@dataclass(frozen=True)
class Validated:
    """A validation, or a shard's part of one: counts of its samples, and sums over them. ``rewarded``: samples with a
    reward; ``versions``: which sampled their tokens; ``sources``: see `asyncrl.rollouter.sources.SourceCounts`."""

    samples: int
    failed: int
    rewarded: int
    reward: float
    metrics: Mapping[str, float]
    versions: frozenset[PolicyVersion]
    sources: Mapping[str, float]

    @classmethod
    def of(cls, answered: Sequence[tuple[str, Sequence[object]]]) -> Validated:
        """``answered``: the samples of each prompt, also failed ones, with its data source."""
        scored = [(source, [s for s in samples if isinstance(s, Sample)]) for source, samples in answered]
        made, counts = [s for _, samples in scored for s in samples], SourceCounts()
        rewards = [s.reward for s in made if s.reward is not None]
        return cls(
            samples=len(made),
            failed=sum(len(samples) for _, samples in answered) - len(made),
            rewarded=len(rewards),
            reward=sum(rewards),
            metrics=_added(s.metrics for s in made),
            versions=frozenset(versions_of(made)),
            sources=_added(counts.of(source, samples) for source, samples in scored),
        )

    @classmethod
    def together(cls, parts: Sequence[Validated]) -> Validated:
        return cls(
            samples=sum(part.samples for part in parts),
            failed=sum(part.failed for part in parts),
            rewarded=sum(part.rewarded for part in parts),
            reward=sum(part.reward for part in parts),
            metrics=_added(part.metrics for part in parts),
            versions=frozenset().union(*(part.versions for part in parts)),
            sources=_added(part.sources for part in parts),
        )

    @property
    def lineage(self) -> int:
        """The newest one; `NO_LINEAGE` without tokens."""
        return max((version.lineage for version in self.versions), default=NO_LINEAGE)

    def values(self) -> dict[str, float]:
        """Means of the reward and its metrics, ``lineage`` and the number of the newest version that gave an answer
        (``version``), and that of the oldest (``oldest_version``) if it is another, all under ``validation/``."""
        values: dict[str, float] = {"validation/samples": self.samples, "validation/failed": self.failed}
        if self.versions:
            oldest, newest = min(self.versions), max(self.versions)
            values |= {"validation/lineage": newest.lineage, "validation/version": newest.number}
            if oldest != newest:
                values["validation/oldest_version"] = oldest.number
        if self.rewarded:
            values["validation/reward"] = self.reward / self.rewarded
        for name, total in sorted(self.metrics.items()):
            values[f"validation/{name}"] = total / self.samples
        return values | (source_means(self.sources, "validation/source/") if several_sources(self.sources) else {})


def versions_of(samples: Iterable[object]) -> set[PolicyVersion]:
    """Versions that sampled these tokens."""
    return {version for s in samples if isinstance(s, Sample) for version in s.versions}


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, value in part.items():
            sums[name] += value
    return dict(sums)
