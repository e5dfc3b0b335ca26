"""Where canonical tensor names belong in an engine's live model, and under which names its loader takes them.

Senders name tensors as the checkpoint's safetensors files do. A live model has other parameters: several projections
packed into one, all experts of a layer fused into one, modules wrapped by LoRA layers (``q_proj.base_layer.weight``),
names that share storage. All of it is settled here from names, dtypes and shapes, before anything is paused.
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

#: parameter below ``experts`` that holds all experts → the parts of each; without ``{leaf}`` it holds their ``weight``
FUSED_EXPERTS: Mapping[str, Sequence[str]] = {
    "w13_{leaf}": ("gate_proj", "up_proj"),
    "w2_{leaf}": ("down_proj",),
    "routed_experts.w13_{leaf}": ("gate_proj", "up_proj"),
    "routed_experts.w2_{leaf}": ("down_proj",),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}

_LEAF = "{leaf}"
_BASE_LAYER = "base_layer"
_ONE_EXPERT = re.compile(r"((?:.+\.)?experts)\.(\d+)\.([^.]+)\.([^.]+)")

#: ``whole``: all of its owner · ``packed``: a part of it · ``expert``: a part of one expert of it · ``fused``: all
#: experts of it, in the checkpoint's layout · ``tied``: comes with the tensor it is tied to · ``adapter``: a LoRA
#: tensor · ``ignored``: nothing here wants it
Kind = Literal["whole", "packed", "expert", "fused", "tied", "adapter", "ignored"]


class LiveTensor(NamedTuple):
    """A live parameter, as whole as the checkpoint has it. ``None``: not to be compared with what is sent (quantised;
    sharded, padded or transposed in a way that does not say what the whole is)."""

    dtype: str | None
    shape: tuple[int, ...] | None


class Resolved(NamedTuple):
    """What becomes of one tensor of the manifest.

    ``load_as``: the name for the engine's own loader; None if there is nothing to load. ``owner``: the live parameter
    that holds the data; None for what the live model does not hold itself. ``source``: the sent tensor with the data,
    another than ``name`` for a tied one. ``part`` (as ``q_proj``) and ``expert`` say which piece of the owner it is.
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
        """Sent tensor → the names under which the engine's loader takes it: two if it also fills a tied tensor that
        has storage of its own here. Adapter tensors are not among them."""
        loads: dict[str, tuple[str, ...]] = {}
        for t in self.tensors:
            if t.load_as is not None and t.kind != "adapter":
                loads[t.source] = (*loads.get(t.source, ()), t.load_as)
        return loads

    def adapters(self) -> tuple[Resolved, ...]:
        return tuple(t for t in self.tensors if t.kind == "adapter")


def wrap(name: str) -> str:
    """The leaf's name once a LoRA layer wraps its module: ``q_proj.weight`` → ``q_proj.base_layer.weight``."""
    module, dot, leaf = name.rpartition(".")
    return f"{module}{dot}{_BASE_LAYER}.{leaf}"


def unwrap(name: str) -> str:
    """The name without its ``base_layer`` segment, if it has one."""
    if _BASE_LAYER not in name:
        return name
    return ".".join(segment for segment in name.split(".") if segment != _BASE_LAYER)


