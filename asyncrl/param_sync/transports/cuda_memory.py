"""Device memory that several processes map: the few calls of the CUDA runtime for it, over ctypes.

Not torch's own sharing of CUDA tensors. That counts the readers of each tensor in a file under /dev/shm, which stays
there when its owner is killed, and keeps memory whose reader was killed for ever; and it shares whole blocks of the
caching allocator, which not each of its settings allows. Memory that is allocated for this alone needs no counting: it
is unmapped by its readers, and by the driver for a process that dies.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

_HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is
_GRANULE = 2 << 20  # smaller allocations may share a block, all of which would be exported with them


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class DeviceMemory:
    """Bytes on a device, as the tensor ``data``, uint8 [nbytes], over memory of their own. `handle` opens them in
    another process of the same user (CUDA refuses it in this one)."""

    def __init__(self, data: torch.Tensor, close: str) -> None:
        self.data, self._close = data, close

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> DeviceMemory:
        """Raises CudaError if there is not so much left."""
        address = ctypes.c_void_p()
        whole = -(-nbytes // _GRANULE) * _GRANULE
        _call(device, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(whole))
        return cls(_tensor_at(address, nbytes, device), "cudaFree")

    @classmethod
    def open(cls, handle: bytes, nbytes: int, device: torch.device) -> DeviceMemory:
        """What `handle` gave in another process, on the same device. Raises CudaError if that process has ended."""
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
        """The memory is gone: no tensor over it may be used any more."""
        device, address = self.data.device, ctypes.c_void_p(self.data.data_ptr())
        del self.data
        _call(device, self._close, address)


class _Handle(ctypes.Structure):
    """It is passed by value, hence no array."""

    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


class _Span:
    """What torch makes a tensor of without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 2,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def cuda_device(device: torch.device | str | None) -> torch.device:
    """A CUDA device with its number; None: this thread's current one. Raises ValueError if there is none."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise ValueError(
            "cuda_ipc needs a CUDA device and a torch built with CUDA, which this process does not have; "
            "use shared_memory"
        )
    found = torch.device("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"cuda_ipc needs a CUDA device, found {found}; use shared_memory")
    return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """Unique to a GPU, however the processes number theirs (``CUDA_VISIBLE_DEVICES``)."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid}"


def _tensor_at(address: ctypes.c_void_p, nbytes: int, device: torch.device) -> torch.Tensor:
    assert address.value is not None
    tensor = torch.as_tensor(_Span(address.value, nbytes), device=device)
    if tensor.data_ptr() != address.value or tensor.device != device:
        raise CudaError(f"memory of {device} came out as a copy on {tensor.device}: this torch cannot use it in place")
    return tensor


def _call(device: torch.device, function: str, *args: Any) -> None:
    runtime = _runtime()
    with torch.cuda.device(device):
        # torch may not have made the device the current one of this thread yet
        status = runtime.cudaSetDevice(device.index) or getattr(runtime, function)(*args)
    if status:
        runtime.cudaGetLastError()  # else torch takes it for one of its own
        raise CudaError(f"{function} on {device} failed: {runtime.cudaGetErrorString(status).decode()} ({status})")


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded: it is found by its name, as one loaded already."""
    assert torch.version.cuda is not None
    torch.cuda.init()
    name = f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    try:
        runtime = ctypes.CDLL(name)
    except OSError as e:
        raise ValueError(f"cuda_ipc needs {name}, which this torch was built with ({e}); use shared_memory") from e
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime
