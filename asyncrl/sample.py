"""Prompt, Sample and Group: what moves through the pipes between rollouter and trainer.

A *prompt* is one task instance, a *sample* one trajectory for it, a *group* the ``n`` samples of one prompt and the
unit that the sample queue moves. A group crosses processes (and Python environments) as one flat buffer: a small JSON
header and a table of aligned columns, read back without a copy::

    data = group.to_bytes()          # one buffer: spool it, hash it, send it
    again = Group.from_buffer(data)  # columns are views into `data`
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

Message = dict[str, Any]


class PolicyVersion(NamedTuple):
    """Which weights: ``number`` counts committed parameter syncs, a restore from a checkpoint starts a new ``lineage``,
    so a version is never reused for other weights. Ordered by (lineage, number)."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"


class FinishReason(enum.IntEnum):
    """Why a sample (or one request of it) ended."""

    STOP = 0  # a stop token or stop string
    LENGTH = 1  # the length limit: the sample is overlong
    ABORT = 2  # ended from outside; its tokens so far are kept and may be continued
    ERROR = 3  # the engine failed on it


def effective_reward(reward: float, finish: int, overlong: str, penalty: float) -> float | None:
    """The reward that the advantages are computed from, in float32 as a group carries it; None for a sample that does
    not count. ``finish`` is a FinishReason, ``overlong`` and ``penalty`` are algorithm.overlong and overlong_penalty.

    Here because both ends must agree: a group whose effective rewards are all equal has no gradient, so the rollouter
    drops it by the figures that the trainer would train on."""
    if finish == FinishReason.LENGTH and overlong == "mask":
        return None
    taken = penalty if finish == FinishReason.LENGTH and overlong == "penalize" else 0.0
    return float(np.float32(reward) - np.float32(taken))


@dataclass(frozen=True)
class Prompt:
    """One task instance, as the data source gives it.

    ``uid`` is unique in a run (epoch and row), ``prompt_id`` names the row in its data set, whatever the epoch.
    """

    uid: str
    prompt_id: str
    messages: tuple[Message, ...]
    answer: str
    epoch: int = 0
    text: str | None = None  # a raw prompt, used as it is; `messages` are then empty
    extra: Mapping[str, Any] = field(default_factory=dict)


class VersionSpan(NamedTuple):
    """Tokens from ``start`` to the next span's start were sampled under ``version``.

    ``mixed_kv`` marks tokens sampled over KV that an older version computed (pause mode ``keep`` with KV kept): their
    behaviour logprobs belong to no single version.
    """

    start: int
    version: PolicyVersion
    mixed_kv: bool = False


@dataclass
class Sample:
    """One trajectory: ``R`` tokens after the shared prompt.

    Shapes: ``tokens`` int32 [R], ``logprobs`` float32 [R] (behaviour logprobs; 0 where nothing was sampled),
    ``loss_mask`` bool [R] (False for tokens that the policy did not sample, such as a tool's answer).
    """

    index: int
    tokens: np.ndarray
    logprobs: np.ndarray
    loss_mask: np.ndarray
    spans: list[VersionSpan]
    finish: FinishReason
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    extras: dict[str, np.ndarray] = field(default_factory=dict)


Buffer = bytes | bytearray | memoryview | np.ndarray

_FORMAT = 1
_ALIGN = 64
_PREFIX = struct.Struct("<4sIQ")  # magic, format, header bytes


