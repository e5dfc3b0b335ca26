"""Copies and hashes of many ranges of a GPU's memory at once: one kernel and one small transfer of results.

A model has hundreds of small tensors, and each call of torch takes as long as copying tens of megabytes. Ranges are
addresses, because views of each tensor's bytes cost more still; the caller keeps their memory alive until the call
returns, and writes to it only on the current stream. ::

    if works_on(device):
        hashes = copy_and_hash([(tensor.data_ptr(), tensor.nbytes, 0) for tensor in tensors], device)
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch

from asyncrl.param_sync.content_hash import CHUNK_BYTES, HASH_BYTES, content_hash, joined

log = logging.getLogger(__name__)

ALIGN_BYTES = 8  # of addresses
_CHECKED_BYTES = (0, 5, 240, 241, 1024, 5000, 3 * CHUNK_BYTES + 77)


#: (source, nbytes, target): bytes from address ``source`` on, copied to ``target`` unless that is 0. Both addresses are
#: multiples of `ALIGN_BYTES`. A plain tuple, because making a named one takes longer than copying a small tensor.
DeviceRange = tuple[int, int, int]


def aligned(tensor: torch.Tensor) -> bool:
    """True if a contiguous tensor may be a `DeviceRange`."""
    return tensor.data_ptr() % ALIGN_BYTES == 0


@functools.cache
def works_on(device: torch.device) -> bool:
    """True if the kernel runs on the device and is right there; else bytes are hashed on the host. The first call
    compiles the kernel, which takes seconds: call it before a session needs it. Raises torch.OutOfMemoryError, and
    then checks again at the next call."""
    if device.type != "cuda":
        return False
    try:
        _check(device)
    except torch.OutOfMemoryError:  # says nothing about the kernel
        raise
    except Exception as e:  # no triton, no compiler for it, or an unknown device: the host can do the same
        log.warning("param_sync: weights on %s are hashed on the host, which is slow (%s)", device, e)
        return False
    return True


def copy_and_hash(ranges: Sequence[DeviceRange], device: torch.device) -> list[bytes]:
    """Copy the ranges that have a target, and return the `content_hash` of each. Waits for the results."""
    from asyncrl.param_sync import device_hash  # triton comes with torch for GPUs only

    if not ranges:
        return []
    chunks, counts = _chunks(ranges)
    with _current(device):
        found = device_hash.run(_on_device(chunks, device), hashed=True)
    assert found is not None
    hashes = found.cpu().numpy().byteswap().tobytes()  # big-endian, as xxhash writes them
    ends = (np.cumsum(counts) * HASH_BYTES).tolist()
    return [joined(hashes[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def copy(ranges: Sequence[DeviceRange], device: torch.device) -> None:
    """Copy the ranges that have a target. Does not wait."""
    from asyncrl.param_sync import device_hash

    copied = [(source, nbytes, target) for source, nbytes, target in ranges if nbytes and target]
    if copied:
        with _current(device):
            device_hash.run(_on_device(_chunks(copied)[0], device), hashed=False)


def _chunks(ranges: Sequence[DeviceRange]) -> tuple[np.ndarray, np.ndarray]:
    """The ranges in chunks, int64 [n, 3] with source, target, bytes; and the number of chunks of each range, at least
    one."""
    source, nbytes, target = np.array(ranges, np.int64).T
    if np.any((source | target) % ALIGN_BYTES) or np.any(nbytes < 0):
        raise ValueError(f"expected addresses that are multiples of {ALIGN_BYTES} and no negative sizes")
    counts = np.maximum(-(-nbytes // CHUNK_BYTES), 1)
    of = np.repeat(np.arange(len(ranges)), counts)
    at = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * CHUNK_BYTES
    into = np.where(target[of], target[of] + at, 0)
    return np.stack([source[of] + at, into, np.minimum(nbytes[of] - at, CHUNK_BYTES)], axis=1), counts


def _on_device(chunks: np.ndarray, device: torch.device) -> torch.Tensor:
    """As `asyncrl.models.device_copy.on_device`, from pinned memory: a copy from pageable memory would wait for all
    queued kernels."""
    tensor = torch.from_numpy(chunks)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the thread's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check(device: torch.device) -> None:
    """Raises RuntimeError unless copies and hashes are those of the host."""
    data = (torch.arange(max(_CHECKED_BYTES)) * 0x9E3779B1 >> 24).to(torch.uint8)
    here = data.to(device)
    expected = [content_hash(data.numpy().data[:nbytes]) for nbytes in _CHECKED_BYTES]
    for hashed in (True, False):
        into = [torch.zeros_like(here) for _ in _CHECKED_BYTES]
        ranges = [(here.data_ptr(), n, t.data_ptr()) for n, t in zip(_CHECKED_BYTES, into, strict=True)]
        found = copy_and_hash(ranges, device) if hashed else expected
        if not hashed:
            copy(ranges, device)
        for n, t, one, other in zip(_CHECKED_BYTES, into, found, expected, strict=True):
            if one != other or not torch.equal(t[:n].cpu(), data[:n]) or t[n:].any():
                raise RuntimeError(f"the kernel is wrong about {n} bytes; please report the GPU and Triton's release")
