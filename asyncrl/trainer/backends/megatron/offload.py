"""State that lies in host memory while nobody computes with it.

    away = Offload({"parameters": tensors, "gradients": others}, discarded={"gradients"})
    with away.here("parameters"):                       # on the device, to be read
        ...
    with away.here("parameters", "gradients", written=True):
        ...                                             # and, inside, again: nothing moves twice

A kind that is not offloaded is not known to it and stays on the device. What moves are whole storages, so all views of
them stay what they are: megatron-core's parameters and gradients are parts of a few large buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from itertools import chain
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Offload:
    """Each kind of state is on the device while somebody is within `here` with it, and in host memory else; from the
    first `here` on, or `send_all`. A tensor that is kept beyond it has no memory: keep a copy.

    ``kinds``: no storage is of two of them. ``discarded``: those whose values mean nothing outside of it: their memory
    is given back and asked for again."""

    def __init__(self, kinds: Mapping[str, Iterable[Tensor]], discarded: Set[str] = frozenset()) -> None:
        self._storages: dict[str, list[_Storage]] = {}
        for kind, tensors in kinds.items():
            distinct = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.numel()}
            self._storages[kind] = [_Storage(tensor, kind not in discarded) for tensor in distinct.values()]
        self._here, self._changed = set(self._storages), set(self._storages)

    def held_bytes(self, kind: str) -> int:
        """How much of it is on the device."""
        return sum(storage.device_bytes for storage in self._storages[kind])

    @contextlib.contextmanager
    def here(self, *kinds: str, written: bool = False) -> Iterator[None]:
        """``written``: they may change meanwhile; else what lies on the host is still right afterwards."""
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
    """A tensor's storage, all of it, and its place on the host, which is made once."""

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


def resident(*kinds: str, written: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a method of an object that has an ``_offload``: it runs within its `Offload.here`."""

    def wrap(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with args[0]._offload.here(*kinds, written=written):  # type: ignore[attr-defined]
                return method(*args, **kwargs)

        return run

    return wrap
