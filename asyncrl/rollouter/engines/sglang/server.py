"""Server process of an SGLang replica: starts it, waits until it is ready, detects its death, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncrl
from asyncrl.config.secrets import redacted
from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.sglang.arguments import command_line
from asyncrl.rollouter.engines.sglang.client import Client
from asyncrl.rollouter.engines.socket_folder import SocketFolder

_SERVE = "asyncrl.rollouter.engines.sglang.serve"
_ASK_EVERY_S = 0.25  # poll interval until it is ready; starting takes a minute
_LISTENING = "0A"  # state in /proc/net/tcp
_PORT_TAKEN = "address already in use"
_KEPT = 4000  # characters of output; an error quotes the last line


class Server:
    """Made by `start`. Listens on the loopback interface only, on its own port and with its own API key; the sockets
    between its processes are in ``sockets``. Its output is relayed to our standard error, without the key and the
    secrets among its arguments, which SGLang may print."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        port: int,
        key: str,
        device: str,
        hidden: Mapping[str, str],
        sockets: SocketFolder,
    ) -> None:
        self._process, self._port, self._sockets = process, port, sockets
        self._hidden = {key: "(the server's key)", **hidden}
        self.client = Client(f"http://127.0.0.1:{port}", key)
        self._output = ""
        self._hint = " (without a GPU it needs stand-ins: see configs/sglang_cpu.yaml)" if device == "cpu" else ""
        self._relay = asyncio.create_task(self._relay_output())
        self.ended = asyncio.create_task(process.wait())

    @classmethod
    async def start(
        cls, arguments: Mapping[str, Any], environment: Mapping[str, str], hidden: Mapping[str, str]
    ) -> Server:
        """Start the process and return when it answers, after a minute or more. ``hidden``: see
        `asyncrl.config.secrets.redacted`. Raises EngineError with its last output line if it ends before."""
        port, key, sockets = _free_port(), secrets.token_hex(24), SocketFolder()
        words = command_line({**arguments, "host": "127.0.0.1", "port": port, "api_key": key})
        variables = {
            **os.environ,
            **environment,
            "PYTHONPATH": os.pathsep.join(filter(None, _module_path())),
            "TMPDIR": str(sockets.path),
        }
        # compiled kernels outlive the server; not the first variable, as a change of that disables process titles
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.geteuid()}")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", _SERVE, str(os.getpid())),
            env=variables,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # its own process group, so that `close` kills its children too
        )
        server = cls(process, port, key, arguments["device"], hidden, sockets)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(words).encode())
            process.stdin.close()
            await server._until_ready()
        except BaseException:
            await server.close()
            raise
        return server

    def account(self) -> str:
        """Error text about its death."""
        return f"SGLang's server process is gone (exit status {self._process.returncode})"

    async def close(self) -> None:
        """Kill the server with all its children; returns when nothing of it is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self.ended
        await asyncio.wait([self._relay])
        await self.client.close()
        self._sockets.close()

    async def _until_ready(self) -> None:
        while not self.ended.done():
            # another process may have taken the port meanwhile, and must not get the key
            if _listens(self._process.pid, self._port):
                with contextlib.suppress(EngineError):
                    await self.client.get("/model_info")
                    return
            if _PORT_TAKEN in self._output:  # it would live on without a port
                raise EngineError(f"SGLang's server could not listen on port {self._port}, which was taken meanwhile")
            await asyncio.wait([self.ended], timeout=_ASK_EVERY_S)
        await asyncio.wait([self._relay])
        last_line = self._output.rstrip().rpartition("\n")[2]
        raise EngineError(f"{self.account()} before it was ready; its last line: {last_line}{self._hint}")

    async def _relay_output(self) -> None:
        assert self._process.stdout is not None
        rest = b""  # an incomplete line, which may end within a secret
        while chunk := await self._process.stdout.read(1 << 16):
            lines, end, rest = (rest + chunk).rpartition(b"\n")
            self._relay_text(lines + end)
        self._relay_text(rest)

    def _relay_text(self, output: bytes) -> None:
        text = redacted(output.decode(errors="replace"), self._hidden)
        self._output = (self._output + text)[-_KEPT:]
        print(text, end="", file=sys.stderr, flush=True)


def _module_path() -> list[str]:
    """PYTHONPATH with which the new process imports the same modules as this one."""
    return [str(Path(asyncrl.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]


def _listens(pid: int, port: int) -> bool:
    """True if the process itself listens on the port."""
    with contextlib.suppress(OSError):  # the process has ended
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == _LISTENING}
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(file) in sockets:
                    return True
    return False


def _free_port() -> int:
    """A port that nobody is given while the server starts, which takes long: between Ray's and those of connections."""
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(20_000, max(first_of_connections, 21_000))
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
