"""Resolution of canonical tensor names to an engine's live parameters and its loader's names.

Senders name tensors as the checkpoint's safetensors files do. A live model has other parameters: several projections
packed into one, all experts of a layer fused into one, modules wrapped by LoRA layers (``q_proj.base_layer.weight``),
and names that share storage. All of it is resolved from names, dtypes and shapes, before anything is paused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from asyncrl.param_sync.manifest import ManifestError, Role, TensorSpec, is_adapter

#: packed module → its parts along dim 0, in order; the form of vLLM's ``packed_modules_mapping``
PACKED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}

#: parameter below ``experts`` that holds all experts → parts of each expert; without ``{leaf}``, their ``weight``
FUSED_EXPERTS: Mapping[str, Sequence[str]] = {
    "w13_{leaf}": ("gate_proj", "up_proj"),
    "w2_{leaf}": ("down_proj",),
    "routed_experts.w13_{leaf}": ("gate_proj", "up_proj"),
    "routed_experts.w2_{leaf}": ("down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}

#: other names of an expert's parts
_ALSO = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

_LEAF = "{leaf}"
_BASE_LAYER = "base_layer"
_ONE_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.([^.]+)\.([^.]+)")

#: ``whole``: all of its owner · ``packed``: a part of it · ``expert``: a part of one expert of it · ``fused``: all
#: experts of it, in the checkpoint's layout · ``tied``: comes with the tensor it is tied to · ``adapter``: a LoRA
#: tensor · ``ignored``: not used here
Kind = Literal["whole", "packed", "expert", "fused", "tied", "adapter", "ignored"]


class LiveTensor(NamedTuple):
    """A live parameter with the checkpoint's whole shape. ``None``: not comparable with the sent tensor (quantised, or
    sharded, padded or transposed so that the whole is unknown)."""

    dtype: str | None
    shape: tuple[int, ...] | None


class Resolved(NamedTuple):
    """Resolution of one tensor of the manifest.

    ``load_as``: the name for the engine's own loader; None if there is nothing to load. ``owner``: the live parameter
    that holds the data; None if the live model does not hold it. ``source``: the sent tensor with the data, which
    differs from ``name`` for a tied one. ``part`` (like ``q_proj``) and ``expert`` name the piece of the owner.
    """

    name: str
    load_as: str | None
    owner: str | None
    role: Role
    kind: Kind
    source: str
    part: str | None = None
    expert: int | None = None


@dataclass(frozen=True)
class NamePlan:
    """One entry per tensor of the manifest, in its order."""

    tensors: tuple[Resolved, ...]

    def loads(self) -> dict[str, tuple[str, ...]]:
        """Sent tensor → its names for the engine's loader: two if it also fills a tied tensor that has its own storage
        here. Without adapter tensors."""
        loads: dict[str, tuple[str, ...]] = {}
        for t in self.tensors:
            if t.load_as is not None and t.kind != "adapter":
                loads[t.source] = (*loads.get(t.source, ()), t.load_as)
        return loads


def wrap(name: str) -> str:
    """The leaf's name inside a LoRA layer that wraps its module: ``q_proj.weight`` → ``q_proj.base_layer.weight``."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}{_BASE_LAYER}.{leaf}"


def unwrap(name: str) -> str:
    """The name without its ``base_layer`` segment, if it has one."""
    if _BASE_LAYER not in name:
        return name
    return ".".join(segment for segment in name.split(".") if segment != _BASE_LAYER)