@dataclass(frozen=True)
class Layout:
    """One flat buffer of named columns: a small JSON header, then every column aligned to 64 bytes.

    ``what`` names the kind of thing in errors, ``magic`` (4 bytes) in the buffer; its ``meta`` has a ``uid``."""

    what: str
    magic: bytes

    def to_bytes(self, meta: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
        table, chunks, at = [], [], 0
        for name, array in columns.items():
            array = np.ascontiguousarray(array)
            table.append((name, array.dtype.str, array.shape, at))
            pad = -array.nbytes % _ALIGN
            chunks += [array.tobytes(), b"\0" * pad]
            at += array.nbytes + pad
        header = json.dumps({"meta": meta, "columns": table}).encode()
        header += b" " * (-(len(header) + _PREFIX.size) % _ALIGN)
        return b"".join([_PREFIX.pack(self.magic, _FORMAT, len(header)), header, *chunks])

    def from_buffer(self, data: Buffer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(meta, columns) without copying the columns: they are views that keep ``data`` alive.

        Raises ValueError for a buffer that holds something else, is of another format, or is cut short."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        if len(view) < _PREFIX.size:
            raise ValueError(f"not a {self.what}: {len(view)} bytes, a {self.what} has at least {_PREFIX.size}")
        magic, fmt, header_bytes = _PREFIX.unpack_from(view)
        if magic != self.magic or fmt != _FORMAT:
            raise ValueError(f"not a {self.what} of format {_FORMAT}: found magic {magic!r}, format {fmt}")
        body = _PREFIX.size + header_bytes
        if len(view) < body:
            raise ValueError(f"{self.what} cut short in its header: {len(view)} bytes of {body}")
        header = json.loads(bytes(view[_PREFIX.size : body]))
        columns: dict[str, np.ndarray] = {}
        for name, dtype, shape, at in header["columns"]:
            count = int(np.prod(shape, dtype=np.int64))
            end = body + at + count * np.dtype(dtype).itemsize
            if end > len(view):
                raise ValueError(
                    f"{self.what} {header['meta']['uid']} cut short in column {name!r}: {len(view)} < {end} bytes"
                )
            columns[name] = np.frombuffer(view, dtype=dtype, count=count, offset=body + at).reshape(shape)
        return header["meta"], columns


_GROUP = Layout("group", b"ARLG")


@dataclass
class Group:
    """The samples of one prompt, in columns. ``S`` samples, ``P`` prompt tokens, ``R`` response tokens in all.

    ====================  ========  =======  ================================================
    column                dtype     shape    meaning
    ====================  ========  =======  ================================================
    ``prompt_tokens``     int32     [P]      shared by all samples
    ``sample_index``      int32     [S]      which of the ``n`` samples (a failed one is absent)
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
    ``metrics[name]``     float32   [S]      what the reward reported beside the reward
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
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    extras: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    #: seconds on the node's clock: issued, started (its first token), generated (all samples), finished (judged)
    times: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_samples(
        cls,
        uid: str,
        prompt_id: str,
        epoch: int,
        prompt_tokens: np.ndarray,
        samples: Sequence[Sample],
        times: Mapping[str, float] | None = None,
    ) -> Group:
        """Gather samples into columns. Raises ValueError for an empty group or for columns of unequal length."""
        if not samples:
            raise ValueError(f"group {uid} has no samples: a group without any is dropped, not built")
        for s in samples:
            if not len(s.tokens) == len(s.logprobs) == len(s.loss_mask):
                raise ValueError(
                    f"group {uid} sample {s.index}: {len(s.tokens)} tokens, {len(s.logprobs)} logprobs and "
                    f"{len(s.loss_mask)} mask entries, expected equal lengths"
                )
            if len(s.tokens) and (not s.spans or s.spans[0].start != 0):
                raise ValueError(f"group {uid} sample {s.index}: version spans must start at token 0, found {s.spans}")
        spans = [span for s in samples for span in s.spans]
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
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.sample_index)

    @property
    def num_tokens(self) -> int:
        """Tokens that a forward pass over the group sees: every sample with its own copy of the prompt."""
        return len(self.tokens) + len(self) * len(self.prompt_tokens)

    @property
    def response_lengths(self) -> np.ndarray:
        """int64 [S]"""
        return np.diff(self.offsets)

    def response(self, s: int) -> slice:
        """The slice of the response columns that sample ``s`` (a row, not a sample index) owns."""
        return slice(int(self.offsets[s]), int(self.offsets[s + 1]))

    def spans(self, s: int) -> list[VersionSpan]:
        lo, hi = int(self.span_offsets[s]), int(self.span_offsets[s + 1])
        return [
            VersionSpan(
                int(self.span_start[i]),
                PolicyVersion(int(self.span_lineage[i]), int(self.span_number[i])),
                bool(self.span_mixed_kv[i]),
            )
            for i in range(lo, hi)
        ]

    def oldest_version(self) -> PolicyVersion:
        """The oldest version that sampled one of the group's trained tokens (staleness counts from it).

        A span counts only where it holds a token of the loss. Raises ValueError if no token is trained."""
        oldest: PolicyVersion | None = None
        for s in range(len(self)):
            mask, spans = self.loss_mask[self.response(s)], self.spans(s)
            if not spans:  # a sample without tokens
                continue
            ends = [x.start for x in spans[1:]] + [len(mask)]
            for span, end in zip(spans, ends, strict=True):
                if mask[span.start : end].any() and (oldest is None or span.version < oldest):
                    oldest = span.version
        if oldest is None:
            raise ValueError(f"group {self.uid} has no trained token")
        return oldest

    # -- one buffer ------------------------------------------------------------------------------------------------

    _COLUMNS = (
        "prompt_tokens sample_index offsets tokens logprobs loss_mask rewards finish "
        "span_offsets span_start span_lineage span_number span_mixed_kv"
    ).split()

    def _arrays(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name) for name in self._COLUMNS}
        arrays |= {f"metrics/{k}": v for k, v in self.metrics.items()}
        for k, (values, offsets) in self.extras.items():
            arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"] = values, offsets
        return arrays

    def to_bytes(self) -> bytes:
        meta = {"uid": self.uid, "prompt_id": self.prompt_id, "epoch": self.epoch, "times": self.times}
        return _GROUP.to_bytes(meta, self._arrays())

    @classmethod
    def from_buffer(cls, data: Buffer) -> Group:
        """Read a group without copying its columns: they are views that keep ``data`` alive.

        Raises ValueError for a buffer that is not a group, is of another format, or is cut short."""
        meta, arrays = _GROUP.from_buffer(data)
        columns = {name: arrays.pop(name) for name in cls._COLUMNS}
        metrics = {k.split("/", 1)[1]: v for k, v in arrays.items() if k.startswith("metrics/")}
        names = [k.split("/")[1] for k in arrays if k.startswith("extras/") and k.endswith("/values")]
        extras = {k: (arrays[f"extras/{k}/values"], arrays[f"extras/{k}/offsets"]) for k in names}
        fields: dict[str, Any] = meta | columns
        return cls(**fields, metrics=metrics, extras=extras)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _concat(parts: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(p, dtype=dtype) for p in parts]) if parts else np.empty(0, dtype)
