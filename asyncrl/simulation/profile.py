"""The figures of a run's parts that a simulation needs, as a JSON file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple


class ProfileError(ValueError):
    """The file is no profile, or lacks a figure."""


@dataclass(frozen=True)
class EngineFigures:
    """One replica. A decode step of R rows that hold C tokens of context together takes
    ``step_s + row_s · R + context_token_s · C`` seconds, and computing the KV of a prompt token ``prefill_token_s``.
    New tokens are reported every ``report_s``, or at once if a request ended and none waits for its slot."""

    step_s: float
    row_s: float
    context_token_s: float
    prefill_token_s: float
    report_s: float


@dataclass(frozen=True)
class TrainerFigures:
    """All ``ranks`` together: a step takes ``step_s``, each of its parts after the first ``part_s`` more, and each
    token ``token_s``; a sample's tokens include its prompt's. Other numbers of ranks share the tokens. ``stage_s``: of
    the state for a checkpoint."""

    ranks: int
    step_s: float
    part_s: float
    token_s: float
    stage_s: float


@dataclass(frozen=True)
class SyncFigures:
    """A session: ``nbytes`` at ``bytes_per_s``, and what each phase takes besides."""

    nbytes: int
    bytes_per_s: float
    plan_s: float
    pause_s: float
    unload_s: float
    load_s: float
    verify_s: float
    commit_s: float
    reload_s: float
    resume_s: float

    @property
    def transfer_s(self) -> float:
        return self.nbytes / self.bytes_per_s


class Turn(NamedTuple):
    """Tokens that the policy samples, then those that it only reads, and for how many seconds it waits for them. The
    last turn of a sample reads nothing."""

    sampled: int
    observed: int = 0
    wait_s: float = 0.0


@dataclass(frozen=True)
class SampleFigures:
    turns: tuple[Turn, ...]
    reward: float = 0.0

    @cached_property
    def starts(self) -> dict[int, Turn]:
        """Each turn by the number of response tokens before it."""
        found, at = {}, 0
        for turn in self.turns:
            found[at] = turn
            at += turn.sampled + turn.observed
        return found


@dataclass(frozen=True)
class GroupFigures:
    """A group of samples of one prompt, as some run has generated it."""

    prompt_tokens: int
    samples: tuple[SampleFigures, ...]


@dataclass(frozen=True)
class Profile:
    """``reward_s``: from a group's last token until its rewards are known; ``flush_s``: of the journal. ``about``:
    where the figures come from."""

    engine: EngineFigures
    trainer: TrainerFigures
    sync: SyncFigures
    groups: tuple[GroupFigures, ...]
    reward_s: float
    flush_s: float
    about: Mapping[str, Any] = field(default_factory=dict)

    def check(self, parts: bool, checkpoints: bool, staged: bool) -> None:
        """Raises ProfileError if it lacks what such a run needs: batches in parts, checkpoints, param_sync.staging
        full."""
        for needed, value, name in (
            (parts, self.trainer.part_s, "trainer.part_s"),
            (checkpoints, self.trainer.stage_s, "trainer.stage_s"),
            (staged, self.sync.load_s, "sync.load_s"),
        ):
            if needed and math.isnan(value):
                by = _MEASURED_BY[name.partition(".")[2]]
                raise ProfileError(f"the profile lacks {name}, which this configuration needs; {by} measures it")

    def group(self, uid: str) -> GroupFigures:
        """The group that stands for group ``uid`` of a simulated run: the same in every run."""
        digest = hashlib.blake2b(uid.encode(), digest_size=8).digest()
        return self.groups[int.from_bytes(digest, "little") % len(self.groups)]

    def sample(self, uid: str, index: int) -> SampleFigures:
        samples = self.group(uid).samples
        return samples[index % len(samples)]

    def write(self, path: Path) -> None:
        groups = [[g.prompt_tokens, [[s.reward, *s.turns] for s in g.samples]] for g in self.groups]
        measured = lambda part: {k: v for k, v in dataclasses.asdict(part).items() if not math.isnan(v)}
        figures = {name: measured(getattr(self, name)) for name in ("engine", "trainer", "sync")}
        rest = {"reward_s": self.reward_s, "flush_s": self.flush_s, "about": dict(self.about)}
        path.write_text(json.dumps({**figures, **rest, "groups": groups}) + "\n")

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Raises ProfileError, which names what is missing and what would measure it."""
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise ProfileError(f"{path}: expected the profile.json of a finished run, found none ({e})") from None
        if not isinstance(found, dict):
            raise ProfileError(f"{path}: expected a JSON object, found {type(found).__name__}")
        groups = tuple(_group(path, row) for row in _get(path, found, "groups", list))
        if not groups:
            raise ProfileError(f"{path}: groups: expected at least one, found none; a run that trained a step has them")
        engine = _figures(path, found, "engine", EngineFigures)
        if not engine.step_s + engine.row_s:
            raise ProfileError(f"{path}: engine: expected a decode step that takes some time, found step_s and row_s 0")
        return cls(
            engine,
            _figures(path, found, "trainer", TrainerFigures),
            _figures(path, found, "sync", SyncFigures),
            groups,
            _number(path, found, "reward_s"),
            _number(path, found, "flush_s"),
            _get(path, found, "about", dict),
        )


