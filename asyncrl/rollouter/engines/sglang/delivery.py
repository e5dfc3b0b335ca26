"""How tensors get from the replica's process into SGLang's: memory that both see, told about over HTTP.

SGLang calls it a flattened bucket: one uint8 tensor, and for each tensor in it where it lies. Every worker is sent a
handle of its own to the same memory, as a handle may be opened once.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import torch
import torch.multiprocessing

from asyncrl.param_sync.manifest import Role, TensorSpec

_ALIGN_BYTES = 64
_CAPACITY_BYTES = 64 * 1024 * 1024


class Parcel:
    """Tensors of one role on their way, see `parcels`."""

    def __init__(self, device: str, capacity_bytes: int = _CAPACITY_BYTES) -> None:
        self._device, self._capacity = device, capacity_bytes
        self._memory: torch.Tensor | None = None  # as large as the largest tensor needs, from then on
        self._places: list[SimpleNamespace] = []
        self._end = 0
        self.role: Role = "target"

    def __len__(self) -> int:
        return len(self._places)

    def takes(self, spec: TensorSpec) -> bool:
        return not self._places or (spec.role == self.role and self._end + spec.nbytes <= self._memory_bytes)

    def add(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        """Copy it in; `takes` said that it fits."""
        if not self._places:
            self.role = spec.role
            if spec.nbytes > self._memory_bytes:
                self._memory = self._allocate(max(spec.nbytes, self._capacity))
        assert self._memory is not None
        start, end = self._end, self._end + spec.nbytes
        self._memory[start:end].copy_(tensor.reshape(-1).view(torch.uint8))
        place = {"name": spec.name, "shape": tensor.shape, "dtype": tensor.dtype}
        self._places.append(SimpleNamespace(**place, start_idx=start, end_idx=end, numel=spec.nbytes))
        self._end = end + -spec.nbytes % _ALIGN_BYTES

    def clear(self) -> None:
        """The memory may be filled again: SGLang has answered that it has read it."""
        self._places, self._end = [], 0

    def payload(self, workers: int) -> list[str]:
        """One for each worker."""
        assert self._memory is not None
        if self._device != "cpu":
            torch.cuda.synchronize()
        bucket = {"flattened_tensor": self._memory[: self._end], "metadata": self._places}
        with _shared_by_name():
            return [_handle(bucket) for _ in range(workers)]

    @property
    def _memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._device != "cpu":
            from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

            monkey_patch_torch_reductions()  # handles name their GPU by its UUID
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        with _shared_by_name():
            return torch.empty(nbytes, dtype=torch.uint8).share_memory_()


def _handle(bucket: dict[str, object]) -> str:
    file = io.BytesIO()
    ForkingPickler(file).dump(bucket)
    return base64.b64encode(file.getbuffer()).decode()


class _shared_by_name:
    """torch's other way, to pass file descriptors on, works between a process and its children alone."""

    def __enter__(self) -> None:
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)


def parcels(tensors: Iterator[tuple[TensorSpec, torch.Tensor]], pair: tuple[Parcel, Parcel]) -> Iterator[Parcel]:
    """The two in turn, filled again and again until all tensors have gone: who asks for the next may still be sending
    one, and has sent the one before."""
    parcel, other = pair
    parcel.clear()
    for spec, tensor in tensors:
        if not parcel.takes(spec):
            yield parcel
            parcel, other = other, parcel
            parcel.clear()
        parcel.add(spec, tensor)
    if len(parcel):
        yield parcel
