"""What vLLM runs at the start of each of its processes (its ``vllm.general_plugins``, see pyproject.toml)."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal

OURS = "ASYNCRL_VLLM_REPLICA"  # set in the environment of a replica, so that other uses of vLLM are left alone
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """The kernel kills a process of a replica when the one that started it is gone, however either of them stopped."""
    if OURS in os.environ and multiprocessing.parent_process() is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
