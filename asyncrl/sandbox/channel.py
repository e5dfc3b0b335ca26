"""The outside end of a sandbox's runner: sends it calls, and bounds and checks each of its answers."""

from __future__ import annotations

import asyncio
import errno
import itertools
import marshal
import os
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from asyncrl.sandbox.base import MAX_FILE_BYTES, WORKDIR, Execution, FailureKind, Limits, SandboxFailed
from asyncrl.sandbox.runner import EXITED, FAILED, FRAME, READY, REPLY, TIMEOUT

_GRACE_S = 10.0  # for the runner to answer a call beyond the call's own time
MAX_STDIN_BYTES = MAX_FILE_BYTES
_LOST = 4  # flag of a status


class _Answer(NamedTuple):
    status: int
    code: int
    first: bytes
    second: bytes


class RunnerChannel:
    """Calls of one runner. ``listen`` runs until the runner has ended, which fails what waits for it.

    ``workdir``: where the runner has `WORKDIR`."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits, workdir: str) -> None:
        self._process, self._limits, self._workdir = process, limits, workdir
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[_Answer]] = {}
        self._ended: SandboxFailed | None = None
        self._ran = False  # a program, which may have ended all

    async def ready(self, timeout_s: float) -> None:
        """Wait for the runner's start. Raises SandboxFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                call, _ = await self._receive()
        except (TimeoutError, EOFError, ValueError) as e:
            raise SandboxFailed("infra", f"the sandbox did not start ({e or 'no answer'})") from None
        if call != READY:
            raise SandboxFailed("infra", f"the sandbox did not start (answered call {call} before any)")

    async def listen(self) -> None:
        try:
            while True:
                call, answer = await self._receive()
                waits = self._waiting.pop(call, None)
                if waits is not None and not waits.done():
                    waits.set_result(answer)
        except EOFError:
            self._has_ended()
        except ValueError as e:
            self.fail("model", f"the sandbox answered nonsense ({e})")

    def _has_ended(self) -> None:
        self.fail("model" if self._ran else "infra", "the sandbox has ended")

    def fail(self, kind: FailureKind, message: str) -> None:
        """End all calls, those to come too; the first reason counts."""
        if self._ended is None:
            self._ended = SandboxFailed(kind, message)
        for waits in self._waiting.values():
            if not waits.done():
                waits.set_exception(self._ended)
        self._waiting.clear()

    async def exec(
        self, argv: Sequence[str], stdin: str, env: Mapping[str, str], cwd: str, timeout_s: float
    ) -> Execution:
        words = (*argv, *env, *env.values(), cwd)
        if not argv or not all(argv) or any("\0" in word for word in words):
            raise SandboxFailed("task", f"expected a program and its arguments without NUL, found {list(argv)}")
        try:
            given = stdin.encode()
            for word in words:
                word.encode(errors="surrogateescape")  # the bytes of a file's name may be no text
        except UnicodeEncodeError as e:  # half of a pair, which JSON may have
            raise SandboxFailed("task", f"expected text: {e}") from None
        if len(given) > MAX_STDIN_BYTES:
            raise SandboxFailed(
                "task", f"expected at most {MAX_STDIN_BYTES} bytes of standard input, found {len(given)}"
            )
        most = self._limits.output_kb * 1024
        arguments = list(argv), given, dict(env), self._place(cwd), timeout_s, most
        self._ran = True
        status, code, first, second = await self._call("exec", arguments, timeout_s)
        out, err = (printed[:most].decode(errors="replace") for printed in (first, second))
        ended: Literal["exited", "timeout"] = "timeout" if status & ~_LOST == TIMEOUT else "exited"
        return Execution(code, out, err, ended, truncated=bool(status & _LOST))

    async def read(self, path: str) -> bytes:
        return (await self._call("read", (self._place(path), MAX_FILE_BYTES)))[2]

    async def write(self, path: str, contents: bytes) -> None:
        if len(contents) > MAX_FILE_BYTES:
            raise SandboxFailed("task", f"expected at most {MAX_FILE_BYTES} bytes for {path}, found {len(contents)}")
        await self._call("write", (self._place(path), contents))

    async def _call(self, name: str, arguments: Sequence[Any], timeout_s: float = 0.0) -> _Answer:
        if self._ended is not None:
            raise self._ended
        call = next(self._numbers)
        frame = marshal.dumps((call, name, tuple(arguments)), 2)
        answer = self._waiting[call] = asyncio.get_running_loop().create_future()
        assert self._process.stdin is not None
        try:
            async with asyncio.timeout(timeout_s + _GRACE_S):
                self._process.stdin.write(FRAME.pack(len(frame)) + frame)
                await self._process.stdin.drain()
                answered = await answer
        except ConnectionError:
            self._has_ended()
            assert self._ended is not None
            raise self._ended from None
        except TimeoutError:
            self.fail("timeout", f"the sandbox did not answer a call within {timeout_s + _GRACE_S:g} s")
            assert self._ended is not None
            raise self._ended from None
        finally:
            self._waiting.pop(call, None)
        if answered.status == FAILED:
            why = os.strerror(answered.code) if answered.code else answered.first.decode(errors="replace")
            where = str(arguments[0]).replace(self._workdir, WORKDIR)
            full = name == "exec" and answered.code == errno.EAGAIN  # of processes
            raise SandboxFailed("model" if full else "task", f"{why}: {where}")
        return answered

    def _place(self, path: str) -> str:
        """Where the runner finds it."""
        found = inside(path)
        below = found == WORKDIR or found.startswith(f"{WORKDIR}/")
        return self._workdir + found.removeprefix(WORKDIR) if below else found

    async def _receive(self) -> tuple[int, _Answer]:
        """Raises EOFError, and ValueError for a frame that no runner sends."""
        assert self._process.stdout is not None
        try:
            call, status, code, first, second = REPLY.unpack(await self._process.stdout.readexactly(REPLY.size))
            if max(first, second) > MAX_FILE_BYTES or status & ~_LOST not in (EXITED, TIMEOUT, FAILED):
                raise ValueError(f"status {status}, {first} and {second} bytes")
            payload = await self._process.stdout.readexactly(first + second)
        except asyncio.IncompleteReadError:
            raise EOFError("it ended") from None
        return call, _Answer(status, code, payload[:first], payload[first:])


def inside(path: str) -> str:
    """Absolute path in the sandbox. Raises SandboxFailed."""
    if not path or "\0" in path:
        raise SandboxFailed("task", f"expected a path, found {path!r}")
    return posixpath.normpath(posixpath.join(WORKDIR, path))
