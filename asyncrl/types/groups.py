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
from asyncrl.types.samples import Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

_GROUP = Layout("group", b"ARLG")


@dataclass
class Group:
    """Samples of one prompt, in columns. ``S`` samples, ``P`` prompt tokens, ``R`` response tokens, ``V`` spans.

    ====================  ========  =======  ================================================
    column                dtype     shape    meaning
    ====================  ========  =======  ================================================
    ``prompt_tokens``     int32     [P]      shared by all samples
    ``sample_index``      int32     [S]      index among the ``n`` samples (failed ones are absent)
    ``offsets``           int64     [S+1]    sample s owns response tokens offsets[s]:offsets[s+1]
    ``tokens``            int32     [R]      response tokens
    ``logprobs``          float32   [R]      behaviour logprobs
    ``loss_mask``         bool      [R]      tokens that the policy sampled
    ``rewards``           float32   [S]
    ``finish``            uint8     [S]      FinishReason
    ``span_offsets``      int64     [S+1]    CSR over the spans below
    ``span_start``        int32     [V]      first token of the span, counted within its sample
    ``span_lineage``      int64     [V]
    ``span_number``       int64     [V]
    ``span_mixed_kv``     bool      [V]
    ``span_replica``      int32     [V]      index in ``replicas``
    ``metrics[name]``     float32   [S]      metrics from the reward function
    ``extras[name]``      any       ragged   (values, offsets [S+1]), such as masks or routed experts
    ====================  ========  =======  ================================================
    """

    uid: str
    prompt_id: str
    epoch: int
    prompt_tokens: np.ndarray
    sample_index: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    rewards: np.ndarray
    finish: np.ndarray
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
    ) -> Group:
        """Gathers samples into columns. Raises ValueError for an empty group or columns of unequal length."""
        if not samples:
            raise ValueError(f"group {uid}: expected at least one sample, found none; drop the group instead")
        for s in samples:
            if not len(s.tokens) == len(s.logprobs) == len(s.loss_mask):
                raise ValueError(
                    f"group {uid} sample {s.index}: {len(s.tokens)} tokens, {len(s.logprobs)} logprobs and "
                    f"{len(s.loss_mask)} mask entries; expected equal lengths"
                )
            starts = [span.start for span in s.spans]
            in_order = starts == sorted(starts) and max(starts, default=0) <= len(s.tokens)
            if not in_order or (len(s.tokens) and starts[:1] != [0]):
                raise ValueError(
                    f"group {uid} sample {s.index}: expected version spans that start at token 0 and ascend to at most "
                    f"{len(s.tokens)}, found {s.spans}"
                )
        spans = [span for s in samples for span in s.spans]
        replicas = sorted({x.replica for x in spans})
        return cls(
            uid=uid,
            prompt_id=prompt_id,
            epoch=epoch,
            prompt_tokens=np.ascontiguousarray(prompt_tokens, dtype=np.int32),
            sample_index=np.array([s.index for s in samples], dtype=np.int32),
            offsets=_offsets([len(s.tokens) for s in samples]),
            tokens=_concat([s.tokens for s in samples], np.int32),
            logprobs=_concat([s.logprobs for s in samples], np.float32),
            loss_mask=_concat([s.loss_mask for s in samples], np.bool_),
            rewards=np.array([s.reward for s in samples], dtype=np.float32),
            finish=np.array([s.finish for s in samples], dtype=np.uint8),
            span_offsets=_offsets([len(s.spans) for s in samples]),
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
                k: (
                    np.concatenate([np.asarray(s.extras[k]) for s in samples]),
                    _offsets([len(s.extras[k]) for s in samples]),
                )
                for k in sorted({k for s in samples for k in s.extras})
            },
            times=dict(times or {}),
            attempt=attempt,
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Tokens of a forward pass over the group; each sample has its own copy of the prompt."""
        return len(self.tokens) + len(self) * len(self.prompt_tokens)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [S]"""
        return np.diff(self.offsets)

    def response(self, s: int) -> slice:
        """Slice of the response columns for sample ``s`` (a row, not a sample index)."""
        return slice(int(self.offsets[s]), int(self.offsets[s + 1]))

    def spans(self, s: int) -> list[VersionSpan]:
        lo, hi = int(self.span_offsets[s]), int(self.span_offsets[s + 1])
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
        sample = np.repeat(np.arange(len(self)), np.diff(self.span_offsets))
        start = self.offsets[sample] + self.span_start
        last = np.append(sample[1:] != sample[:-1], True)[: len(sample)]
        end = np.append(start[1:], 0)[: len(start)]
        end[last] = self.offsets[sample[last] + 1]
        return start, end

    # -- one buffer ------------------------------------------------------------------------------------------------

    _COLUMNS = (
        "prompt_tokens sample_index offsets tokens logprobs loss_mask rewards finish "
        "span_offsets span_start span_lineage span_number span_mixed_kv span_replica"
    ).split()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in self._COLUMNS}
        arrays |= {f"metrics/{k}": v for k, v in self.metrics.items()}
        for k, (values, offsets) in self.extras.items():
            arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"] = values, offsets
        return arrays

    def to_bytes(self) -> bytes:
        names = ("uid", "prompt_id", "epoch", "replicas", "times", "attempt")
        meta = {name: getattr(self, name) for name in names}
        return _GROUP.to_bytes(meta, self._arrays())

    @classmethod
    def from_buffer(cls, data: Buffer) -> Group:
        """Reads a group without copying: its columns are views that keep ``data`` alive.

        Raises ValueError for a buffer that is not a group, has another format, or is truncated."""
        meta, arrays = _GROUP.from_buffer(data)
        columns = {name: arrays.pop(name) for name in cls._COLUMNS}
        metrics = {k.split("/", 1)[1]: v for k, v in arrays.items() if k.startswith("metrics/")}
        names = [k.split("/")[1] for k in arrays if k.startswith("extras/") and k.endswith("/values")]
        extras = {k: (arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"]) for k in names}
        fields: dict[str, Any] = meta | columns
        return cls(**fields, metrics=metrics, extras=extras)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.array([0, *itertools.accumulate(lengths)], np.int64)


def _concat(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(p, dtype=dtype) for p in parts]) if parts else np.empty(0, dtype)


def groups_digest(uids: Iterable[str], before: int = 0) -> int:
    """64-bit digest of a set of groups, in any order. ``before``: digest of those to which ``uids`` are added."""
    return (before + sum(xxhash.xxh3_64_intdigest(uid.encode()) for uid in uids)) % 2**64
