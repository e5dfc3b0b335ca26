"""Engine interface: generation by one replica, and a spec that declares an engine's limits.

An engine is asynchronous and batched: ``submit`` queues many requests and returns at once; ``events`` returns
everything since the last call. Tokens, logprobs and versions are columns, so one call carries hundreds of requests.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from asyncrl.config.checks import derive, sends_adapters
from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import Role
from asyncrl.param_sync.session_protocol import KVMode, PauseMode
from asyncrl.plugins.registry import Registry
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

if TYPE_CHECKING:
    from asyncrl.param_sync.weight_receiver import WeightReceiver  # and torch, which rollouters do without


class EngineError(RuntimeError):
    """The engine refuses a call; the message says what it accepts."""


class EngineDied(EngineError):
    """An engine process has died: the replica must be restarted."""


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer must match from its first token to its end: a JSON schema, a regular expression (the
    whole text matches it), or a GBNF grammar whose start is ``root``, as of llama.cpp.

    The schema ``{"type": "object"}`` stands for any JSON object. How much of JSON Schema and of regular expressions is
    supported depends on the engine; a request with what it does not support fails."""

    kind: Literal["json_schema", "regex", "gbnf"]
    text: str


@dataclass(frozen=True)
class SamplingParams:
    """``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch the filters off; temperature 0 is greedy.

    ``logit_bias``: pairs of a token and what is added to its logit before all else, in ascending order of tokens.

    With a ``grammar``, tokens that cannot continue a match are not sampled, and stop tokens only where the text
    matches. When nothing can follow, only they are. A stop string or a limit may still end an answer before it matches.
    A request with a grammar cannot be resumed: it starts again.

    Both change the distribution, and the reported logprobs are of the changed one: never train on such tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None


LEAST_TEMPERATURE = 1e-5  #: of a request that is not greedy: scaled by less, logits may overflow

#: `SamplingParams` that only some engines serve, see `EngineSpec.constrains`
CONSTRAINTS = frozenset({"logit_bias", "grammar"})


class Request(NamedTuple):
    """A request to continue ``tokens``. ``tokens`` int32 [P + done]: prompt, then tokens that were already sampled.

    ``key`` (64 bits) and ``position`` (the number of tokens of this sample drawn before) key its random numbers: a
    sample that is aborted and continued elsewhere draws the same numbers as an uninterrupted one. ``shared_prefix``
    leading tokens are the same in all requests of ``group``, so an engine prefills them once. The last ``resumed``
    tokens were sampled by an earlier part of this request; any further ones that ``position`` counts belong to earlier
    turns.
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
    resumed: int = 0

    @property
    def trains(self) -> bool:
        """True for a training request, False for validation."""
        return self.priority == 0


@dataclass(frozen=True)
class Scheduling:
    """Order of service. ``max_running_requests``: cap on training requests that generate at once (None: one per slot).
    ``validation_first``: serve validation before training requests, whatever their priority. ``progress_every_s``: how
    often tokens of requests that continue are reported; ends do not wait for it, and an engine that generates
    returns at least an empty batch every `ALIVE_EVERY_S`."""

    max_running_requests: int | None = None
    validation_first: bool = False
    progress_every_s: float = 0.2


ALIVE_EVERY_S = 5.0  # while it generates and no request ends; supervision counts an engine's silence


@dataclass(frozen=True)
class EventBatch:
    """``E`` events of requests since the last call, in columns.

    Event e gave request ``ids[e]`` the tokens ``tokens[offsets[e]:offsets[e+1]]`` (int32) with their behaviour
    ``logprobs`` (float32), all sampled under ``versions[e]``; ``finish[e]`` is None while the request continues.
    ``mixed_kv[e]`` marks tokens sampled over an older version's KV. A request may appear more than once. Without
    ``progress`` only requests that ended are reported.
    """

    ids: list[str]
    offsets: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: list[PolicyVersion]
    finish: list[FinishReason | None]
    mixed_kv: list[bool]
    errors: dict[str, str] = field(default_factory=dict)  # request id → why it finished with ERROR
    progress: bool = True

    def __len__(self) -> int:
        return len(self.ids)


class Engine(Protocol):
    """One replica's generator. All methods but ``weight_receiver`` are coroutines of one event loop."""

    async def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. One that can never run (longer than the context, say) ends with an ERROR event."""

    async def events(self) -> EventBatch:
        """Wait for the end of a request, or until progress is due, see `Scheduling`. Raises the engine's own exception
        if its loop died."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests, each with an ABORT event that has its unreported tokens. Unknown ids are ignored."""

    async def set_scheduling(self, scheduling: Scheduling) -> None:
        """Change how waiting requests are served. They wait in the engine, so that a freed slot is refilled at once.
        Running requests continue."""
        ...

    async def pause(self, mode: PauseMode, deadline_s: float) -> int:
        """Stop generating. ``abort``: every request ends with an ABORT event; ``keep``: requests stay; ``wait``: they
        finish first. Returns how many requests were aborted, kept or waited for. Raises TimeoutError at the
        deadline; then, and if it is cancelled, the engine continues as before."""
        ...

    async def resume(self, version: PolicyVersion) -> None:
        """Continue under ``version``."""

    async def release_kv(self) -> int:
        """Free the KV cache; returns the bytes freed."""
        ...

    async def restore_kv(self) -> None: ...

    async def flush_kv(self) -> None:
        """Discard all cached KV (KV mode ``recompute``): kept requests are prefilled again under the new weights."""

    def weight_receiver(self, name: str, transport: str) -> WeightReceiver:
        """The weight receiver of replica ``name`` over this transport. Called once."""
        ...

    async def digest(self, role: Role) -> str:
        """Digest of the live tensors of a role, see `asyncrl.param_sync.digest`."""
        ...

    async def close(self) -> None: ...


