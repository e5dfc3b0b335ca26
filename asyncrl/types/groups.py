"""Group: the samples of one prompt, the unit that the sample queue moves.

A group crosses processes and Python environments as one flat buffer of aligned columns, read without a copy::

    data = group.to_bytes()          # one buffer: spool it, hash it, send it
    again = Group.from_buffer(data)  # columns are views into `data`
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from asyncrl.types.columns import Buffer, Layout
from asyncrl.types.samples import Sample, sequence_problem
from asyncrl.types.versions import PolicyVersion, VersionSpan

_GROUP = Layout("group", b"ARLG")


@dataclass
class Group:
    """Samples of one prompt, in columns. ``S`` samples, ``Q`` token sequences (one per sample in single-turn tasks),
    ``P`` prompt tokens, ``R`` response tokens, ``V`` spans.

    ====================  ========  =======  ================================================
    column                dtype     shape    meaning
    ====================  ========  =======  ================================================
    ``prompt_tokens``     int32     [P]      shared by all samples
    ``sample_index``      int32     [S]      index among the ``n`` samples (failed ones are absent)
    ``rewards``           float32   [S]      NaN before the sample has one
    ``finish``            uint8     [S]      FinishReason
    ``metrics[name]``     float32   [S]      metrics from the reward function
    ``sequence_sample``   int32     [Q]      row of the sample that the sequence belongs to, ascending
    ``prefix``            int32     [Q]      tokens of the prompt with which the sequence begins
    ``offsets``           int64     [Q+1]    sequence q owns response tokens offsets[q]:offsets[q+1]
    ``tokens``            int32     [R]      response tokens: all after the prefix
    ``logprobs``          float32   [R]      behaviour logprobs
    ``loss_mask``         bool      [R]      tokens that the sequence trains
    ``span_offsets``      int64     [Q+1]    CSR over the spans below
    ``span_start``        int32     [V]      first token of the span, counted within its sequence's response
    ``span_lineage``      int64     [V]
    ``span_number``       int64     [V]
    ``span_mixed_kv``     bool      [V]
    ``span_replica``      int32     [V]      index in ``replicas``
    ``extras[name]``      any       ragged   (values, offsets [Q+1]), such as masks or routed experts
    ====================  ========  =======  ================================================
    """

    uid: str
    prompt_id: str
    epoch: int
    prompt_tokens: np.ndarray
    sample_index: np.ndarray
    rewards: np.ndarray
    finish: np.ndarray
    sequence_sample: np.ndarray
    prefix: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    span_offsets: np.ndarray
    span_start: np.ndarray
    span_lineage: np.ndarray
    span_number: np.ndarray
    span_mixed_kv: np.ndarray
    span_replica: np.ndarray
    #: names of the replicas that sampled the group
    replicas: list[str]
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    extras: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    #: seconds on the rollouter's clock, by name: issued_s, started_s (first token), generated_s (all samples),
    #: finished_s (rewards)
    times: dict[str, float] = field(default_factory=dict)
    #: refusals by the queue before this attempt
    attempt: int = 0
    #: of its prompt
    data_source: str = ""

    @property
    def succeeded(self) -> np.ndarray:
        """bool [S]: see `asyncrl.types.samples.Sample.succeeded`."""
        accuracy = self.metrics.get("accuracy", np.full(len(self.rewards), np.nan))
        return np.where(np.isnan(accuracy), self.rewards, accuracy) > 0

    @classmethod
    def from_samples(
        cls,
        uid: str,
        prompt_id: str,
        epoch: int,
        prompt_tokens: np.ndarray,
        samples: Sequence[Sample],
        times: Mapping[str, float] | None = None,
        attempt: int = 0,
        data_source: str = "",
    ) -> Group:
        """Gathers samples into columns. Raises ValueError for an empty group, a sample without sequences, columns of
        unequal length, and a prefix or version spans out of place."""
        if not samples:
            raise ValueError(f"group {uid}: expected at least one sample, found none; drop the group instead")
        for s in samples:
            if not s.sequences:
                raise ValueError(f"group {uid} sample {s.index}: expected at least one sequence, found none")
            for sequence in s.sequences:
                if problem := sequence_problem(sequence, len(prompt_tokens)):
                    raise ValueError(f"group {uid} sample {s.index}: {problem}")
        sequences = [q for s in samples for q in s.sequences]
        spans = [span for q in sequences for span in q.spans]
        replicas = sorted({x.replica for x in spans})
        return cls(
            uid=uid,
            prompt_id=prompt_id,
            epoch=epoch,
            prompt_tokens=np.ascontiguousarray(prompt_tokens, dtype=np.int32),
            sample_index=np.array([s.index for s in samples], dtype=np.int32),
            rewards=np.array([np.nan if s.reward is None else s.reward for s in samples], dtype=np.float32),
            finish=np.array([s.finish for s in samples], dtype=np.uint8),
            sequence_sample=np.array([row for row, s in enumerate(samples) for _ in s.sequences], dtype=np.int32),
            prefix=np.array([len(prompt_tokens) if q.prefix is None else q.prefix for q in sequences], dtype=np.int32),
            offsets=_offsets([len(q.tokens) for q in sequences]),
            tokens=_concat([q.tokens for q in sequences], np.int32),
            logprobs=_concat([q.logprobs for q in sequences], np.float32),
            loss_mask=_concat([q.loss_mask for q in sequences], np.bool_),
            span_offsets=_offsets([len(q.spans) for q in sequences]),
            span_start=np.array([x.start for x in spans], dtype=np.int32),
            span_lineage=np.array([x.version.lineage for x in spans], dtype=np.int64),
            span_number=np.array([x.version.number for x in spans], dtype=np.int64),
            span_mixed_kv=np.array([x.mixed_kv for x in spans], dtype=np.bool_),
            span_replica=np.array([replicas.index(x.replica) for x in spans], dtype=np.int32),
            replicas=replicas,
            metrics={
                k: np.array([s.metrics.get(k, np.nan) for s in samples], dtype=np.float32)
                for k in sorted({k for s in samples for k in s.metrics})
            },
            extras={
                k: _ragged([q.extras.get(k) for q in sequences])
                for k in sorted({k for q in sequences for k in q.extras})
            },
            times=dict(times or {}),
            attempt=attempt,
            data_source=data_source,
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.sample_index)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [Q]"""
        return np.diff(self.offsets)

    def sequences(self, s: int) -> range:
        """Rows of the sequences of sample ``s`` (a row, not a sample index)."""
        first, end = np.searchsorted(self.sequence_sample, [s, s + 1])
        return range(int(first), int(end))

    def response(self, q: int) -> slice:
        """Slice of the response columns for sequence ``q``."""
        return slice(int(self.offsets[q]), int(self.offsets[q + 1]))

    def spans(self, q: int) -> list[VersionSpan]:
        """Version spans of sequence ``q``."""
        lo, hi = int(self.span_offsets[q]), int(self.span_offsets[q + 1])
        return [
            VersionSpan(
                int(self.span_start[i]),
                PolicyVersion(int(self.span_lineage[i]), int(self.span_number[i])),
                bool(self.span_mixed_kv[i]),
                self.replicas[self.span_replica[i]],
            )
            for i in range(lo, hi)
        ]

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """``values`` [V] of the version spans, repeated for each of their tokens: [T], as the response columns."""
        start, end = self.span_bounds()
        return np.repeat(values, end - start)

    def trained_versions(self) -> tuple[PolicyVersion, PolicyVersion] | None:
        """Oldest and newest version that sampled a trained token; None if no token is trained.

        Ordered by number first: a new lineage continues from the number of its checkpoint, so the number is the
        position in training. Staleness counts from the oldest."""
        lineages, numbers = self.span_lineage, self.span_number
        if not len(numbers):
            return None
        if (numbers == numbers[0]).all() and (lineages == lineages[0]).all():
            if not self.loss_mask.any():
                return None
            only = PolicyVersion(int(lineages[0]), int(numbers[0]))
            return only, only
        start, end = self.span_bounds()
        trained = np.concatenate([[0], np.cumsum(self.loss_mask)])
        used = np.flatnonzero(trained[end] > trained[start])
        if not len(used):
            return None
        order = used[np.lexsort((lineages[used], numbers[used]))]
        oldest, newest = (PolicyVersion(int(lineages[v]), int(numbers[v])) for v in (order[0], order[-1]))
        return oldest, newest

    def span_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [V] each: first response token of each span, and the end of the span (exclusive)."""
        sequence = np.repeat(np.arange(len(self.prefix)), np.diff(self.span_offsets))
        start = self.offsets[sequence] + self.span_start
        last = np.append(sequence[1:] != sequence[:-1], True)[: len(sequence)]
        end = np.append(start[1:], 0)[: len(start)]
        end[last] = self.offsets[sequence[last] + 1]
        return start, end

    # -- one buffer ------------------------------------------------------------------------------------------------

    _COLUMNS = (
        "prompt_tokens sample_index rewards finish sequence_sample prefix offsets tokens logprobs loss_mask "
        "span_offsets span_start span_lineage span_number span_mixed_kv span_replica"
    ).split()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in self._COLUMNS}
        arrays |= {f"metrics/{k}": v for k, v in self.metrics.items()}
        for k, (values, offsets) in self.extras.items():
            arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"] = values, offsets
        return arrays

    def to_bytes(self) -> bytes:
        names = ("uid", "prompt_id", "epoch", "replicas", "times", "attempt", "data_source")
        meta = {name: getattr(self, name) for name in names}
        return _GROUP.to_bytes(meta, self._arrays())

    @classmethod
    def from_buffer(cls, data: Buffer) -> Group:
        """Reads a group without copying: its columns are views that keep ``data`` alive.

        Raises ValueError for a buffer that is not a group, has another format, or is truncated."""
        meta, arrays = _GROUP.from_buffer(data)
        columns = {name: arrays.pop(name) for name in cls._COLUMNS}
        metrics = {k.split("/", 1)[1]: v for k, v in arrays.items() if k.startswith("metrics/")}
        values = (k.removesuffix("/values") for k in arrays if k.startswith("extras/") and k.endswith("/values"))
        names = [k.removeprefix("extras/") for k in values]  # which may have slashes of their own
        extras = {k: (arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"]) for k in names}
        fields: dict[str, Any] = meta | columns
        return cls(**fields, metrics=metrics, extras=extras)


def _ragged(parts: Sequence[np.ndarray | None]) -> tuple[np.ndarray, np.ndarray]:
    """(values, offsets) of columns with any number of rows each; None: no rows."""
    given = [np.asarray(part) for part in parts if part is not None]
    return np.concatenate(given), _offsets([0 if part is None else len(part) for part in parts])


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *itertools.accumulate(lengths)], np.int64)


def _concat(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(p, dtype=dtype) for p in parts]) if parts else np.empty(0, dtype)


def computed_tokens(groups: Iterable[Group]) -> int:
    """Tokens that a training pass computes: of each sequence its response and its part of the prompt."""
    return sum(int(group.prefix.sum()) + len(group.tokens) for group in groups)


def groups_digest(uids: Iterable[str], before: int = 0) -> int:
    """64-bit digest of a set of groups, in any order. ``before``: digest of those to which ``uids`` are added."""
    return (before + sum(xxhash.xxh3_64_intdigest(uid.encode()) for uid in uids)) % 2**64
