"""Device memory that several processes map, through a few calls of the CUDA runtime over ctypes.

torch's own sharing of CUDA tensors does not work here. It counts the readers of each tensor in a file under /dev/shm,
which stays behind if its owner is killed; it never frees memory whose reader was killed; and it shares whole blocks of
the caching allocator, which some of its settings forbid. Dedicated memory needs no counting: readers unmap it, and the
driver does so for a process that dies.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_GRANULE = 2 << 20  # smaller allocations may share a block, which would then be exported whole


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class DeviceMemory:
    """Dedicated device memory as a tensor ``data``, uint8 [nbytes]. `handle` opens it in another process of the same
    user (CUDA refuses it in this one)."""

    def __init__(self, data: torch.Tensor, close: str) -> None:
        self.data, self._close = data, close

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Raises CudaError if the device has too little memory left."""
        address = ctypes.c_void_p()
        whole = -(-nbytes // _GRANULE) * _GRANULE
        _call(device, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(whole))
        return cls(_tensor_at(address, nbytes, device), "cudaFree")

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """Open another process's `handle`, on the same device. Raises CudaError if that process has ended."""
        address = ctypes.c_void_p()
        flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
        _call(device, "cudaIpcOpenMemHandle", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return cls(_tensor_at(address, nbytes, device), "cudaIpcCloseMemHandle")

    def handle(self) -> bytes:
        handle = _Handle()
        address = ctypes.c_void_p(self.data.data_ptr())
        _call(self.data.device, "cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def close(self) -> None:
        """Free or unmap the memory; no tensor over it may be used afterwards."""
        device, address = self.data.device, ctypes.c_void_p(self.data.data_ptr())
        del self.data
        _call(device, self._close, address)


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t; a struct, because it is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Span:
    """Device memory that torch wraps without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def cuda_device(device: torch.device | str | None) -> torch.device:
    """A CUDA device with its index; None: this thread's current one. Raises ValueError if there is none."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ValueError(
            "expected a CUDA device and a torch built with CUDA, found none in this process; set "
            "param_sync.transport=auto"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"expected a CUDA device, found {found}; set param_sync.transport=auto")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """Name of a GPU that does not depend on the process's numbering (``CUDA_VISIBLE_DEVICES``)."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def _tensor_at(address: ctypes.c_void_p, nbytes: int, device: torch.device) -> torch.Tensor:
    assert address.value is not None
    tensor = torch.as_tensor(_Span(address.value, nbytes), device=device)
    if tensor.data_ptr() != address.value or tensor.device != device:
        raise CudaError(f"torch copied memory of {device} to {tensor.device} instead of using it in place")
    return tensor


def _call(device: torch.device, function: str, *args: Any) -> None:
    runtime = _runtime()
    with torch.cuda.device(device):
        # torch may not have made the device this thread's current one yet
        status = runtime.cudaSetDevice(device.index) or getattr(runtime, function)(*args)
    if status:
        runtime.cudaGetLastError()  # else torch reports it as its own
        raise CudaError(f"{function} on {device} failed: {runtime.cudaGetErrorString(status).decode()} ({status})")


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded, found by name."""
    assert torch.version.cuda is not None
    torch.cuda.init()
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        runtime = ctypes.CDLL(name)
    except OSError as e:
        raise ValueError(
            f"could not load {name}, which this torch was built with ({e}); set param_sync.transport=auto"
        ) from e
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
