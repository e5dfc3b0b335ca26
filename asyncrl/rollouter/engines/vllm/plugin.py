"""Plugin that vLLM runs when each of its processes starts (entry point ``vllm.general_plugins`` in pyproject.toml)."""

from __future__ import annotations

import multiprocessing
import os

from asyncrl.processes.parent import end_with_parent

#: set in a replica's environment, so that other uses of the same vLLM installation are not affected
REPLICA_MARK = "ASYNCRL_VLLM_REPLICA"


def register() -> None:
    """In a replica's child process: exit when the parent exits, however it does."""
    if REPLICA_MARK in os.environ and (parent := multiprocessing.parent_process()) is not None:
        end_with_parent(parent.pid)
