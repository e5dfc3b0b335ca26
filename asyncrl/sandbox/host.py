"""Serves sandboxes over HTTP, by a Unix socket to the processes of a run, or by TCP to other machines.

The protocol may be served by anything else (docs/sandbox.md). Every request has ``Authorization: Bearer TOKEN``::

    POST   /v1/sandboxes                         201  {"id": …, "kind": …}
    POST   /v1/sandboxes/ID/exec                 200  Execution, of {"argv", "stdin", "env", "cwd", "timeout_s"}
    GET    /v1/sandboxes/ID/files?path=PATH      200  the contents
    PUT    /v1/sandboxes/ID/files?path=PATH      204
    DELETE /v1/sandboxes/ID                      204  also if there is none
    GET    /v1/health                            200  {"kind": …, "weaker": …}

A sandbox that was asked for over a Unix socket with the header ``Sandbox-Ends-With-Caller`` is closed when the process
that asked has ended.

An error is ``{"error": {"kind": "infra|task|model|timeout", "message": …}}``, with status 400, 401, 404 or 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import struct
from collections.abc import Awaitable, Callable
from socket import AF_UNIX, SO_PEERCRED, SOL_SOCKET
from typing import Any

from aiohttp import web

from asyncrl.sandbox.base import MAX_FILE_BYTES, WORKDIR, FailureKind, Sandbox, SandboxFailed
from asyncrl.sandbox.client import ENDS_WITH_CALLER
from asyncrl.sandbox.pool import SandboxPool

FORGOTTEN_S = 900.0  # a sandbox without a call for so long is closed: its user has died, unseen
CUT_S = 30.0  # the same where its user has gone away during a call
MAX_EXEC_S = 3600.0
_BACKLOG = 4096  # connections that come at once; a Unix socket refuses those beyond it
_MAX_BODY_BYTES = 2 * MAX_FILE_BYTES
_STATUS: dict[FailureKind, int] = {"infra": 503, "timeout": 503, "task": 400, "model": 400}
_CREDENTIALS = struct.Struct("iii")  # pid, uid, gid


class SandboxHost:
    """``start`` serves until ``close``."""

    def __init__(self, pool: SandboxPool, token: str) -> None:
        self._pool, self._token = pool, token
        self._sandboxes: dict[str, _Lease] = {}
        self._runner: web.AppRunner | None = None

    async def start(self, *, socket: str = "", host: str = "", port: int = 0) -> int:
        """Listens on a Unix socket, or on an address. Returns the port. Raises OSError."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[self._guarded])
        app.router.add_post("/v1/sandboxes", self._create)
        app.router.add_post("/v1/sandboxes/{id}/exec", self._exec)
        app.router.add_get("/v1/sandboxes/{id}/files", self._read)
        app.router.add_put("/v1/sandboxes/{id}/files", self._write)
        app.router.add_delete("/v1/sandboxes/{id}", self._close)
        app.router.add_get("/v1/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
        await self._runner.setup()
        site: web.BaseSite = web.TCPSite(self._runner, host, port)
        if socket:
            site = web.UnixSite(self._runner, socket, backlog=_BACKLOG)
        await site.start()
        if socket:
            os.chmod(socket, 0o600)
        return 0 if socket else self._runner.addresses[0][1]

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.gather(*(lease.end() for lease in list(self._sandboxes.values())))

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return _error(401, "task", "expected the token of this host in the header Authorization")
        try:
            return await handler(request)
        except SandboxFailed as e:
            return _error(_STATUS[e.kind], e.kind, str(e))
        except web.HTTPException as e:
            return _error(e.status, "task", e.reason)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": self._pool.kind.name, "weaker": self._pool.kind.weaker})

    async def _create(self, request: web.Request) -> web.Response:
        key, caller = secrets.token_hex(8), _caller(request)
        try:
            sandbox = await self._pool.create()
        except BaseException:
            if caller is not None:
                os.close(caller)
            raise
        self._sandboxes[key] = _Lease(sandbox, lambda: self._sandboxes.pop(key, None), caller)
        return web.json_response({"id": key, "kind": self._pool.kind.name}, status=201)

    async def _exec(self, request: web.Request) -> web.Response:
        asked = _asked(await request.read())
        with self._lease(request) as sandbox:
            execution = await sandbox.exec(
                asked["argv"],
                stdin=asked["stdin"],
                env=asked["env"],
                cwd=asked["cwd"],
                timeout_s=asked["timeout_s"],
            )
        return web.json_response(dataclasses.asdict(execution))

    async def _read(self, request: web.Request) -> web.Response:
        with self._lease(request) as sandbox:
            return web.Response(body=await sandbox.read(request.query.get("path", "")))

    async def _write(self, request: web.Request) -> web.Response:
        with self._lease(request) as sandbox:
            await sandbox.write(request.query.get("path", ""), await request.read())
        return web.Response(status=204)

    async def _close(self, request: web.Request) -> web.Response:
        if lease := self._sandboxes.get(request.match_info["id"]):
            await lease.end()
        return web.Response(status=204)

    def _lease(self, request: web.Request) -> _Lease:
        if lease := self._sandboxes.get(request.match_info["id"]):
            return lease
        raise SandboxFailed("infra", "this host has no such sandbox; it was closed, or was not used for too long")


class _Lease:
    """The use of a sandbox over HTTP; ends by itself when nobody calls, and with the process of which ``caller`` is a
    descriptor, which becomes the lease's own."""

    def __init__(self, sandbox: Sandbox, forget: Callable[[], object], caller: int | None) -> None:
        self._sandbox, self._forget, self._caller = sandbox, forget, caller
        self._calls = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        if caller is not None:
            asyncio.get_running_loop().add_reader(caller, self._end_soon)
        self._wait(FORGOTTEN_S)

    def __enter__(self) -> Sandbox:
        self._calls += 1
        if self._timer is not None:
            self._timer.cancel()
        return self._sandbox

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._calls -= 1
        if not self._calls:
            self._wait(CUT_S if kind is asyncio.CancelledError else FORGOTTEN_S)

    async def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._leave_caller()
        self._forget()
        await self._sandbox.close()

    def _wait(self, unused_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(unused_s, self._end_soon)

    def _end_soon(self) -> None:
        self._leave_caller()
        self._ending = asyncio.ensure_future(self.end())

    def _leave_caller(self) -> None:
        if self._caller is not None:
            asyncio.get_running_loop().remove_reader(self._caller)
            os.close(self._caller)
            self._caller = None


def _caller(request: web.Request) -> int | None:
    """A descriptor of the process that has opened the request's connection, readable when that ends; None if its
    sandbox need not end with it, or the kernel does not say who it is."""
    connection = request.get_extra_info("socket")
    if ENDS_WITH_CALLER not in request.headers or connection is None or connection.family != AF_UNIX:
        return None
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS.size))
    with contextlib.suppress(OSError, AttributeError):  # it has ended, is of another container; an older interpreter
        return os.pidfd_open(pid)
    return None


