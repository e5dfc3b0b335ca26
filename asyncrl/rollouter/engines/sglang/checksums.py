"""Whether the server's live parameters are those that were sent, by the checksums that it takes of them itself.

On the CPU SGLang hashes each live parameter's bytes with SHA-256, of which it tells 8 bytes. Its names are its own, so
hashes are compared and not names: every live parameter must be one that was sent, and every tensor that was sent must
be alive. Of projections that SGLang keeps as one, the bytes lie one behind the other. Which it does keep as one is
found out in the first session: hashing everything twice would cost more than the transfer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator

import torch

from asyncrl.param_sync.digest import flat_bytes
from asyncrl.param_sync.manifest import Role, TensorSpec

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

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
        known, (alone, *fused) = self._known[spec.role], list(self._pieces(spec.name))
        wanted = [piece for piece in (alone, *fused) if piece in self._alive] or [alone, *fused]
        if alone in wanted:
            known.setdefault(_sha256([tensor]), set()).add(alone)
        for piece in fused:
            if piece in wanted:
                self._waiting[spec.name] = tensor
                if self._waiting.keys() >= set(piece):
                    known.setdefault(_sha256([self._waiting.pop(name) for name in piece]), set()).add(piece)

    def differences(self, role: Role, live: Collection[str], shared: bool = False) -> list[str]:
        """What is wrong with the checksums of a role's live parameters, a line each. ``shared``: it also holds tensors
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
        for group in _FUSED:
            for part in group:
                if f".{part}." in name:
                    piece = tuple(name.replace(f".{part}.", f".{other}.") for other in group)
                    if self._names.issuperset(piece):
                        yield piece


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for tensor in tensors:
        h.update(memoryview(flat_bytes(tensor).numpy().data))
    return h.hexdigest()[:16]
