"""What a sync session will send: names, shapes, dtypes and roles, known before any data moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Role = Literal["target", "draft"]

#: bytes of one element; these names cross process and environment borders instead of library dtypes
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
    """Sender and receiver do not agree on what is to be sent. Raised at plan time, before anything is paused."""


class TensorSpec(NamedTuple):
    """One tensor as its safetensors file names it. ``tied_to`` names the tensor whose storage it shares: such a tensor
    is listed, so that nobody misses it, but not sent."""

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
    """Whether it names a LoRA tensor, with or without an adapter's name in it (``q_proj.lora_A.default.weight``)."""
    return "lora_" in name and not _ADAPTER_SEGMENTS.isdisjoint(name.split("."))


@dataclass(frozen=True)
class AdapterSpec:
    """A LoRA adapter: a target module's weight [out, in] is used as ``weight + alpha / r · B @ A``, with A [r, in] and
    B [out, r]. ``target_modules`` are whole ends of module paths: ``q_proj`` means this module of every layer."""

    name: str
    r: int
    alpha: float
    target_modules: tuple[str, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.r < 1 or not self.target_modules:
            found = f"r {self.r} and target modules {list(self.target_modules)}"
            raise ManifestError(f"adapter {self.name}: a rank of at least 1 and a target module, found {found}")

    def targets(self, module: str) -> bool:
        return any(f".{module}".endswith(f".{target}") for target in self.target_modules)


@dataclass(frozen=True)
class Manifest:
    """All tensors of a session, in the order in which they are exported. ``adapter``: what its adapter tensors make up
    together, None without any. ``frozen_draft``: beside an adapter, whether the draft is as frozen as the base."""

    tensors: tuple[TensorSpec, ...]
    adapter: AdapterSpec | None = None
    frozen_draft: bool = False

    def __post_init__(self) -> None:
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ManifestError(f"a manifest names each tensor once; named twice: {', '.join(twice[:4])}")
        for t in self.tensors:
            if t.dtype not in DTYPE_BYTES:
                raise ManifestError(f"{t.name}: dtype {t.dtype!r} is not one that travels ({', '.join(DTYPE_BYTES)})")

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
        """Whether any weight of the target itself is sent, beside adapter and draft."""
        return any(t.role == "target" and not is_adapter(t.name) for t in self.sent())

    def without_base(self) -> Manifest:
        """What training changes: the adapter, and a draft that is not frozen. For replicas that hold the rest."""
        changing = (t for t in self if is_adapter(t.name) or (t.role == "draft" and not self.frozen_draft))
        return Manifest(tuple(changing), self.adapter, self.frozen_draft)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.sent())
