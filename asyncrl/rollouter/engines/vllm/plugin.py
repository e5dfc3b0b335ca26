"""Plugin that vLLM runs at the start of each of its processes (its ``vllm.general_plugins``, see pyproject.toml)."""

from __future__ import annotations

import multiprocessing
import os

from asyncrl.processes.parent import end_with_parent

#: set in a replica's environment, so that other uses of vLLM in the same installation are left alone
REPLICA_MARK = "ASYNCRL_VLLM_REPLICA"


def register() -> None:
    """Ends a replica's child processes with the process that started them, however that one stops."""
    if REPLICA_MARK in os.environ and multiprocessing.parent_process() is not None:
        end_with_parent()
