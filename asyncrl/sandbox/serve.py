"""The process of a sandbox host: ``asyncrl sandbox serve``, and the child that a run's rollouter starts.

A run's host is a process of its own, because the rollouter's should not fork; a keeper ends it with its parent
(`asyncrl.processes.keeper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import SandboxConfig
from asyncrl.processes.keeper import keep
from asyncrl.sandbox.base import SandboxFailed
from asyncrl.sandbox.cgroups import remove_left_behind
from asyncrl.sandbox.choose import open_pool
from asyncrl.sandbox.host import SandboxHost
from asyncrl.sandbox.podman import REMOVE_S, remove_containers

_MAX_REQUEST_BYTES = 1 << 16  # what a pipe takes at once


async def serve(config: SandboxConfig, token: str, *, socket: str = "", host: str = "", port: int = 0) -> None:
    """Until SIGTERM or SIGINT. Prints one JSON object when it serves: kind, what is weaker in it, what bounds memory,
    and the port; or ``{"error": …}``, and raises SandboxFailed."""
    try:
        pool = await open_pool(config)
    except SandboxFailed as e:
        _say({"error": str(e)})
        raise
    stopped = asyncio.Event()
    for sent in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sent, stopped.set)
    async with pool:
        server = SandboxHost(pool, token)
        try:
            port = await server.start(socket=socket, host=host, port=port)
            _say({"kind": pool.kind.name, "weaker": pool.kind.weaker, "memory": pool.memory, "port": port})
            await stopped.wait()
        finally:
            await server.close()


def _say(found: Mapping[str, Any]) -> None:
    print(json.dumps(found), flush=True)


def main() -> int:
    """``python -m asyncrl.sandbox.serve FOLDER``: serves at FOLDER/socket, and removes the folder at the end. A line of
    JSON on standard input has the config and the token; when that ends, so does all that runs in sandboxes."""
    asked, folder = json.loads(os.read(0, _MAX_REQUEST_BYTES)), sys.argv[1]
    config = SandboxConfig(**asked["config"])

    def work() -> None:
        with contextlib.suppress(SandboxFailed):
            asyncio.run(serve(config, asked["token"], socket=f"{folder}/socket"))
            return
        sys.exit(1)

    def remove_what_is_left(worker: int) -> None:
        remove_left_behind()
        if config.image:
            remove_containers(worker)

    return keep(work, _Unwatched, folder, outputs=(), at_end=remove_what_is_left, at_end_s=REMOVE_S).code


class _Unwatched:
    def __init__(self, stand_in: int) -> None:
        pass

    def heard(self) -> None:
        pass

    def printed(self, descriptor: int, chunk: bytes) -> None:
        pass

    def exceeded(self) -> str:
        return ""


if __name__ == "__main__":
    sys.exit(main())
