"""LoRA adapters over the sync: received whole and applied once (`adapter_merge` sends full weights instead).

Canonical names are those of PEFT checkpoints: ``base_model.model.<module path>.lora_A.weight``. With a frozen base a
replica gets the base with its first sync, and then only the adapter and the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from asyncrl.config.schema import LoraConfig
from asyncrl.param_sync.buckets import check_checksum
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.live_receiver import LiveViewReceiver
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec, is_adapter
from asyncrl.param_sync.receiver import Bucket, Receiver, TensorPart
from asyncrl.sample import PolicyVersion

#: the shape [out, in] of each module's weight, by the module's canonical path (``model.layers.0.self_attn.q_proj``)
ModuleShapes = Mapping[str, tuple[int, int]]

_PREFIX = "base_model.model."


def adapter_spec(lora: LoraConfig, modules: ModuleShapes, dtype: str) -> AdapterSpec:
    """The adapter that a config asks for, of a model with these ``modules``. Raises ManifestError for a target that
    none of them ends with."""
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
    targets = leaves if "all-linear" in lora.target_modules else lora.target_modules
    if unknown := [target for target in targets if not any(f".{m}".endswith(f".{target}") for m in modules)]:
        raise ManifestError(
            f"{', '.join(unknown)}: no linear layer of the model's trunk ends with it; they end with "
            f"{', '.join(leaves)}, or take all-linear"
        )
    return AdapterSpec("policy", lora.rank, lora.alpha, tuple(targets), dtype)


def adapter_shapes(module: str, weight: tuple[int, int], r: int, embedding: bool = False) -> dict[str, tuple[int, int]]:
    """Names and shapes of the pair A [r, in], B [out, r] for a module's weight [out, in]. For an embedding, with its
    weight [tokens, dim]: A [r, tokens], B [dim, r]."""
    rows, columns = weight
    if embedding:
        return {f"{_PREFIX}{module}.lora_embedding_A": (r, rows), f"{_PREFIX}{module}.lora_embedding_B": (columns, r)}
    return {f"{_PREFIX}{module}.lora_A.weight": (r, columns), f"{_PREFIX}{module}.lora_B.weight": (rows, r)}


def target_pairs(manifest: Manifest, modules: ModuleShapes) -> dict[str, dict[str, tuple[int, int]]]:
    """Names and shapes of the pair of each module that the manifest's adapter targets, by module. A pair is an
    embedding's if the manifest names one for this module."""
    if manifest.adapter is None:
        return {}
    named = {t.name for t in manifest}
    pairs = {}
    for module, weight in modules.items():
        if manifest.adapter.targets(module):
            embedding = adapter_shapes(module, weight, manifest.adapter.r, embedding=True)
            plain = adapter_shapes(module, weight, manifest.adapter.r)
            pairs[module] = plain if named.isdisjoint(embedding) else embedding
    return pairs


def check_adapter(manifest: Manifest, modules: ModuleShapes, side: str = "the replica") -> None:
    """Raises ManifestError unless the manifest's adapter is complete: both tensors of each target module among
    ``modules``, which are those of ``side``, in the shapes that fit its weight, and no others."""
    spec = manifest.adapter
    sent = {t.name: t for t in manifest.sent() if is_adapter(t.name)}
    if spec is None:
        raise ManifestError(
            f"{side} takes a LoRA adapter, the sender's manifest has none (and {len(sent)} adapter tensors); send the "
            "whole adapter with its name, rank, alpha, target modules and dtype, or turn LoRA off"
        )
    wanted = {name: shape for pair in target_pairs(manifest, modules).values() for name, shape in pair.items()}
    problems = [
        f"{target}: a target module of the sender, {side} has none of this name"
        for target in spec.target_modules
        if not any(f".{module}".endswith(f".{target}") for module in modules)
    ]
    problems += [f"{name}: taken by {side}, not sent" for name in wanted if name not in sent]
    problems += [f"{name}: sent, but no target module of {side} takes it" for name in sent if name not in wanted]
    for name, shape in wanted.items():
        takes = TensorSpec(name, spec.dtype, shape)
        if name in sent and sent[name] != takes:
            problems.append(f"{name}: sent as {_described(sent[name])}, {side} takes {_described(takes)}")
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ManifestError(
            f"adapter {spec.name} (r {spec.r}) is not whole or does not fit {side}, {len(problems)} differ: "
            f"{'; '.join(problems[:4])}{more}. Both sides must have the same rank, targets and base model"
        )


