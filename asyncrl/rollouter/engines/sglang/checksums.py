"""Whether the server's live parameters are those that were sent, by the checksums that it takes of them itself.

On the CPU SGLang hashes each live parameter's bytes with SHA-256, of which it tells 8 bytes. Its names are its own, so
hashes are compared and not names: every live parameter must be one that was sent, and every tensor that was sent must
be alive. Of projections that SGLang keeps as one, the bytes lie one behind the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import torch

from asyncrl.param_sync.digest import flat_bytes
from asyncrl.param_sync.manifest import Role, TensorSpec

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class SentChecksums:
    """Those that the live parameters should have, of whole tensors on the host. ``held``: those of an earlier session
    that brought the target, where this one does not."""

    def __init__(self, specs: Iterable[TensorSpec], held: SentChecksums | None = None) -> None:
        self._names = {spec.name for spec in specs}
        self._waiting: dict[str, torch.Tensor] = {}  # for the others that they are fused with
        target = {} if held is None else held._known["target"]
        self._known: dict[Role, dict[str, set[str]]] = {"target": target, "draft": {}}  # hash → names

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        known = self._known[spec.role]
        known.setdefault(_sha256([tensor]), set()).add(spec.name)
        members = self._members(spec.name)
        if members is None:
            return
        self._waiting[spec.name] = tensor
        if all(name in self._waiting for name in members):
            fused = _sha256([self._waiting.pop(name) for name in members])
            known.setdefault(fused, set()).update(members)

    def differences(self, role: Role, live: Collection[str], shared: bool = False) -> list[str]:
        """What is wrong with the checksums of a role's live parameters, a line each. ``shared``: it also holds tensors
        of the target, such as its embedding."""
        known = self._known[role]
        sent = {name for names in known.values() for name in names}
        alive = {name for checksum in live for name in known.get(checksum, ())}
        problems = [f"{name}: sent, and no live parameter is it" for name in sorted(sent - alive)]
        ours = known.keys() | (self._known["target"].keys() if shared else set())
        if strange := [checksum for checksum in live if checksum not in ours]:
            problems.append(f"{len(strange)} live parameters of the {role} are none that were sent")
        return problems

    def _members(self, name: str) -> list[str] | None:
        """What SGLang keeps as one with it, in its order."""
        for group in _FUSED:
            for part in group:
                if f".{part}." in name:
                    names = [name.replace(f".{part}.", f".{other}.") for other in group]
                    return names if self._names.issuperset(names) else None
        return None


def _sha256(tensors: Iterable[torch.Tensor]) -> str:
    h = hashlib.sha256()
    for tensor in tensors:
        h.update(memoryview(flat_bytes(tensor).numpy().data))
    return h.hexdigest()[:16]