def _asked(body: bytes) -> dict[str, Any]:
    """Raises SandboxFailed."""
    try:
        asked = json.loads(body)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise SandboxFailed("task", "expected a JSON object")
    fields = {"stdin": "", "env": {}, "cwd": WORKDIR, "timeout_s": 30.0} | asked
    texts = lambda values: all(isinstance(value, str) for value in values)
    right = {
        "argv": isinstance(asked.get("argv"), list) and texts(asked["argv"]),
        "stdin": isinstance(fields["stdin"], str),
        "env": isinstance(fields["env"], dict) and texts(fields["env"].values()),
        "cwd": isinstance(fields["cwd"], str),
        "timeout_s": isinstance(fields["timeout_s"], (int, float)) and 0 < fields["timeout_s"] <= MAX_EXEC_S,
    }
    if unknown := fields.keys() - right.keys():
        raise SandboxFailed("task", f"expected {', '.join(right)}; found {', '.join(sorted(unknown))}")
    for name, fits in right.items():
        if not fits:
            raise SandboxFailed("task", f"{name}: found {asked.get(name)!r}; see docs/sandbox.md")
    return fields


def _error(status: int, kind: FailureKind, message: str) -> web.Response:
    return web.json_response({"error": {"kind": kind, "message": message}}, status=status)
