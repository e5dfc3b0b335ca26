"""Lends bucket buffers to a receiver for one block, and checks afterwards that it kept no view."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from asyncrl.param_sync.errors import BucketKey, SyncError


@contextlib.contextmanager
def borrowed(memory: np.ndarray, key: BucketKey, who: str) -> Iterator[memoryview]:
    """Lend ``memory``, an array without other references. Raises SyncError if ``who`` keeps a view of it."""
    # Every derived view references this array: once it is gone, so are they.
    view, held = memoryview(memory.data), weakref.ref(memory)
    del memory
    yield view
    with contextlib.suppress(BufferError):
        view.release()
    if held() is not None:
        raise _kept(key, who)


@contextlib.contextmanager
def borrowed_on_device(memory: torch.Tensor, key: BucketKey, who: str) -> Iterator[torch.Tensor]:
    """The same for memory of a CUDA device. Waits at the end for the receiver's copies, which may still run."""
    users = _users(memory)
    yield memory
    torch.cuda.current_stream(memory.device).synchronize()
    if _users(memory) > users:
        raise _kept(key, who)


def _users(tensor: torch.Tensor) -> int:
    """Number of tensors that share the storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _kept(key: BucketKey, who: str) -> SyncError:
    problem = "a receiver kept a view into a bucket, whose memory is reused; copy the bytes"
    return SyncError("transfer", who, None, key, problem)