class NameResolver:
    """Resolves canonical names against one live model (a separate draft model has a resolver of its own). ::

        resolver = NameResolver({"model.layers.0.self_attn.qkv_proj.weight": LiveTensor("bfloat16", (96, 64)), ...})
        loads = resolver.resolve(manifest).loads()
        model.load_weights((name, tensor) for name in loads["model.layers.0.self_attn.q_proj.weight"])

    ``live``: every parameter by its live name, and every buffer that the checkpoint holds.
    ``packed``, ``experts``: what the model packs, as data; they decide where a name belongs and never change it.
    ``ties``: live name → the live parameter whose storage it shares.
    ``ignore``: live names that need no data here, as buffers; and names that are not live and to which nothing is
    done, as those of storage that another model's resolver sees to.
    ``expects_base_layer``: whether the engine's loader wants ``base_layer`` in the names of wrapped modules' tensors;
    where it is not the same for all of them, by live name.
    ``num_experts``: experts of a layer in the checkpoint, if a fused parameter holds fewer (expert parallelism) or
    more (redundant experts); None: as many as its dim 0 or, where that is unknown, as the highest one sent says.
    ``rename``: canonical name → live name, where modules sit elsewhere in the live model; None for a name that belongs
    nowhere in it. Used to find the owner only.
    ``drops``: names that the engine's loader leaves out, as buffers that it computes itself.

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
            raise ValueError(f"a tie leads to a live parameter that is not tied itself, found {_some(astray)}")
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
        """Say what becomes of each tensor. ``partial``: live parameters that nothing feeds are allowed (a frozen base
        of which only adapters travel); half-fed ones never are.

        Raises ManifestError, one for all: unknown names, parameters without data, missing parts or experts, clashes
        of dtype or shape.
        """
        specs = list(tensors)
        sent = {spec.name for spec in specs if spec.tied_to is None}
        resolved: list[Resolved] = []
        feeds: dict[str, list[_Feed]] = {}
        problems = _Problems()
        for spec in specs:
            place = self._place(spec.name)
            entry = self._entry(spec, place)
            if entry is None:
                problems.unknown.append(spec.name)
                continue
            resolved.append(entry)
            if place is None or entry.load_as is None:
                continue
            if entry.source not in sent:
                problems.clashes.append(f"{spec.name}: tied to {entry.source}, which is not sent")
            feeds.setdefault(self._holder(place.live), []).append(_Feed(place, spec))
        for owner, fed in feeds.items():
            self._check(owner, fed, problems)
        if not partial:
            problems.unfed += [name for name in self._live if name not in feeds and self._needs_data(name)]
        problems.raise_any()
        return NamePlan(tuple(resolved))

    def wants(self, name: str) -> bool:
        """Whether the name belongs somewhere in the live model where data is needed."""
        place = self._place(name)
        return place is not None and place.kind != "adapter" and place.live not in self._ignore

    def _holder(self, live: str) -> str:
        return self._ties.get(live, live)

    def _needs_data(self, live: str) -> bool:
        return not (live in self._ties or live in self._ignore or is_adapter(live))

    def _entry(self, spec: TensorSpec, place: _Place | None) -> Resolved | None:
        """None if the name is unknown."""
        name, role, source = spec.name, spec.role, spec.tied_to or spec.name
        if spec.tied_to is not None:
            other = self._place(spec.tied_to)
            if place is None or place.live in self._ignore or (other and self._piece(place) == self._piece(other)):
                holds = place or other
                return Resolved(name, None, self._holder(holds.live) if holds else None, role, "tied", source)
        if place is not None:
            owner, load_as = self._holder(place.live), self._load_as(name, place)
            return Resolved(name, load_as, owner, role, place.kind, source, place.part, place.expert)
        if is_adapter(name):
            return Resolved(name, name, None, role, "adapter", source)
        ignored = name in self._ignore or self._rename(name) in self._ignore or self._drops(name)
        return Resolved(name, None, None, role, "ignored", source) if ignored else None

    def _piece(self, place: _Place) -> tuple[str, int | None, str | None]:
        return self._holder(place.live), place.expert, place.part

    def _load_as(self, name: str, place: _Place) -> str:
        if place.kind == "adapter":
            return name
        bare = unwrap(name)
        # A tensor of all experts is no leaf of the module that is wrapped: loaders find its parameter themselves.
        if _all_experts(bare) or place.live not in self._wrapped or not self._expects_base_layer(place.live):
            return bare
        return wrap(bare)

    def _place(self, name: str) -> _Place | None:
        """Where the name belongs, or None. A live name comes first: no rule rewrites it."""
        if is_adapter(name):
            return _Place(name, "adapter") if name in self._live else None
        renamed = self._rename(name)
        if renamed is None:
            return None
        bare = unwrap(renamed)
        live = self._by_bare.get(renamed) or self._by_bare.get(bare)
        if live is not None:
            return _Place(live, "whole")
        return self._packed_place(bare) or self._expert_place(bare)

    def _packed_place(self, name: str) -> _Place | None:
        *module, leaf = name.split(".")
        for n in range(1, min(self._longest_part, len(module)) + 1):
            part = ".".join(module[-n:])
            for owner, parts in self._packed.get(part, ()):
                live = self._by_bare.get(".".join([*module[:-n], owner, leaf]))
                if live is not None:
                    return _Place(live, "packed", parts, part)
        return None

    def _expert_place(self, name: str) -> _Place | None:
        if one := _ONE_EXPERT.fullmatch(name):
            module, index, part, leaf = one.groups()
            for owner, parts in self._experts.items():
                live = self._fused(module, owner, leaf) if part in parts else None
                if live is not None:
                    return _Place(live, "expert", parts, part, int(index))
        elif _all_experts(name):
            module, _, layout = name.rpartition(".")
            for owner, parts in self._experts.items():
                live = self._fused(module, owner, "weight") if parts == self._experts.get(layout) else None
                if live is not None:
                    return _Place(live, "fused")
        return None

    def _fused(self, experts: str, owner: str, leaf: str) -> str | None:
        if _LEAF not in owner and leaf != "weight":
            return None
        return self._by_bare.get(f"{experts}.{owner.replace(_LEAF, leaf)}")

    def _check(self, owner: str, fed: list[_Feed], problems: _Problems) -> None:
        """Whether what feeds one live parameter is all of it, once, and of its dtype and shape."""
        held = self._live[owner]
        pieces: _Pieces = {}
        for place, spec in fed:
            first = pieces.setdefault((place.expert, place.part), spec)
            if first is not spec:
                problems.clashes.append(f"{owner}: fed by {first.name} and by {spec.name}")
            shape = held.shape if place.kind in ("whole", "adapter") else None
            if held.dtype not in (None, spec.dtype) or shape not in (None, spec.shape):
                sent, here = _describe(spec.dtype, None if shape is None else spec.shape), _describe(held.dtype, shape)
                problems.clashes.append(f"{spec.name}: sent as {sent}, {owner} holds {here}")
        whole = pieces.get((None, None))
        if whole is None:
            self._check_pieces(owner, fed[0].place.parts, pieces, problems)
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


class _Place(NamedTuple):
    """Where a name belongs: ``live`` is the parameter, ``parts`` all that it is packed of."""

    live: str
    kind: Kind
    parts: tuple[str, ...] = ()
    part: str | None = None
    expert: int | None = None


class _Feed(NamedTuple):
    place: _Place
    spec: TensorSpec


#: (expert, part) → what is sent for it
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
    """Whether it is a parameter of an ``experts`` module itself, and so holds all of them."""
    module = name.rpartition(".")[0]
    return module == "experts" or module.endswith(".experts")


def _fill(shapes: Sequence[tuple[int, ...]], room: tuple[int, ...]) -> bool:
    """Whether parts of these shapes, put together along dim 0, have the shape ``room``."""
    return (sum(shape[0] for shape in shapes),) == room[:1] and all(shape[1:] == room[1:] for shape in shapes)


def _piece_name(expert: int | None, parts: Sequence[str]) -> str:
    return ", ".join(parts) if expert is None else f"expert {expert} ({', '.join(parts)})"


def _describe(dtype: str | None, shape: tuple[int, ...] | None) -> str:
    return f"{dtype or 'any dtype'}{'' if shape is None else list(shape)}"


def _some(items: Sequence[str], separator: str = ", ") -> str:
    more = f" and {len(items) - 4} more" if len(items) > 4 else ""
    return separator.join(items[:4]) + more
