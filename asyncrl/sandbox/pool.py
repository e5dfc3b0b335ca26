"""Warm sandboxes of this machine: each is made ahead, served once, and never used again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import Protocol

from asyncrl.sandbox.base import Limits, Sandbox, SandboxFailed
from asyncrl.sandbox.cgroups import Cgroups
from asyncrl.sandbox.local import Launch, LocalSandbox

_PAUSE_S = 1.0  # after one did not start

log = logging.getLogger(__name__)


class Kind(Protocol):
    """A way to run a sandbox on this machine. ``weaker``: in what it protects less than others; empty: in nothing.
    ``limited_by``: what bounds memory and processes; empty: control groups of ours, or measurements."""

    name: str
    weaker: str
    limited_by: str

    def launch(self, bound: bool) -> Launch:
        """``bound``: a control group bounds the memory of all that runs in it."""

    def close(self) -> None: ...


class SandboxPool:
    """``create`` takes one of ``warm`` sandboxes that are ready. No more than ``most`` are in use: others wait up to
    ``wait_s``.

    ::

        async with SandboxPool(kind, Limits(), warm=2, most=8) as pool:
            sandbox = await pool.create()
            print(await sandbox.exec(["echo", "hello"]))
            await sandbox.close()
    """

    def __init__(self, kind: Kind, limits: Limits, warm: int, most: int, wait_s: float = 600.0) -> None:
        self.kind = kind
        self._limits, self._warm, self._wait_s = limits, warm, wait_s
        self._most, self._places = most, asyncio.Semaphore(most)
        self._launches = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))
        self._cgroups = None if kind.limited_by else Cgroups()
        self._ready: deque[LocalSandbox] = deque()
        self._used = asyncio.Event()
        self._live: set[LocalSandbox] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._refilling: asyncio.Task[None] | None = None

    @property
    def memory(self) -> str:
        """What bounds the memory of a sandbox."""
        if self._cgroups is None:
            return self.kind.limited_by
        return f"control group v{self._cgroups.version}" if self._cgroups.version else "measured ten times a second"

    async def __aenter__(self) -> SandboxPool:
        self._refilling = asyncio.create_task(self._refill())
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._refilling is not None:
            self._refilling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refilling
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)), *self._ending)
        self.kind.close()

    async def create(self) -> Sandbox:
        """Raises SandboxFailed."""
        try:
            async with asyncio.timeout(self._wait_s):
                await self._places.acquire()
        except TimeoutError:
            raise SandboxFailed(
                "timeout", f"all {self._most} sandboxes were in use for {self._wait_s:g} s; raise sandbox.concurrent"
            ) from None
        try:
            while self._ready:
                self._used.set()
                if (sandbox := self._ready.popleft()).alive:
                    return _Served(self, sandbox)
                await self._ended(sandbox)
            return _Served(self, await self._start())
        except BaseException:
            self._places.release()
            raise

    async def closed(self, sandbox: LocalSandbox) -> None:
        """One that was served is not needed any more."""
        await self._ended(sandbox, self._places.release)

    async def _ended(self, sandbox: LocalSandbox, then: Callable[[], None] = lambda: None) -> None:
        """Close it and call ``then``, also if the caller is cancelled: nobody closes it again."""

        async def end() -> None:
            try:
                await sandbox.close()
                self._live.discard(sandbox)
            finally:
                then()

        ending = asyncio.create_task(end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    async def _start(self) -> LocalSandbox:
        async with self._launches:
            bound = self._cgroups is not None and bool(self._cgroups.version)
            try:
                launch = self.kind.launch(bound)
            except OSError as e:
                raise SandboxFailed("infra", f"a sandbox could not be started: {e}") from None
            sandbox = await LocalSandbox.start(launch, self._limits, self._cgroups)
        self._live.add(sandbox)
        return sandbox

    async def _refill(self) -> None:
        while True:
            self._used.clear()
            while len(self._ready) < self._warm:
                try:
                    self._ready.append(await self._start())
                except SandboxFailed as e:
                    log.warning("%s", e)
                    await asyncio.sleep(_PAUSE_S)
            await self._used.wait()


class _Served:
    """The use of a sandbox by one caller."""

    def __init__(self, pool: SandboxPool, sandbox: LocalSandbox) -> None:
        self._pool, self._sandbox, self._closed = pool, sandbox, False
        self.exec, self.read, self.write = sandbox.exec, sandbox.read, sandbox.write

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            await self._pool.closed(self._sandbox)