class NameResolver:
    """Resolves canonical names against one live model (a separate draft model has its own resolver). ::

        resolver = NameResolver({"model.layers.0.self_attn.qkv_proj.weight": LiveTensor("bfloat16", (96, 64)), ...})
        loads = resolver.resolve(manifest).loads()
        model.load_weights((name, tensor) for name in loads["model.layers.0.self_attn.q_proj.weight"])

    ``live``: every parameter by its live name, and every buffer that the checkpoint holds.
    ``packed``, ``experts``: what the model packs; they decide where a name belongs and never change it.
    ``ties``: live name → the live parameter whose storage it shares.
    ``ignore``: live names that need no data, such as buffers; and names that are not live and are skipped, such as
    storage that another model's resolver covers.
    ``expects_base_layer``: whether the engine's loader expects ``base_layer`` in the names of wrapped modules' tensors,
    as a function of the live name where modules differ.
    ``num_experts``: experts per layer in the checkpoint, if a fused parameter holds fewer (expert parallelism) or more
    (redundant experts); None: the size of its dim 0 or, if that is unknown, the highest sent expert plus one.
    ``rename``: canonical name → live name, where the live model nests modules differently; None for a name that it does
    not have. Used only to find the owner.
    ``drops``: names that the engine's loader skips, such as buffers that it computes itself.

    Raises ValueError if a tie leads to a name that is not live, or is tied itself.
    """

    def __init__(
        self,
        live: Mapping[str, LiveTensor],
        *,
        packed: Mapping[str, Sequence[str]] = PACKED,
        experts: Mapping[str, Sequence[str]] = FUSED_EXPERTS,
        ties: Mapping[str, str] | None = None,
        ignore: Set[str] = frozenset(),
        expects_base_layer: bool | Callable[[str], bool] = False,
        num_experts: int | None = None,
        rename: Callable[[str], str | None] | None = None,
        drops: Callable[[str], bool] | None = None,
    ) -> None:
        self._live, self._ties, self._ignore = dict(live), dict(ties or {}), ignore
        self._num_experts = num_experts
        self._expects_base_layer = (
            (lambda live: expects_base_layer) if isinstance(expects_base_layer, bool) else expects_base_layer
        )
        self._rename, self._drops = rename or (lambda name: name), drops or (lambda name: False)
        astray = [f"{n} → {to}" for n, to in self._ties.items() if to not in self._live or to in self._ties]
        if astray:
            raise ValueError(f"expected ties to live parameters that are not tied themselves, found {_some(astray)}")
        names = [*self._live, *self._ties]
        self._wrapped = {name for name in names if unwrap(name) != name}
        self._by_bare = {unwrap(name): name for name in names} | {name: name for name in names}
        self._experts = {owner: tuple(parts) for owner, parts in experts.items()}
        self._packed: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        for owner, parts in packed.items():
            for part in parts:
                self._packed.setdefault(part, []).append((owner, tuple(parts)))
        self._longest_part = max((part.count(".") + 1 for part in self._packed), default=0)

    def resolve(self, tensors: Iterable[TensorSpec], partial: bool = False) -> NamePlan:
        """Resolve each tensor. ``partial``: allows live parameters that no tensor feeds (a frozen base of which only
        adapters travel), but never half-fed ones.

        Raises one ManifestError for all problems: unknown names, parameters without data, missing parts or experts,
        clashes of dtype or shape.
        """
        specs = list(tensors)
        sent = {spec.name for spec in specs if spec.tied_to is None}
        resolved: list[Resolved] = []
        feeds: dict[str, list[_Feed]] = {}
        problems = _Problems()
        for spec in specs:
            location = self._locate(spec.name)
            entry = self._entry(spec, location)
            if entry is None:
                problems.unknown.append(spec.name)
                continue
            resolved.append(entry)
            if location is None or entry.load_as is None:
                continue
            if entry.source not in sent:
                problems.clashes.append(f"{spec.name}: tied to {entry.source}, which is not sent")
            feeds.setdefault(self._holder(location.live), []).append(_Feed(location, spec))
        for owner, fed in feeds.items():
            self._check(owner, fed, problems)
        if not partial:
            problems.unfed += [name for name in self._live if name not in feeds and self._needs_data(name)]
        problems.raise_any()
        return NamePlan(tuple(resolved))

    def wants(self, name: str) -> bool:
        """True if the name belongs to a live parameter that needs data."""
        location = self._locate(name)
        return location is not None and location.kind != "adapter" and location.live not in self._ignore

    def _holder(self, live: str) -> str:
        return self._ties.get(live, live)

    def _needs_data(self, live: str) -> bool:
        return not (live in self._ties or live in self._ignore or is_adapter(live))

    def _entry(self, spec: TensorSpec, location: _Location | None) -> Resolved | None:
        """None if the name is unknown."""
        name, role, source = spec.name, spec.role, spec.tied_to or spec.name
        if spec.tied_to is not None:
            other = self._locate(spec.tied_to)
            if (
                location is None
                or location.live in self._ignore
                or (other and self._piece(location) == self._piece(other))
            ):
                holds = location or other
                return Resolved(name, None, self._holder(holds.live) if holds else None, role, "tied", source)
        if location is not None:
            owner, load_as = self._holder(location.live), self._load_as(name, location)
            return Resolved(name, load_as, owner, role, location.kind, source, location.part, location.expert)
        if is_adapter(name):
            return Resolved(name, name, None, role, "adapter", source)
        ignored = name in self._ignore or self._rename(name) in self._ignore or self._drops(name)
        return Resolved(name, None, None, role, "ignored", source) if ignored else None

    def _piece(self, location: _Location) -> tuple[str, int | None, str | None]:
        return self._holder(location.live), location.expert, location.part

    def _load_as(self, name: str, location: _Location) -> str:
        if location.kind == "adapter":
            return name
        bare = unwrap(name)
        # A tensor of all experts is not a leaf of the wrapped module: loaders find its parameter themselves.
        if _all_experts(bare) or location.live not in self._wrapped or not self._expects_base_layer(location.live):
            return bare
        return wrap(bare)

    def _locate(self, name: str) -> _Location | None:
        """Location of the name in the live model, or None. A live name comes first: no rule rewrites it."""
        if is_adapter(name):
            return _Location(name, "adapter") if name in self._live else None
        renamed = self._rename(name)
        if renamed is None:
            return None
        bare = unwrap(renamed)
        live = self._by_bare.get(renamed) or self._by_bare.get(bare)
        if live is not None:
            return _Location(live, "whole")
        return self._locate_packed(bare) or self._locate_expert(bare)

    def _locate_packed(self, name: str) -> _Location | None:
        *module, leaf = name.split(".")
        for n in range(1, min(self._longest_part, len(module)) + 1):
            part = ".".join(module[-n:])
            for owner, parts in self._packed.get(part, ()):
                live = self._by_bare.get(".".join([*module[:-n], owner, leaf]))
                if live is not None:
                    return _Location(live, "packed", parts, part)
        return None

    def _locate_expert(self, name: str) -> _Location | None:
        if one := _ONE_EXPERT.fullmatch(name):
            module, index, named, leaf = one.groups()
            part = _ALSO.get(named, named)
            for owner, parts in self._experts.items():
                live = self._fused(module, owner, leaf) if part in parts else None
                if live is not None:
                    return _Location(live, "expert", parts, part, int(index))
        elif _all_experts(name):
            module, _, layout = name.rpartition(".")
            for owner, parts in self._experts.items():
                live = self._fused(module, owner, "weight") if parts == self._experts.get(layout) else None
                if live is not None:
                    return _Location(live, "fused")
        return None

    def _fused(self, experts: str, owner: str, leaf: str) -> str | None:
        if _LEAF not in owner and leaf != "weight":
            return None
        return self._by_bare.get(f"{experts}.{owner.replace(_LEAF, leaf)}")

    def _check(self, owner: str, fed: list[_Feed], problems: _Problems) -> None:
        """Check that one live parameter is fed completely, once, with its dtype and shape."""
        held = self._live[owner]
        pieces: _Pieces = {}
        for location, spec in fed:
            first = pieces.setdefault((location.expert, location.part), spec)
            if first is not spec:
                problems.clashes.append(f"{owner}: fed by {first.name} and by {spec.name}")
            shape = held.shape if location.kind in ("whole", "adapter") else None
            if held.dtype not in (None, spec.dtype) or shape not in (None, spec.shape):
                sent, here = _describe(spec.dtype, None if shape is None else spec.shape), _describe(held.dtype, shape)
                problems.clashes.append(f"{spec.name}: sent as {sent}, {owner} holds {here}")
        whole = pieces.get((None, None))
        if whole is None:
            self._check_pieces(owner, fed[0].location.parts, pieces, problems)
        elif len(pieces) > 1:
            problems.clashes.append(f"{owner}: fed whole by {whole.name}, and in parts")

    def _check_pieces(self, owner: str, parts: Sequence[str], pieces: _Pieces, problems: _Problems) -> None:
        held, experts = self._live[owner], self._expected_experts(owner, pieces)
        lacking = [(e, missing) for e in experts if (missing := [p for p in parts if (e, p) not in pieces])]
        beyond = sorted({e for e, _ in pieces if e is not None and e not in experts})
        if lacking:
            problems.lacking.append(f"{owner} lacks {_some([_piece_name(e, missing) for e, missing in lacking])}")
        if beyond:
            more = _some([f"expert {e}" for e in beyond])
            problems.clashes.append(f"{owner}: {len(experts)} experts expected (num_experts), {more} sent too")
        if lacking or held.shape is None:
            return
        for e in experts:
            shapes = [pieces[e, part].shape for part in parts]
            room = held.shape if e is None else held.shape[1:]
            if all(shapes) and not _fill(shapes, room):
                sent = ", ".join(f"{pieces[e, part].name}{list(pieces[e, part].shape)}" for part in parts)
                problems.clashes.append(f"{sent}: do not fill {owner}{list(held.shape)} along dim {int(e is not None)}")

    def _expected_experts(self, owner: str, pieces: _Pieces) -> Sequence[int | None]:
        sent = [expert for expert, _ in pieces if expert is not None]
        if not sent:
            return (None,)
        shape = self._live[owner].shape
        return range(self._num_experts or (shape[0] if shape else max(sent) + 1))


