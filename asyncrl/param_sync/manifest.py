"""Manifest of a sync session: names, shapes, dtypes and roles of all tensors, known before any data moves."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Role = Literal["target", "draft"]
ROLES: tuple[Role, ...] = ("target", "draft")

#: bytes per element; these names cross processes and environments instead of library dtypes
DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class ManifestError(ValueError):
    """Sender and replica disagree about the tensors. Raised in phase plan, before anything is paused."""


class TensorSpec(NamedTuple):
    """One tensor, named as in its safetensors file. ``tied_to``: the tensor whose storage it shares; a tied tensor is
    listed, so that receivers know of it, but not sent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role = "target"
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


_ADAPTER_SEGMENTS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})


def is_adapter(name: str) -> bool:
    """True for a LoRA tensor, with or without the adapter's name in it (``q_proj.lora_A.default.weight``)."""
    return "lora_" in name and not _ADAPTER_SEGMENTS.isdisjoint(name.split("."))


@dataclass(frozen=True)
class AdapterSpec:
    """A LoRA adapter: the effective weight [out, in] of a target module is ``weight + alpha / r · B @ A``, with A [r,
    in] and B [out, r]. ``target_modules`` match ends of module paths: ``q_proj`` is this module in every layer."""

    name: str
    r: int
    alpha: float
    target_modules: tuple[str, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.r < 1 or not self.target_modules:
            found = f"r {self.r} and target modules {list(self.target_modules)}"
            raise ManifestError(
                f"adapter {self.name}: expected a rank of at least 1 and a target module, found {found}"
            )

    def targets(self, module: str) -> bool:
        return any(f".{module}".endswith(f".{target}") for target in self.target_modules)


@dataclass(frozen=True)
class Manifest:
    """All tensors of a session, in export order. ``adapter``: the adapter that its LoRA tensors form, None without any.
    ``frozen_draft``: with an adapter, whether the draft is frozen like the base.

    It goes to every replica in every session: it is pickled once, and a process that gets it again keeps the first."""

    tensors: tuple[TensorSpec, ...]
    adapter: AdapterSpec | None = None
    frozen_draft: bool = False

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ManifestError(f"expected each tensor once in a manifest, found twice: {', '.join(twice[:4])}")
        for t in self.tensors:
            if t.dtype not in DTYPE_BYTES:
                raise ManifestError(f"{t.name}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {t.dtype!r}")

    def __reduce__(self) -> tuple[Callable[[bytes], Manifest], tuple[bytes]]:
        return _unpickled, (self._pickled,)

    @functools.cached_property
    def _pickled(self) -> bytes:
        fields: tuple[Any, ...] = tuple(map(tuple, self.tensors)), self.adapter, self.frozen_draft
        return pickle.dumps(fields)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def sent(self) -> Sequence[TensorSpec]:
        return [t for t in self.tensors if t.tied_to is None]

    @property
    def sends_draft(self) -> bool:
        return any(t.role == "draft" for t in self.sent())

    @property
    def sends_base(self) -> bool:
        """True if any weight of the target itself, not of adapter or draft, is sent."""
        return any(t.role == "target" and not is_adapter(t.name) for t in self.sent())

    def without_base(self) -> Manifest:
        """The part that training changes, for replicas that hold the rest: adapter, and draft unless frozen."""
        changing = (t for t in self if is_adapter(t.name) or (t.role == "draft" and not self.frozen_draft))
        return Manifest(tuple(changing), self.adapter, self.frozen_draft)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.sent())


@functools.lru_cache(4)
def _unpickled(pickled: bytes) -> Manifest:
    tensors, *others = pickle.loads(pickled)
    return Manifest(tuple(map(TensorSpec._make, tensors)), *others)