#: which run measures what a profile may lack
_MEASURED_BY = {
    "part_s": "a run whose batches come in parts, at a staleness threshold below 1",
    "stage_s": "a run that saved a checkpoint",
    "load_s": "a run with param_sync.staging=full",
}
_ONLY_SOME_NEED = frozenset({"part_s", "stage_s", "load_s"})
_POSITIVE = frozenset({"ranks", "bytes_per_s", "report_s"})  # without a speed, no time would pass


def _figures(path: Path, found: Mapping[str, Any], part: str, kind: type) -> Any:
    values = _get(path, found, part, dict)
    return kind(**{f.name: _number(path, values, f.name, f"{part}.") for f in dataclasses.fields(kind)})


def _number(path: Path, found: Mapping[str, Any], name: str, where: str = "") -> float:
    value: Any = found.get(name)
    if value is None and name in _ONLY_SOME_NEED:
        return math.nan
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (name in _POSITIVE and not value):
        least = "above 0" if name in _POSITIVE else "of at least 0"
        by = _MEASURED_BY.get(name, "a finished run of at least three steps")
        raise ProfileError(f"{path}: {where}{name}: expected a number {least}, found {value!r}; {by} measures it")
    return value


def _get(path: Path, found: Mapping[str, Any], name: str, kind: type) -> Any:
    value = found.get(name)
    if not isinstance(value, kind):
        raise ProfileError(
            f"{path}: {name}: expected a JSON {'array' if kind is list else 'object'}, found {value!r:.60}; "
            "a finished run of at least three steps measures it"
        )
    return value


def _group(path: Path, row: Any) -> GroupFigures:
    try:
        prompt_tokens, samples = row
        made = tuple(
            SampleFigures(tuple(Turn(int(a), int(b), float(c)) for a, b, c in turns), float(reward))
            for reward, *turns in samples
        )
        if prompt_tokens < 1 or not made or not all(s.turns and all(t.sampled > 0 for t in s.turns) for s in made):
            raise ValueError("a prompt, a sample or a turn without tokens")
        if not all(t.observed >= 0 and 0 <= t.wait_s < math.inf for s in made for t in s.turns):
            raise ValueError("a turn that reads or waits less than nothing, or for ever")
        return GroupFigures(int(prompt_tokens), made)
    except (TypeError, ValueError) as e:
        raise ProfileError(
            f"{path}: groups: expected [prompt tokens, [[reward, [sampled, observed, wait], …], …]], found "
            f"{row!r:.60} ({e})"
        ) from None
