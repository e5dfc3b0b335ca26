"""Delivery of tensors from the replica's process to SGLang's workers: in shared memory, announced over HTTP.

A parcel has SGLang's "flattened bucket" format: one uint8 tensor, and the location of each tensor in it. Every worker
gets its own handle to the same memory, because a handle can be opened only once. `group_delivery` is the alternative.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Protocol

import torch
import torch.multiprocessing

from asyncrl.param_sync.manifest import DTYPE_BYTES, Role, TensorSpec
from asyncrl.rollouter.engines.sglang.client import Client
from asyncrl.rollouter.engines.sglang.fused import loaded_together

#: a tensor that has arrived completely
Arrived = tuple[TensorSpec, torch.Tensor]

ALIGN_BYTES = 64
CAPACITY_BYTES = 64 * 1024 * 1024


class Parcel:
    """A buffer with tensors of one role, see `parcels`. Each begins at a multiple of ``align_bytes`` and of its element
    size."""

    def __init__(self, device: str, capacity_bytes: int = CAPACITY_BYTES, align_bytes: int = 1) -> None:
        self._device, self._capacity, self._align_bytes = device, capacity_bytes, align_bytes
        self._memory: torch.Tensor | None = None  # grows with the largest tensor so far
        self.places: list[SimpleNamespace] = []  # locations, in SGLang's format
        self._end = 0
        self.role: Role = "target"

    def __len__(self) -> int:
        return len(self.places)

    def takes(self, *specs: TensorSpec) -> bool:
        """True if these tensors, of one role and dtype, all fit one after the other."""
        if not self.places:
            return True
        fits = self._end + self._bytes_of(specs) <= self._memory_bytes and self._end % DTYPE_BYTES[specs[0].dtype] == 0
        return fits and specs[0].role == self.role

    def add(self, *tensors: Arrived) -> None:
        """Copy tensors for which `takes` was True."""
        if not self.places:
            self.role = tensors[0][0].role
            if (nbytes := self._bytes_of([spec for spec, _ in tensors])) > self._memory_bytes:
                self._memory = self._allocate(max(nbytes, self._capacity))
        assert self._memory is not None
        for spec, tensor in tensors:
            start, end = self._end, self._end + spec.nbytes
            self._memory[start:end].copy_(tensor.reshape(-1).view(torch.uint8))
            place = {"name": spec.name, "shape": tensor.shape, "dtype": tensor.dtype}
            self.places.append(SimpleNamespace(**place, start_idx=start, end_idx=end, numel=spec.nbytes))
            self._end = end + -spec.nbytes % self._align_bytes

    def clear(self) -> None:
        """Make the memory free to fill again. Call only after the delivery has ended: SGLang has then read it."""
        self.places, self._end = [], 0

    def flat(self) -> torch.Tensor:
        """The contents, uint8 [bytes], once the device has written them."""
        assert self._memory is not None
        if self._device != "cpu":
            torch.cuda.synchronize()
        return self._memory[: self._end]

    def _bytes_of(self, specs: Sequence[TensorSpec]) -> int:
        """Bytes up to the end of the last tensor."""
        return sum(spec.nbytes + -spec.nbytes % self._align_bytes for spec in specs[:-1]) + specs[-1].nbytes

    @property
    def _memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)


class SharedParcel(Parcel):
    """A parcel in memory that another process can open."""

    def __init__(self, device: str, capacity_bytes: int = CAPACITY_BYTES) -> None:
        super().__init__(device, capacity_bytes, ALIGN_BYTES)

    def payload(self, workers: int) -> list[str]:
        """One handle for each worker."""
        bucket = {"flattened_tensor": self.flat(), "metadata": self.places}
        with _shared_by_name():
            return [_handle(bucket) for _ in range(workers)]

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._device != "cpu":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles then name their GPU by UUID
            return super()._allocate(nbytes)
        with _shared_by_name():
            return super()._allocate(nbytes).share_memory_()


class Delivery(Protocol):
    """Moves parcels into the server. ``parcels``: two, filled in turn."""

    parcels: tuple[Parcel, Parcel]

    async def open(self, deadline_s: float) -> None:
        """Prepare for a session, while generation continues."""

    async def deliver(self, parcel: Parcel, selector: str) -> None:
        """Load the parcel into the models that ``selector`` names; returns when they have read all of it. Raises
        EngineError."""

    def abort(self) -> None:
        """End a delivery in progress, so that neither end waits for the other."""


class ByMemory:
    """Implements `Delivery`: the workers map the parcel's memory."""

    def __init__(self, client: Client, device: str, workers: int) -> None:
        self._client, self._device, self._workers = client, device, workers
        self.parcels: tuple[Parcel, Parcel] = SharedParcel(device), SharedParcel(device)

    async def open(self, deadline_s: float) -> None:
        pass

    async def deliver(self, parcel: Parcel, selector: str) -> None:
        assert isinstance(parcel, SharedParcel)
        await self._client.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=parcel.payload(self._workers),
            load_format="flattened_bucket",
            flush_cache=False,  # the session flushes if param_sync.kv asks for it
            selector=selector,
        )
        if self._device != "cpu":
            # SGLang answers once its copies are queued. Checksums (here of no tensor) wait for all queued work on the
            # workers' GPUs; only then may the memory be filled again.
            await self._client.post("/weights_checker", action="checksum", skip_tensor_list=[""], selector=selector)

    def abort(self) -> None:
        pass


def _handle(bucket: dict[str, object]) -> str:
    file = io.BytesIO()
    ForkingPickler(file).dump(bucket)
    return base64.b64encode(file.getbuffer()).decode()


class _shared_by_name:
    """Shares memory by name: torch's default, passing file descriptors, only works between a process and its
    children."""

    def __enter__(self) -> None:
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)


def parcels(tensors: Iterator[Arrived], pair: tuple[Parcel, Parcel], sent: Collection[str]) -> Iterator[Parcel]:
    """Fill the two parcels in turn until all tensors are packed. When the caller asks for the next one, it may still be
    delivering the last parcel, but must have delivered the one before. ``sent``: names of all tensors to come."""
    parcel, other = pair
    parcel.clear()
    for together in _complete(tensors, sent):
        if not parcel.takes(*(spec for spec, _ in together)):
            yield parcel
            parcel, other = other, parcel
            parcel.clear()
        parcel.add(*together)
    if len(parcel):
        yield parcel


def _complete(tensors: Iterator[Arrived], sent: Collection[str]) -> Iterator[list[Arrived]]:
    """Groups of tensors that must be loaded in one call, each held back until its last tensor is here."""
    waiting: dict[str, Arrived] = {}
    for spec, tensor in tensors:
        waiting[spec.name] = spec, tensor
        names = loaded_together(spec.name, sent)
        if all(name in waiting for name in names):
            yield [waiting.pop(name) for name in names]
