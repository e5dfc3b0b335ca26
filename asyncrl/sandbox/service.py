"""A run's sandboxes: a host of this machine, started when it is needed and again when it dies, or a remote one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from asyncrl.config.schema import SandboxConfig
from asyncrl.sandbox.base import SandboxFailed
from asyncrl.sandbox.client import SandboxClient
from asyncrl.sandbox.podman import VARIABLES

#: environment variables that name a host: of an agent that uses it, and the token also of a run that uses a remote one
URL_VARIABLE, TOKEN_VARIABLE = "ASYNCRL_SANDBOX_URL", "ASYNCRL_SANDBOX_TOKEN"
_START_S = 120.0
_END_S = 10.0
_MAX_RESTARTS = 5
_BACKOFF_S = 0.5  # doubles with each restart

log = logging.getLogger(__name__)


class Address(NamedTuple):
    """Of a host, see `SandboxClient`."""

    url: str
    token: str

    @property
    def variables(self) -> dict[str, str]:
        return {URL_VARIABLE: self.url, TOKEN_VARIABLE: self.token}


class SandboxService:
    """``start()`` returns when sandboxes are served; ``run()`` then keeps the host alive until it is closed.

    ``address`` stays the same when the host starts again."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._closing = False
        self._folder = ""
        if config.kind == "remote":
            self.address = Address(config.url, os.environ.get(TOKEN_VARIABLE, ""))
        else:
            self._folder = os.path.join(tempfile.gettempdir(), f"asyncrl-sandboxes-{secrets.token_hex(8)}")
            self.address = Address(f"unix:{self._folder}/socket", secrets.token_hex(16))

    async def start(self) -> None:
        """Raises SandboxFailed if nothing serves here."""
        if self._config.kind == "remote":
            if not self.address.token:
                raise SandboxFailed("infra", f"sandbox.url: expected the host's token in {TOKEN_VARIABLE}, found none")
            client = SandboxClient(*self.address)
            try:
                found = await client.health()
            finally:
                await client.close()
            _tell(found)
        else:
            await self._start()

    async def run(self) -> None:
        """Raises SandboxFailed if the host dies again and again."""
        for restarts in range(_MAX_RESTARTS + 1):
            if self._process is None:  # remote
                await asyncio.Event().wait()
            assert self._process is not None
            code = await self._process.wait()
            if self._closing:
                return
            if restarts == _MAX_RESTARTS:
                break
            log.warning("the host of sandboxes has ended (exit code %d); it is started again", code)
            await asyncio.sleep(_BACKOFF_S * 2**restarts)
            try:
                await self._start()
            except SandboxFailed as e:
                log.warning("%s", e)
        raise SandboxFailed("infra", f"the host of sandboxes has ended {_MAX_RESTARTS + 1} times; see the log")

    async def close(self) -> None:
        """All sandboxes end."""
        self._closing = True
        if self._process is not None and self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)  # if an earlier host could not
        try:
            os.makedirs(self._folder)
        except OSError as e:
            raise SandboxFailed("infra", f"the host of sandboxes has no folder ({e})") from None
        os.chmod(self._folder, 0o711)  # users of sandboxes pass through
        self._process = process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "asyncrl.sandbox.serve", self._folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=_environment(self._folder),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"config": dataclasses.asdict(self._config), "token": self.address.token}
        try:
            async with asyncio.timeout(_START_S):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                await process.stdin.drain()
                said = json.loads(await process.stdout.readline() or "{}")
        except (TimeoutError, ValueError, ConnectionError):
            said = {}
        if "kind" not in said:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise SandboxFailed("infra", said.get("error") or "the host of sandboxes did not start; see the log")
        _tell(said)


def _tell(found: Mapping[str, str]) -> None:
    weaker = f"; {found['weaker']}" if found["weaker"] else ""
    log.info("code of the policy runs in sandboxes: %s%s", found["kind"], weaker)


def _environment(folder: str) -> dict[str, str]:
    """What the host needs: no credential of the run is in it. Its own files are in ``folder``, which its keeper
    removes."""
    kept = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH", *VARIABLES) if name in os.environ}
    kept["TMPDIR"] = folder
    return kept | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, map(os.path.abspath, sys.path))))}


def sandbox_problem(config: SandboxConfig) -> str:
    """Why this machine serves no sandbox, in one line; empty if it does."""

    async def start() -> None:
        service = SandboxService(config)
        try:
            await service.start()
        finally:
            await service.close()

    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, start()).result()
    except SandboxFailed as e:
        return str(e)
    return ""
