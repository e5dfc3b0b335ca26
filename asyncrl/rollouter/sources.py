"""Reward, success and length of samples by the data source of their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl.types.samples import Sample

MAX_SOURCES = 32  # further ones are counted together, as OTHER
OTHER = "other"

_PREFIX = "rollout/source/"


class SourceCounts:
    """Counters ``rollout/source/<source>/<figure>``, sums over samples, of which `source_means` makes means."""

    def __init__(self) -> None:
        self._sources: set[str] = set()

    def of(self, source: str, samples: Iterable[Sample]) -> dict[str, float]:
        if len(self._sources) < MAX_SOURCES:
            self._sources.add(source)
        name = source if source in self._sources else OTHER
        made = list(samples)
        rewards = [s.reward for s in made if s.reward is not None]
        sums = {
            "samples": len(made),
            "reward": sum(rewards),
            "success": sum(s.succeeded for s in made),
            "response_tokens": sum(len(sequence.tokens) for s in made for sequence in s.sequences),
        }
        return {f"{_PREFIX}{name}/{figure}": value for figure, value in sums.items()}


def source_means(counters: Mapping[str, float], into: str = _PREFIX) -> dict[str, float]:
    """Mean ``<into><source>/reward``, ``…/success`` and ``…/response_tokens`` of each source with samples."""
    values = {}
    for name, samples in counters.items():
        if name.startswith(_PREFIX) and name.endswith("/samples") and samples:
            source = name.removeprefix(_PREFIX).removesuffix("/samples")
            for figure in ("reward", "success", "response_tokens"):
                values[f"{into}{source}/{figure}"] = counters.get(f"{_PREFIX}{source}/{figure}", 0.0) / samples
    return values


def several_sources(counters: Mapping[str, float]) -> bool:
    """True if samples of more than one source were counted: else the figures of all samples say the same."""
    return sum(name.startswith(_PREFIX) and name.endswith("/samples") for name in counters) > 1
