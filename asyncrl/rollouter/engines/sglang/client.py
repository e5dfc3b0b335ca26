"""HTTP client of SGLang's server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from asyncrl.rollouter.engines.base import EngineDied, EngineError

_LONGEST_LINE = 1 << 24  # bytes; an event of a stream is one line
_IDLE_S = 2.0  # below the server's 5 s, so that it never closes a connection just as we reuse it


class ServerRefusal(EngineError):
    """The server refused a call; the message is the server's."""


class Client:
    """Calls raise ServerRefusal, or EngineDied when the server does not answer."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url, key
        self._opened: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> dict[str, Any]:
        return await self._call("GET", path, None)

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        return await self._call("POST", path, body)

    async def generate(self, **body: Any) -> AsyncIterator[dict[str, Any]]:
        """Events of one generation stream, to its end."""
        with self._errors_translated("/generate"):
            async with self._session.post("/generate", json={**body, "stream": True}) as answer:
                if answer.status != 200:
                    raise _refusal("/generate", answer.status, await answer.text())
                async for line in answer.content:
                    if not line.startswith(b"data: "):
                        continue
                    if line.startswith(b"data: [DONE]"):
                        return
                    event = json.loads(line[6:])
                    if error := event.get("error"):
                        raise ServerRefusal(f"SGLang: {error['message'] if isinstance(error, dict) else error}")
                    yield event

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                self._url,
                headers={"Authorization": f"Bearer {self._key}"},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                timeout=aiohttp.ClientTimeout(total=None),  # callers have deadlines
                read_bufsize=_LONGEST_LINE,
                trust_env=False,
            )
        return self._opened

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        with self._errors_translated(path):
            async with self._session.request(method, path, json=body) as answer:
                text = await answer.text()
        if answer.status != 200:
            raise _refusal(path, answer.status, text)
        with contextlib.suppress(ValueError):
            if isinstance(said := json.loads(text), dict):
                return said
        return {}

    @contextlib.contextmanager
    def _errors_translated(self, path: str):  # type: ignore[no-untyped-def]
        try:
            yield
        except (aiohttp.ClientError, ConnectionError) as e:
            raise EngineDied(f"SGLang's server does not answer {path} ({type(e).__name__}: {e})") from e


def _refusal(path: str, status: int, text: str) -> ServerRefusal:
    message: Any = text
    with contextlib.suppress(ValueError, AttributeError):
        said = json.loads(text)
        message = said.get("message") or said.get("error") or text
    if isinstance(message, dict):
        message = message.get("message", message)
    return ServerRefusal(f"SGLang refuses {path} ({status}): {message}")