def check_lora(manifest: Manifest, modules: ModuleShapes | None, needs_base: bool) -> None:
    """Raises ManifestError for an adapter that is not whole, or not wanted by a replica with ``modules`` (None with
    LoRA off), and for a base that is missing."""
    if modules is not None:
        check_adapter(manifest, modules)
    elif (count := sum(is_adapter(t.name) for t in manifest)) or manifest.adapter is not None:
        name = "" if manifest.adapter is None else f" of adapter {manifest.adapter.name}"
        raise ManifestError(
            f"the sender sends {count} adapter tensors{name}, the replica was made with LoRA off; make it with "
            "LoRA on, or send merged weights"
        )
    if needs_base and not manifest.sends_base:
        raise ManifestError(
            f"base first: the sender sends {len(manifest.sent())} tensors and none of the base, the replica holds "
            "no committed base; send the base with a replica's first sync, also after its restart"
        )


def _described(spec: TensorSpec) -> str:
    return f"{spec.role} {spec.dtype}{list(spec.shape)}"


# -- receiving ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdapterState:
    """A whole adapter: host tensors by their canonical names. They belong to whoever holds the state and are never
    written again, by the receiver or by the engine, because digests are taken of them."""

    spec: AdapterSpec
    tensors: Mapping[str, torch.Tensor]


class TwoStepReceiver(Receiver, Protocol):
    """A receiver whose ``take`` comes in two steps, so that all of a bucket is checked before any of it is written."""

    def place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None: ...

    def check(self, bucket: Bucket) -> None:
        """Count the bucket in. Raises SyncError if it is not the next one, whole."""

    def write(self, bucket: Bucket) -> None:
        """Copy the tensors of a checked bucket to where they belong."""


