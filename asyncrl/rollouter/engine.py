"""The engine seam: what the rollouter asks of anything that generates.

An engine is asynchronous and batched: ``submit`` takes many requests and returns at once, ``events`` returns what
happened since it was last called. Tokens, logprobs and versions cross as columns, so that one call carries the work of
hundreds of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, cast

import numpy as np

from asyncrl.config.checks import PAUSE_KV
from asyncrl.param_sync.intake import Intake
from asyncrl.param_sync.manifest import Role
from asyncrl.sample import FinishReason, PolicyVersion

PauseMode = Literal["abort", "keep", "wait"]
KVMode = Literal["keep", "recompute", "unload"]


class EngineError(RuntimeError):
    """The engine cannot do what was asked; the message says what it can."""


class EngineDied(EngineError):
    """A process of the engine's own is gone: the replica must be started again."""


@dataclass(frozen=True)
class SamplingParams:
    """``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch the filters off; temperature 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """Generate after ``tokens``. ``tokens`` int32 [P + done]: prompt, then tokens that were already sampled.

    ``key`` (64 bits) and ``position`` (how many tokens of this sample were drawn before) are the counter of its random
    numbers: a sample that is aborted and continued elsewhere draws the same numbers as one that was not.
    ``shared_prefix`` leading tokens are the same in all requests of ``group``: an engine prefills them once.
    """

    id: str
    group: str
    tokens: np.ndarray
    shared_prefix: int
    key: int
    position: int
    max_new_tokens: int
    sampling: SamplingParams
    priority: int = 0  # lower is served first; validation runs at a higher number than training

    @property
    def trains(self) -> bool:
        """Whether it is for training."""
        return self.priority == 0


@dataclass(frozen=True)
class EventBatch:
    """What happened to ``E`` requests since the last call, in columns.

    Event e gave request ``ids[e]`` the tokens ``tokens[offsets[e]:offsets[e+1]]`` (int32) with their behaviour
    ``logprobs`` (float32), all sampled under ``versions[e]``; ``finish[e]`` is None while the request goes on.
    ``mixed_kv[e]`` marks tokens sampled over an older version's KV. A request may appear more than once.
    """

    ids: list[str]
    offsets: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: list[PolicyVersion]
    finish: list[FinishReason | None]
    mixed_kv: list[bool]
    errors: dict[str, str] = field(default_factory=dict)  # request id → why it finished with ERROR

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do; config is checked against it before the run starts.

    ``pause_kv``: the legal (pause, KV) pairs. ``receiver``: where weights are taken, ``local`` (by receivers in the
    engine's workers) or ``delegated`` (the engine's own server takes them). ``speculation``: whether it drafts and
    verifies."""

    name: str
    pause_kv: frozenset[tuple[PauseMode, KVMode]]
    receiver: Literal["local", "delegated"]
    staging: frozenset[str]
    deterministic: bool
    speculation: bool
    max_context_tokens: int
    slots: int


@dataclass(frozen=True)
class EngineStats:
    """A moment's figures, for routing and metrics."""

    running: int
    waiting: int
    slots: int
    outstanding_tokens: int
    kv_bytes: int
    generated_tokens: int
    version: PolicyVersion | None


def pause_kv(name: str) -> frozenset[tuple[PauseMode, KVMode]]:
    """`Capabilities.pause_kv` of an engine, from the one table that configs are checked against."""
    return cast(frozenset[tuple[PauseMode, KVMode]], PAUSE_KV[name])


class Engine(Protocol):
    """One replica's generator. All methods but ``capabilities`` and ``intake`` are coroutines of one event loop."""

    def capabilities(self) -> Capabilities: ...

    async def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. A request that can never run (longer than the context) is answered with an ERROR event."""

    async def events(self) -> EventBatch:
        """Wait until something happened (at most a fraction of a second while tokens flow), then return all of it.
        Raises the engine's own exception if its loop died."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests; their tokens so far come as an ABORT event. Unknown ids are ignored."""

    async def set_width(self, width: int | None) -> None:
        """Generate for at most so many requests of training at once (None: for as many as there are slots); more of
        them wait in the engine, so that none is missed where one ends. What runs goes on."""
        ...

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """Stop generating. ``abort``: every request ends with an ABORT event; ``keep``: requests stay; ``wait``: they
        finish first. Returns how many requests were cut, kept or waited for; raises TimeoutError at the deadline."""
        ...

    async def resume(self, version: PolicyVersion) -> None:
        """Generate on, under ``version``."""

    async def release_kv(self) -> int:
        """Free the KV cache; returns the bytes freed."""
        ...

    async def restore_kv(self) -> None: ...

    async def flush_kv(self) -> None:
        """Forget all cached KV (KV mode ``recompute``): kept requests are prefilled again under the new weights."""

    def intake(self, name: str, transport: str) -> Intake:
        """Where the weights of replica ``name`` arrive, over this transport: asked for once."""
        ...

    async def digest(self, role: Role) -> str:
        """Digest of the live tensors of a role, see `asyncrl.param_sync.digest`."""
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None: ...