class _Location(NamedTuple):
    """Location of a name: ``live``: the parameter; ``parts``: all parts packed in it."""

    live: str
    kind: Kind
    parts: tuple[str, ...] = ()
    part: str | None = None
    expert: int | None = None


class _Feed(NamedTuple):
    location: _Location
    spec: TensorSpec


#: (expert, part) → the tensor sent for it
_Pieces = dict[tuple[int | None, str | None], TensorSpec]


@dataclass
class _Problems:
    unknown: list[str] = field(default_factory=list)
    unfed: list[str] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    clashes: list[str] = field(default_factory=list)

    def raise_any(self) -> None:
        kinds = {
            "sent, but unknown to the live model": self.unknown,
            "live, but nothing sent feeds it": self.unfed,
            "sent in part only": self.lacking,
            "clashing": self.clashes,
        }
        found = [f"{what}: {_some(which, '; ')}" for what, which in kinds.items() if which]
        if found:
            raise ManifestError(
                f"the manifest does not fit the live model. {'. '.join(found)}. Both sides must build the model from "
                "the same checkpoint, and the resolver must know its packed modules, ties and buffers"
            )


def _all_experts(name: str) -> bool:
    """True for a parameter of an ``experts`` module itself, which holds all experts."""
    module = name.rpartition(".")[0]
    return module == "experts" or module.endswith(".experts")


def _fill(shapes: Sequence[tuple[int, ...]], room: tuple[int, ...]) -> bool:
    """True if parts of these shapes, concatenated along dim 0, have the shape ``room``."""
    return (sum(shape[0] for shape in shapes),) == room[:1] and all(shape[1:] == room[1:] for shape in shapes)


def _piece_name(expert: int | None, parts: Sequence[str]) -> str:
    return ", ".join(parts) if expert is None else f"expert {expert} ({', '.join(parts)})"


def _describe(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return f"{dtype or 'any dtype'}{'' if shape is None else list(shape)}"


def _some(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return separator.join(items[:4]) + more
