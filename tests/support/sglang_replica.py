"""One replica of real SGLang on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.schema import Config
from tests.support import engine_replica


def replica_config(checkpoint: Path, **options: Any) -> Config:
    """A replica's config, with requests kept over a sync unless ``pause`` is given."""
    return engine_replica.replica_config("sglang", checkpoint, **({"pause": "keep"} | options))


def server_processes(parent: int | None = None) -> list[psutil.Process]:
    """SGLang's servers among the descendants of ``parent`` (default: this process), with their own descendants."""
    below = psutil.Process(parent).children(recursive=True)
    servers = [p for p in below if "asyncrl.rollouter.engines.sglang.serve" in _command(p)]
    return [*servers, *(child for server in servers for child in server.children(recursive=True))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
