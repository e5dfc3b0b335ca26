"""Fingerprints that check, on the tensors' own device, that live parameters hold the tensors that were sent.

A fingerprint is two sums over 64-bit words of a tensor, modulo 2**64: plain, and weighted by position in the row. It
uses only the first and last words of each row, so that it costs little next to the transfer. It detects tensors that
were not loaded or loaded to the wrong place; digests detect damage in transit. Fingerprints add up over rows: a
parameter packed from several tensors along dim 0, even with zero padding, has the sum of theirs.

A loader may also shard, quantise or transpose. The check therefore learns which parameters take tensors unchanged: once
fingerprints agree, they must agree in every later session. For the others it only checks that not all of them stay the
same when their tensors change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MODULUS = 1 << 64
_ENDS = 64  # words at either end of a row

_Sums = tuple[int, int]


class Verdict(NamedTuple):
    """``wrong``: live parameters that do not hold their sent tensors. ``stale``: True if every parameter whose tensors
    changed stayed the same; None if no tensor changed. For a single worker's shard that may be correct, but not for all
    workers.
    """

    wrong: list[str]
    stale: bool | None


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Fingerprint of a tensor, int64 [2] on its device."""
    t = tensor.detach()
    rows = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(-1, 1)).contiguous()
    if rows.storage_offset() * rows.itemsize % 8:
        rows = rows.clone()
    words = rows.view(torch.int64 if rows.shape[1] * rows.itemsize % 8 == 0 else torch.uint8)
    if words.shape[1] > 2 * _ENDS:
        words = torch.cat([words[:, :_ENDS], words[:, -_ENDS:]], 1)
    columns = words.sum(0, dtype=torch.int64)
    weights = torch.arange(1, 2 * len(columns), 2, device=columns.device)
    return torch.stack([columns.sum(), (columns * weights).sum()])


class FingerprintCheck:
    """Compares fingerprints of one model, over all its sessions. ::

        sent = {name: fingerprint(tensor) for name, tensor in arriving}
        check.verdict(feeds, sent, dict(net.named_parameters()))

    ``feeds``: live parameter → tensors that it consists of; parameters with an unsent tensor are skipped.
    """

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._last: dict[str, tuple[_Sums, _Sums]] = {}  # by parameter: sums of its sent tensors, and its own

    def verdict(
        self,
        feeds: Mapping[str, Sequence[str]],
        sent: Mapping[str, torch.Tensor],
        live: Mapping[str, torch.Tensor],
    ) -> Verdict:
        fed = {owner: names for owner, names in feeds.items() if sent.keys() >= {*names} and _plain(live.get(owner))}
        arrived = dict(zip(sent, _numbers(list(sent.values())), strict=True))
        found = dict(zip(fed, _numbers([fingerprint(live[owner]) for owner in fed]), strict=True))
        wrong, moved = [], []
        for owner, names in fed.items():
            expected = (sum(arrived[n][0] for n in names) % _MODULUS, sum(arrived[n][1] for n in names) % _MODULUS)
            if found[owner] == expected:
                if any(expected):  # zeros stay zeros under many transformations
                    self._exact.add(owner)
            elif owner in self._exact:
                wrong.append(owner)
            elif owner in self._last and self._last[owner][0] != expected:
                moved.append(self._last[owner][1] != found[owner])
            self._last[owner] = expected, found[owner]
        return Verdict(wrong, not any(moved) if moved else None)


def _plain(tensor: torch.Tensor | None) -> bool:
    """True if the tensor holds its own bytes: not emptied by a kernel that made a copy, and not a wrapper of quantised
    tensors."""
    return tensor is not None and tensor.numel() > 0 and not is_traceable_wrapper_subclass(tensor)


def _numbers(sums: Sequence[torch.Tensor]) -> Iterator[_Sums]:
    """The sums on the host, copied once per device."""
    values: dict[int, _Sums] = {}
    for device in {s.device for s in sums}:
        at = [i for i, s in enumerate(sums) if s.device == device]
        for i, (plain, weighted) in zip(at, torch.stack([sums[i] for i in at]).tolist(), strict=True):
            values[i] = plain % _MODULUS, weighted % _MODULUS
    return (values[i] for i in range(len(sums)))
