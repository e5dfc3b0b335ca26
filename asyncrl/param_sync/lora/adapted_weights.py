"""Live weights with a LoRA adapter, which is collected completely and applied once, at the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from asyncrl.param_sync.buckets import Bucket, TensorPart, check_checksum
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.lora.adapters import ModuleShapes, check_lora
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec, is_adapter
from asyncrl.types.versions import PolicyVersion


@dataclass(frozen=True)
class AdapterState:
    """A complete adapter: host tensors by canonical name. Neither the sync nor the engine may write to them: digests
    are computed from them."""

    spec: AdapterSpec
    tensors: Mapping[str, torch.Tensor]


class AdaptedWeights:
    """`LiveWeights` of base and draft, plus an adapter; same calls as `LiveWeights`.

    ``modules``: those that an adapter may target, None with LoRA off. ``apply`` gives the engine a complete adapter,
    once per commit and before the other weights are committed; ``on_commit`` gets the new version, last. ::

        weights = AdaptedWeights(LiveWeights(base, tied, ignore), LiveWeights(draft, {}, ignore), modules,
                                 apply=engine.set_adapter, on_commit=engine.set_version)

    Adapter tensors are collected in host memory, so the engine keeps the old adapter until the commit; at most two
    adapters are held. Once the base and a frozen draft were committed here, a manifest may omit them, see `needs_base`.
    """

    def __init__(
        self,
        base: LiveWeights,
        draft: LiveWeights | None,
        modules: ModuleShapes | None,
        apply: Callable[[AdapterState, PolicyVersion], None],
        on_commit: Callable[[PolicyVersion], None],
    ) -> None:
        self._base, self._draft, self._modules = base, draft, modules
        self._apply, self._on_commit = apply, on_commit
        self._copies = _copies_of({})
        self._live: dict[LiveWeights, frozenset[str]] = {}  # in the session → names of their tensors
        self._staged: AdapterState | None = None
        self._applied: AdapterState | None = None
        self._base_committed = self._verified = False
        self._whole = True  # False once an apply has failed
        self.base_travels = self.draft_travels = False

    @property
    def needs_base(self) -> bool:
        """True if the next manifest must send the base: none was committed here, or its transfer was interrupted (and
        with it that of a frozen draft, which is never sent alone)."""
        return not self._base_committed or not self._base.intact()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The adapter's tensors for the target's digest: of a verified session before its commit, else those applied
        last. The session's digest also covers the base if ``base_travels`` and the draft if ``draft_travels``."""
        state = self._staged if self._verified else self._applied
        return {} if state is None else state.tensors

    def open(self, session: str, manifest: Manifest) -> None:
        """Raises ManifestError for an adapter that is incomplete or not accepted here, for a missing base, and for
        tensors that base or draft refuse."""
        check_lora(manifest, self._modules, self.needs_base)
        base = [t for t in manifest if t.role == "target" and not is_adapter(t.name)]
        draft = [t for t in manifest if t.role == "draft" and not is_adapter(t.name)]
        base_travels = manifest.sends_base
        if self._draft is None and any(t.tied_to is None for t in draft):
            raise ManifestError(f"the sender sends {len(draft)} draft tensors, but the replica has no draft")
        shares: list[tuple[LiveWeights, list[TensorSpec]]] = []
        if base_travels or self._modules is None:  # without an adapter, a target that is not sent is an error
            shares.append((self._base, base))
        draft_travels = self._draft is not None and (base_travels or not manifest.frozen_draft)
        if self._draft is not None and draft_travels:
            shares.append((self._draft, draft))
        for weights, tensors in shares:
            weights.open(session, Manifest(tuple(tensors)))
        self._stage(session, manifest)
        self._live = {weights: frozenset(t.name for t in tensors) for weights, tensors in shares}
        self.base_travels, self.draft_travels, self._verified = base_travels, draft_travels, False

    def destination(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        """See `LiveWeights.destination`; parts of the adapter always travel inside a bucket."""
        owner = self._owner(part.name)
        if owner is self._copies:
            return None
        self._verified = False
        return owner.destination(session, part, device)

    def take(self, bucket: Bucket) -> None:
        """Check the bucket, its checksum only once, then write the parts of base and draft and copy the adapter's.
        Raises SyncError as `LiveWeights.check` does."""
        shares = self._shares(bucket)
        for weights, share in shares.items():
            weights.check(share)
        check_checksum(bucket)
        self._verified = False
        for weights, share in shares.items():
            if share.parts:
                weights.write(share)

    def verify(self) -> None:
        """Raises SyncError unless every byte of the adapter, of the base if it is sent, and of the draft has
        arrived."""
        for weights in self._weights():
            weights.verify()
        self._verified = True

    def commit(self, version: PolicyVersion) -> None:
        """Raises SyncError if nothing was verified, and the exception of a failed ``apply``, after which `intact` is
        False."""
        if not self._verified:
            raise SyncError("commit", None, version, None, "nothing verified to commit; verify comes first")
        self._verified = False
        if self._staged is not None:
            self._applied, self._whole = None, False
            self._apply(self._staged, version)
            self._applied, self._whole = self._staged, True
        for weights in self._live:
            weights.commit(version)
        self._base_committed = self._base_committed or self.base_travels
        self._forget()
        self._on_commit(version)

    def abort(self) -> None:
        """Forget the session and its copies; the adapter applied last stays."""
        self._verified = False
        self._forget()
        self._base.abort()
        if self._draft is not None:
            self._draft.abort()

    def intact(self) -> bool:
        return self._whole and self._base.intact() and (self._draft is None or self._draft.intact())

    def _stage(self, session: str, manifest: Manifest) -> None:
        adapter = [t for t in manifest.sent() if is_adapter(t.name)]
        # New memory each time: the engine may still read the tensors of its current adapter.
        tensors = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in adapter}
        self._copies = _copies_of(tensors)
        self._copies.open(session, Manifest(tuple(adapter)))
        self._staged = None if manifest.adapter is None else AdapterState(manifest.adapter, tensors)

    def _weights(self) -> list[LiveWeights]:
        return [self._copies, *self._live]

    def _shares(self, bucket: Bucket) -> dict[LiveWeights, Bucket]:
        """The bucket split by owner. Each share has its own parts, and no checksum, because that covers the whole
        bucket."""
        parts: dict[LiveWeights, list[TensorPart]] = {weights: [] for weights in self._weights()}
        for part in bucket.parts:
            parts[self._owner(part.name)].append(part)
        return {weights: bucket._replace(parts=tuple(own), checksum=None) for weights, own in parts.items()}

    def _owner(self, name: str) -> LiveWeights:
        """Owner of a tensor. Unexpected names belong to the copies, which refuse them."""
        return next((weights for weights, names in self._live.items() if name in names), self._copies)

    def _forget(self) -> None:
        self._copies, self._live, self._staged = _copies_of({}), {}, None


def _copies_of(tensors: Mapping[str, torch.Tensor]) -> LiveWeights:
    return LiveWeights(tensors, {}, on_commit=lambda version: None)