#: Legal (pause, KV) pairs of an engine that can keep, recompute and unload its KV cache but does not key cached
#: prefixes by version. (abort, keep) is not among them: cached prefixes would outlive their weights.
PAUSE_KV: frozenset[tuple[PauseMode, KVMode]] = frozenset(
    {
        ("abort", "recompute"),
        ("abort", "unload"),
        ("keep", "keep"),
        ("keep", "recompute"),
        ("wait", "keep"),
        ("wait", "recompute"),
        ("wait", "unload"),
    }
)


class EngineSpec(Protocol):
    """Declares an engine's limits and starts it. Subclasses override the defaults that their engine exceeds.

    The driver imports the defining module and may lack the engine's packages, so only `start` may import them."""

    #: packages of which the replicas' environment needs one; empty: none besides asyncrl's own
    distributions: frozenset[str] = frozenset()
    #: legal pairs of param_sync.pause and param_sync.kv
    pause_kv: frozenset[tuple[PauseMode, KVMode]] = PAUSE_KV
    #: legal values of param_sync.staging
    staging: frozenset[str] = frozenset({"bucket"})
    #: takes LoRA adapters, not only weights with adapters merged into them
    takes_adapters: bool = False
    #: requests may finish on the adapter they began with while later ones run on another
    finishes_on_adapter: bool = False
    #: offers rollout.engine.deterministic
    deterministic: bool = False
    #: a replica may have several devices, see rollout.engine.tensor_parallel_size and pipeline_parallel_size
    multi_device: bool = False
    #: legal values of rollout.engine.delivery
    deliveries: frozenset[str] = frozenset({"memory"})
    #: supports speculative decoding, see mtp.enable_rollout
    speculates: bool = False
    #: serves `SamplingParams.logit_bias` and ``grammar``; other engines never get requests with either
    constrains: bool = False
    #: keeps the head's sums in float32, see model.float32_head
    float32_head: bool = False
    #: takes further arguments, see rollout.engine.args; `asyncrl.config.secrets.revealed` reads the secrets in them
    takes_args: bool = False
    #: runs asyncrl's own decoder, which must support the checkpoint
    native_decoder: bool = False
    #: allocates its KV cache at the start, a full context for every slot
    preallocates_kv: bool = False
    #: the argument (`rollout.engine.args`) for the engine's part of a GPU's memory; empty: it takes what it needs
    memory_share: str = ""

    def served_sampling(self, config: Config) -> frozenset[str]:
        """The fields of `SamplingParams`, beside what ends a request, that a request may set otherwise than the run."""
        return frozenset({"temperature", "top_p", "top_k", "min_p"} | (CONSTRAINTS if self.constrains else set()))

    def problems(self, config: Config) -> Iterator[str]:
        """One line for each option that does not fit this engine; each begins with the option's key. This base checks
        the attributes; engines with further limits add their own lines."""
        for key, section in (("rollout", config.rollout), ("validation", config.validation)):
            if 0 < section.temperature < LEAST_TEMPERATURE:
                yield f"{key}.temperature: expected at least {LEAST_TEMPERATURE:g}, found {section.temperature:g}"
        engine, sync = config.rollout.engine, config.param_sync
        name, pause = engine.name, derive(config).pause
        if (pause, sync.kv) not in self.pause_kv:
            fitting = sorted(kv for legal, kv in self.pause_kv if legal == pause)
            if fitting:
                yield (
                    f"param_sync.kv: {sync.kv} does not work with pause {pause} in the {name} engine; expected one of "
                    f"{', '.join(fitting)}"
                )
            else:
                pauses = ", ".join(sorted({legal for legal, _ in self.pause_kv}))
                yield f"param_sync.pause: the {name} engine offers {pauses}, found {pause}"
        if sync.staging not in self.staging:
            offered = ", ".join(sorted(self.staging))
            yield f"param_sync.staging: the {name} engine offers {offered}, found {sync.staging}"
        if sends_adapters(config) and not self.takes_adapters:
            yield f"param_sync.adapters: the {name} engine takes no adapters; expected merged"
        if sync.in_flight == "finish" and not self.finishes_on_adapter:
            yield f"param_sync.in_flight: the {name} engine moves requests to the new weights; expected move"
        if engine.deterministic and not self.deterministic:
            yield (
                f"rollout.engine.deterministic: the {name} engine's results depend on what else is in the batch; "
                "expected false"
            )
        if engine.delivery not in self.deliveries:
            offered = ", ".join(sorted(self.deliveries))
            yield f"rollout.engine.delivery: the {name} engine offers {offered}, found {engine.delivery}"
        if config.mtp.enable_rollout and not self.speculates:
            yield f"mtp.enable_rollout: the {name} engine does not speculate; expected false"
        if config.model.float32_head and not self.float32_head:
            yield f"model.float32_head: the {name} engine rounds its logits as it does; expected false"
        if engine.args and not self.takes_args:
            yield f"rollout.engine.args: the {name} engine takes none beside its options, found {sorted(engine.args)}"
        if not self.multi_device:
            for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
                if (found := getattr(engine, key)) > 1:
                    yield f"rollout.engine.{key}: the {name} engine has one device a replica; expected 1, found {found}"

    @abstractmethod
    async def start(self, config: Config, recorder: Recorder) -> Engine:
        """Start one replica's engine, paused. Raises the engine's own errors for a checkpoint or options that it
        refuses."""
        ...


ENGINES: Registry[EngineSpec] = Registry(
    kind="engine",
    option="rollout.engine.name",
    package="asyncrl.rollouter.engines",
    attribute="ENGINE",
    entry_points="asyncrl.engines",
    interface=EngineSpec,
)