class AdapterReceiver:
    """Implements `asyncrl.param_sync.receiver.Receiver` around the receivers of the base and of the draft.

    ``modules``: those that an adapter may target, or None with LoRA off. ``apply`` gives the engine a whole adapter,
    once per commit and before the other weights are committed; ``on_commit`` is told the new version, last. ::

        receiver = AdapterReceiver(LiveViewReceiver(base, tied, ignore), LiveViewReceiver(draft, {}, ignore), modules,
                                   apply=engine.set_adapter, on_commit=engine.set_version)

    Adapter tensors are collected in host memory, so the engine keeps the old adapter until the commit; at most two
    adapters are held. The base, and a frozen draft, may be left out of a manifest once they were committed here:
    `needs_base`.
    """

    def __init__(
        self,
        base: TwoStepReceiver,
        draft: TwoStepReceiver | None,
        modules: ModuleShapes | None,
        apply: Callable[[AdapterState, PolicyVersion], None],
        on_commit: Callable[[PolicyVersion], None],
    ) -> None:
        self._base, self._draft, self._modules = base, draft, modules
        self._apply, self._on_commit = apply, on_commit
        self._copies = _copies_of({})
        self._live: dict[TwoStepReceiver, frozenset[str]] = {}  # the inner receivers in the session, what each is sent
        self._staged: AdapterState | None = None
        self._applied: AdapterState | None = None
        self._base_committed = self._verified = False
        self._whole = True  # False from a failed apply on
        self.base_travels = self.draft_travels = False

    @property
    def needs_base(self) -> bool:
        """Whether the next manifest must send the base: none is committed here, or one was cut off on its way (and with
        it a frozen draft, which never travels without)."""
        return not self._base_committed or not self._base.intact()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The adapter's tensors for the target's digest: those that a verified session is about to apply, else those
        applied last. The session's digest also covers the base if ``base_travels``, and the draft if that does."""
        state = self._staged if self._verified else self._applied
        return {} if state is None else state.tensors

    def open(self, session: str, manifest: Manifest) -> None:
        """Raises ManifestError for an adapter that is not whole or not wanted here, for a base that is missing, and
        for what the inner receivers refuse."""
        check_lora(manifest, self._modules, self.needs_base)
        base = [t for t in manifest if t.role == "target" and not is_adapter(t.name)]
        draft = [t for t in manifest if t.role == "draft" and not is_adapter(t.name)]
        base_travels = manifest.sends_base
        if self._draft is None and any(t.tied_to is None for t in draft):
            raise ManifestError(f"the sender sends {len(draft)} draft tensors, the replica was made without a draft")
        shares: list[tuple[TwoStepReceiver, list[TensorSpec]]] = []
        if base_travels or self._modules is None:  # without an adapter a target that is not sent is an error
            shares.append((self._base, base))
        draft_travels = self._draft is not None and (base_travels or not manifest.frozen_draft)
        if self._draft is not None and draft_travels:
            shares.append((self._draft, draft))
        for receiver, tensors in shares:
            receiver.open(session, Manifest(tuple(tensors)))
        self._stage(session, manifest)
        self._live = {receiver: frozenset(t.name for t in tensors) for receiver, tensors in shares}
        self.base_travels, self.draft_travels, self._verified = base_travels, draft_travels, False

    def place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        """As the inner receiver says; a part of the adapter comes in a bucket."""
        owner = self._owner(part.name)
        if owner is self._copies:
            return None
        self._verified = False
        return owner.place(session, part, device)

    def take(self, bucket: Bucket) -> None:
        """Check the whole bucket, its checksum once, then write the inner receivers' parts and copy the adapter's.
        Raises SyncError as `LiveViewReceiver.check` does."""
        shares = self._shares(bucket)
        for receiver, share in shares.items():
            receiver.check(share)
        check_checksum(bucket)
        self._verified = False
        for receiver, share in shares.items():
            if share.parts:
                receiver.write(share)

    def verify(self) -> None:
        """Raises SyncError unless every byte of the adapter, the base if it travels, and the draft has arrived."""
        for receiver in self._receivers():
            receiver.verify()
        self._verified = True

    def commit(self, version: PolicyVersion) -> None:
        """Raises SyncError if nothing was verified, and what ``apply`` raises: the replica is not intact then."""
        if not self._verified:
            raise SyncError("commit", None, version, None, "nothing verified to commit; verify comes first")
        self._verified = False
        if self._staged is not None:
            self._applied, self._whole = None, False
            self._apply(self._staged, version)
            self._applied, self._whole = self._staged, True
        for receiver in self._live:
            receiver.commit(version)
        self._base_committed = self._base_committed or self.base_travels
        self._forget()
        self._on_commit(version)

    def abort(self) -> None:
        """Forget the session and its copies: the adapter applied last stays."""
        self._verified = False
        self._forget()
        self._base.abort()
        if self._draft is not None:
            self._draft.abort()

    def intact(self) -> bool:
        return self._whole and self._base.intact() and (self._draft is None or self._draft.intact())

    def _stage(self, session: str, manifest: Manifest) -> None:
        adapter = [t for t in manifest.sent() if is_adapter(t.name)]
        # New memory each time: the engine may go on reading the tensors of the adapter it has.
        tensors = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in adapter}
        self._copies = _copies_of(tensors)
        self._copies.open(session, Manifest(tuple(adapter)))
        self._staged = None if manifest.adapter is None else AdapterState(manifest.adapter, tensors)

    def _receivers(self) -> list[TwoStepReceiver]:
        return [self._copies, *self._live]

    def _shares(self, bucket: Bucket) -> dict[TwoStepReceiver, Bucket]:
        """The bucket as each receiver of the session sees it: its own parts, and no checksum, which is the whole's."""
        parts: dict[TwoStepReceiver, list[TensorPart]] = {receiver: [] for receiver in self._receivers()}
        for part in bucket.parts:
            parts[self._owner(part.name)].append(part)
        return {receiver: bucket._replace(parts=tuple(own), checksum=None) for receiver, own in parts.items()}

    def _owner(self, name: str) -> TwoStepReceiver:
        """What nobody expects goes to the copies, which refuse it."""
        return next((receiver for receiver, names in self._live.items() if name in names), self._copies)

    def _forget(self) -> None:
        self._copies, self._live, self._staged = _copies_of({}), {}, None


def _copies_of(tensors: Mapping[str, torch.Tensor]) -> LiveViewReceiver:
    return LiveViewReceiver(tensors, {}, on_commit=lambda version: None)
