"""Sandboxes of a host, over its protocol (`asyncrl.sandbox.host`)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from asyncrl.sandbox.base import WORKDIR, Execution, Sandbox, SandboxFailed

_ANSWER_S = 30.0  # beyond the time of the call itself
_CREATE_S = 660.0  # a host may have none to give for a while
_WAITING = 64  # connections of calls that wait for a sandbox
#: header of a request for a sandbox that ends with this process; a host that does not see processes ignores it
ENDS_WITH_CALLER = "Sandbox-Ends-With-Caller"


class SandboxClient:
    """``url``: http://host:port, or unix:/path/of/socket. For one event loop."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether its calls wait for a sandbox

    async def create(self) -> Sandbox:
        """Raises SandboxFailed."""
        made = await self.call("POST", "/v1/sandboxes", _CREATE_S, waits=True, headers={ENDS_WITH_CALLER: "yes"})
        return _RemoteSandbox(self, f"/v1/sandboxes/{made['id']}")

    async def health(self) -> Mapping[str, str]:
        return await self.call("GET", "/v1/health", 0.0)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    async def call(self, method: str, path: str, limit_s: float, waits: bool = False, **options: Any) -> Any:
        """Result of a request: JSON, or bytes; None without any. ``waits``: for a free sandbox. Raises
        SandboxFailed."""
        session = self._sessions.get(waits) or self._open(waits)
        base = "http://sandboxes" if self._on_unix else self._url.rstrip("/")
        limit = aiohttp.ClientTimeout(total=limit_s + _ANSWER_S)
        try:
            async with session.request(method, base + path, timeout=limit, **options) as response:
                if response.status >= 400:
                    raise _failure(await response.text())
                if response.content_type == "application/json":
                    return await response.json()
                return await response.read()
        except TimeoutError:
            raise SandboxFailed("timeout", f"{self._url} did not answer in {limit_s + _ANSWER_S:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise SandboxFailed("infra", f"{self._url} does not answer: {e}") from None

    def _open(self, waits: bool) -> aiohttp.ClientSession:
        """Calls that wait have few connections of their own, so that those that free a sandbox always get one."""
        limit, socket = _WAITING if waits else 0, self._url.removeprefix("unix:")
        connector = aiohttp.UnixConnector(socket, limit=limit) if self._on_unix else aiohttp.TCPConnector(limit=limit)
        headers = {"Authorization": f"Bearer {self._token}"}
        session = self._sessions[waits] = aiohttp.ClientSession(connector=connector, headers=headers)
        return session

    @property
    def _on_unix(self) -> bool:
        return self._url.startswith("unix:")


class _RemoteSandbox:
    def __init__(self, client: SandboxClient, path: str) -> None:
        self._client, self._path = client, path
        self._closed = False

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        timeout_s: float = 30.0,
    ) -> Execution:
        asked = {"argv": list(argv), "stdin": stdin, "env": dict(env or {}), "cwd": cwd, "timeout_s": timeout_s}
        return Execution(**await self._client.call("POST", f"{self._path}/exec", timeout_s, json=asked))

    async def read(self, path: str) -> bytes:
        return await self._client.call("GET", f"{self._path}/files", 0.0, params={"path": path})

    async def write(self, path: str, contents: bytes) -> None:
        await self._client.call("PUT", f"{self._path}/files", 0.0, params={"path": path}, data=contents)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(SandboxFailed):
            await self._client.call("DELETE", self._path, 0.0)


def _failure(text: str) -> SandboxFailed:
    import json

    try:
        error = json.loads(text)["error"]
        return SandboxFailed(error["kind"], error["message"])
    except (ValueError, KeyError, TypeError):
        return SandboxFailed("infra", f"expected an error of the protocol, found {text[:200]!r}")
