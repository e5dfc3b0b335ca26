"""Verifies the server's live parameters by its own checksums.

On the CPU SGLang reports the first 8 bytes of the SHA-256 of each live parameter. It renames parameters, so hashes are
compared rather than names: every live parameter must be a tensor that was sent, and every sent tensor must be live.
Projections that SGLang fuses lie one after the other in memory. The first session finds out which ones it fuses;
hashing everything twice would cost more than the transfer.

On a GPU checksums are of another kind, and workers hold shards: there each parameter that is known by name must have
changed if the tensor sent for it did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from asyncrl.param_sync.digest import flat_bytes
from asyncrl.param_sync.manifest import Role, TensorSpec
from asyncrl.rollouter.engines.sglang.fused import fused, live_names

#: the names of tensors that are one in memory, in their order; of one tensor, mostly
_Piece = tuple[str, ...]


class SentChecksums:
    """Those that the live parameters should have, of whole tensors on the host. ``last``: those of the session before,
    which know more: what SGLang keeps as one, and the target, if it is not among ``specs``."""

    def __init__(self, specs: Collection[TensorSpec], last: SentChecksums | None = None) -> None:
        self._names = {spec.name for spec in specs}
        self._waiting: dict[str, torch.Tensor] = {}  # for the others that they are fused with
        self._known: dict[Role, dict[str, set[_Piece]]] = {"target": {}, "draft": {}}  # by hash
        self._alive: set[_Piece] = set()  # those that were found, here or before
        if last is not None:
            self._alive |= last._alive
            if all(spec.role != "target" for spec in specs):
                self._known["target"] = last._known["target"]

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        known, (alone, *joined) = self._known[spec.role], list(self._pieces(spec.name))
        wanted = [piece for piece in (alone, *joined) if piece in self._alive] or [alone, *joined]
        if alone in wanted:
            known.setdefault(_sha256([tensor]), set()).add(alone)
        for piece in joined:
            if piece in wanted:
                self._waiting[spec.name] = tensor
                if self._waiting.keys() >= set(piece):
                    known.setdefault(_sha256([self._waiting.pop(name) for name in piece]), set()).add(piece)

    def differences(self, role: Role, live: Collection[str], shared: bool = False) -> list[str]:
        """Mismatches of the checksums of a role's live parameters, a line each. ``shared``: it also holds tensors
        of the target, such as its embedding."""
        known = self._known[role]
        alive = {piece for checksum in live for piece in known.get(checksum, ())}
        lacking = {name for pieces in known.values() for piece in pieces for name in piece}
        lacking -= {name for piece in alive for name in piece}
        problems = [f"{name}: sent, and no live parameter is it" for name in sorted(lacking)]
        ours = known.keys() | (self._known["target"].keys() if shared else set())
        if strange := [checksum for checksum in live if checksum not in ours]:
            problems.append(f"{len(strange)} live parameters of the {role} are none that were sent")
        if not problems:
            self._alive |= alive
        return problems

    def _pieces(self, name: str) -> Iterator[_Piece]:
        """The tensor alone, and with what SGLang may keep as one with it."""
        yield (name,)
        if len(piece := fused(name, self._names)) > 1:
            yield piece


def unmoved(changed: Collection[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Live parameters, by ``worker: name`` before and now, that are what they were although a tensor that is theirs by
    its name changed; a line each. A worker may have a part that did not change, but not all of them."""
    moved: dict[str, bool] = {}
    for key, checksum in now.items():
        name = key.rpartition(": ")[2]
        moved[name] = moved.get(name, False) or before.get(key) != checksum
    return [
        f"{name}: it changed, and SGLang's {live} did not"
        for name in sorted(changed)
        for live in sorted(live_names(name))
        if moved.get(live) is False
    ]


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for tensor in tensors:
        h.update(memoryview(flat_bytes(tensor).numpy().data))
    return h.hexdigest()[:16]
