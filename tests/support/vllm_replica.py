"""One replica of real vLLM on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import psutil

from asyncrl.config.schema import Config
from tests.support import engine_replica


def replica_config(checkpoint: Path, **options: Any) -> Config:
    return engine_replica.replica_config("vllm", checkpoint, pause="abort", **options)


class Replica(engine_replica.Replica):
    core_pid: int

    @classmethod
    async def start(cls, config: Config, transport: str = "shared_memory") -> Self:
        before = set(core_pids())
        replica = await super().start(config, transport)
        replica.core_pid, *_ = set(core_pids()) - before
        return replica

    async def corrections(self) -> list[str]:
        """The defects of vLLM's CPU build that its worker found and corrected."""
        (found,) = await self.receiver.ask("corrected")
        return found


def core_pids(parent: int | None = None) -> list[int]:
    """vLLM's engine processes among the descendants of ``parent`` (default: this process)."""
    children = psutil.Process(parent).children(recursive=True)
    return [child.pid for child in children if child.is_running() and "EngineCor" in child.name()]
