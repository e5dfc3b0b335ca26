"""Errors after which a process cannot use its device any more, though it lives: it must be replaced."""

from __future__ import annotations

import sys

#: beginnings of messages of torch and the libraries below it, without device memory that ran out
_FATAL = ("CUDA error", "CUDA driver error", "cuDNN error", "CUBLAS error", "CUBLAS_STATUS_", "NCCL error", "HIP error")
_FATAL_TYPES = ("AcceleratorError", "DistBackendError")


def is_device_error(error: BaseException | None) -> bool:
    """True if the error, or one of its causes, leaves the process without a usable device."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            return any(map(is_device_error, error.exceptions))
        if _is_fatal(error):
            return True
        error = error.__cause__
    return False


def _is_fatal(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or isinstance(error, torch.OutOfMemoryError):  # a smaller batch may fit
        return False
    if type(error).__name__ in _FATAL_TYPES:
        return True
    return isinstance(error, RuntimeError) and str(error).startswith(_FATAL)
