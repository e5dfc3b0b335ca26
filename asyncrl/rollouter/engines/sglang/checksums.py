"""Verification of the server's live parameters by its own checksums.

On the CPU SGLang reports the first 8 bytes of the SHA-256 of each live parameter. It renames parameters, so the check
compares hashes, not names: every live parameter must match a sent tensor, and every sent tensor a live parameter.
Projections that SGLang fuses are contiguous in memory. The first session learns which ones it fuses, because hashing
everything both ways would cost more than the transfer.

On a GPU the checksums are of another kind and workers hold shards. There, if a sent tensor changed, the parameter with
its name must have changed too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from asyncrl.param_sync.digest import flat_bytes
from asyncrl.param_sync.manifest import Role, TensorSpec
from asyncrl.rollouter.engines.sglang.fused import fused, live_names

#: names of the tensors of one live parameter, in memory order; usually just one
_Piece = tuple[str, ...]


class SentChecksums:
    """Checksums that the live parameters should have, computed from whole tensors on the host. ``last``: those of the
    previous session, which supply the fusions learned so far, and the target's checksums if ``specs`` has none of
    it."""

    def __init__(self, specs: Collection[TensorSpec], last: SentChecksums | None = None) -> None:
        self._names = {spec.name for spec in specs}
        self._waiting: dict[str, torch.Tensor] = {}  # for the tensors that they are fused with
        self._known: dict[Role, dict[str, set[_Piece]]] = {"target": {}, "draft": {}}  # by hash
        self._alive: set[_Piece] = set()  # pieces found live, in this session or an earlier one
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
        """Mismatches between a role's live checksums and the sent tensors, one line each. ``shared``: the role also
        holds tensors of the target, such as its embedding."""
        known = self._known[role]
        alive = {piece for checksum in live for piece in known.get(checksum, ())}
        lacking = {name for pieces in known.values() for piece in pieces for name in piece}
        lacking -= {name for piece in alive for name in piece}
        problems = [f"{name}: sent, but no live parameter matches it" for name in sorted(lacking)]
        ours = known.keys() | (self._known["target"].keys() if shared else set())
        if strange := [checksum for checksum in live if checksum not in ours]:
            problems.append(f"{len(strange)} live parameters of the {role} match no sent tensor")
        if not problems:
            self._alive |= alive
        return problems

    def _pieces(self, name: str) -> Iterator[_Piece]:
        """The tensor alone, and fused with others as SGLang may keep it."""
        yield (name,)
        if len(piece := fused(name, self._names)) > 1:
            yield piece


def unmoved(changed: Collection[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Live parameters whose checksums did not change although the tensor of that name did, one line each. ``before``
    and ``now`` are keyed by ``worker: name``. A single worker's shard may rightly stay the same, but not every
    worker's."""
    moved: dict[str, bool] = {}
    for key, checksum in now.items():
        name = key.rpartition(": ")[2]
        moved[name] = moved.get(name, False) or before.get(key) != checksum
    return [
        f"{name}: it changed, but SGLang's {live} did not"
        for name in sorted(changed)
        for live in sorted(live_names(name))
        if moved.get(live) is False
    ]


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for tensor in tensors:
        h.update(memoryview(flat_bytes(tensor).numpy().data))
    return h.hexdigest()[:16]
