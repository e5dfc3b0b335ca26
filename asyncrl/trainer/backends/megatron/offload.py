"""Offload of state to host memory while it is not in use.

    away = Offload({"parameters": tensors, "gradients": others}, discarded={"gradients"})
    with away.here("parameters"):                       # on the device, read only
        ...
    with away.here("parameters", "gradients", written=True):
        ...                                             # may be nested; nothing moves twice

Unknown kinds are not offloaded, and stay on the device. Whole storages move, so all views stay valid: megatron-core's
parameters and gradients are slices of a few large buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import chain

import torch
from torch import Tensor


class Offload:
    """Keeps each kind of state on the device inside `here`, else in host memory. All state is on the device until the
    first `here` or `send_all`. A tensor has no memory after its `here`: copy it to keep its values.

    ``kinds``: tensors by kind; no storage belongs to two kinds. ``discarded``: kinds whose values are not kept outside
    `here`; their memory is freed and allocated again."""

    def __init__(self, kinds: Mapping[str, Iterable[Tensor]], discarded: Set[str] = frozenset()) -> None:
        self._storages: dict[str, list[_Storage]] = {}
        for kind, tensors in kinds.items():
            distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
            self._storages[kind] = [_Storage(tensor, kind not in discarded) for tensor in distinct.values()]
        self._here, self._changed = set(self._storages), set(self._storages)

    def held_bytes(self, kind: str) -> int:
        """Bytes of this kind on the device."""
        return sum(storage.device_bytes for storage in self._storages[kind])

    @contextlib.contextmanager
    def here(self, *kinds: str, written: bool = False) -> Iterator[None]:
        """Context in which these kinds are on the device. ``written``: their values may change; else the host copy
        stays valid."""
        known = [kind for kind in kinds if kind in self._storages]
        missing = [kind for kind in known if kind not in self._here]
        for storage in chain.from_iterable(self._storages[kind] for kind in missing):
            storage.fetch()
        self._here.update(missing)
        if written:
            self._changed.update(known)
        try:
            yield
        finally:
            self._send(missing)

    def send_all(self) -> None:
        self._send(list(self._here))

    def _send(self, kinds: Iterable[str]) -> None:
        for kind in kinds:
            for storage in self._storages[kind]:
                storage.send(changed=kind in self._changed)
            self._here.discard(kind)
            self._changed.discard(kind)


class _Storage:
    """A tensor's whole storage, and its host buffer, allocated once."""

    def __init__(self, tensor: Tensor, kept: bool) -> None:
        self._storage = tensor.untyped_storage()
        self._bytes, self._kept, self._pinned = self._storage.nbytes(), kept, tensor.is_cuda
        self._host: Tensor | None = None

    @property
    def device_bytes(self) -> int:
        return self._storage.nbytes()

    def send(self, changed: bool) -> None:
        if self._kept and changed:
            if self._host is None:
                self._host = torch.empty(self._bytes, dtype=torch.uint8, pin_memory=self._pinned)
            self._host.copy_(self._whole(), non_blocking=True)
        self._storage.resize_(0)

    def fetch(self) -> None:
        self._storage.resize_(self._bytes)
        if self._host is not None:
            self._whole().copy_(self._host, non_blocking=True)

    def _whole(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._storage.device).set_(self._storage)
