"""Episodes of an OpenEnv environment as samples, ``rollout.agent.path: openenv:SERVER``. For openenv 0.10.

``SERVER`` is the address of one that runs, http://…, or the app of one to start under uvicorn, package.module:app.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
import urllib.request
import zlib
from collections.abc import Mapping
from typing import Any, Literal

from openai import AsyncOpenAI, BadRequestError
from openenv.core.generic_client import GenericEnvClient
from websockets.exceptions import ConnectionClosed

START_S = 100.0  # for a server to start
ANSWER_S = 5.0  # for one that runs to answer
HEALTH_S = 3.0  # for one request of /health
CAPACITY_S = 0.5  # between attempts to get a session of a server that has no more
TAIL = 4096  # characters of what it prints, for its last line
MAX_BACKOFF_S = 30.0  # between restarts of a server
ENDED_EVERY_S = 0.2  # between looks at whether a server has ended
LAST_WORDS_S = 1.0  # for what an ended server has printed


class EnvironmentFailed(Exception):
    """The server has failed a sample, which is started again."""

    infra = True


class Agent:
    """One session of the server for each sample.

    ``action``: the field of an action that takes the policy's whole answer; empty: the answer holds a JSON object, the
    action. ``fields``: further fields of each action. ``observation``: the field that the policy reads; empty: all of
    them, as JSON. ``reward``: of the steps, their sum or the last. ``turns``: at most, also with answers that are no
    action. ``client``: further arguments of GenericEnvClient, such as message_timeout_s and headers. ``chat``: of the
    policy's calls, such as max_tokens."""

    def __init__(
        self,
        server: str,
        action: str = "",
        fields: Mapping[str, Any] | None = None,
        observation: str = "",
        reward: Literal["sum", "last"] = "sum",
        turns: int = 16,
        client: Mapping[str, Any] | None = None,
        chat: Mapping[str, Any] | None = None,
    ) -> None:
        if reward not in ("sum", "last"):
            raise ValueError(f"reward: expected sum or last, found {reward!r}")
        self._address, self._app = (server, "") if "://" in server else ("", server)
        self._action, self._fields, self._observation = action, fields or {}, observation
        self._reward, self._turns, self._client, self._chat = reward, turns, client or {}, chat or {}
        self._openai = AsyncOpenAI(base_url="http://127.0.0.1", api_key="that of the sample")

    async def start(self) -> None:
        """Raises RuntimeError unless the server answers."""
        if self._app:
            server = Server(self._app)
            self._address = server.address
            await server.start()
        else:
            await healthy(self._address, ANSWER_S)

    async def __call__(self, task: Any) -> dict[str, Any]:
        policy = self._openai.with_options(base_url=task.base_url, api_key=task.api_key)
        while True:
            env = Session(base_url=self._address, **self._client)
            try:
                await _asked(env.connect())
                return await self._episode(env, policy, task)
            except _Full:
                await asyncio.sleep(CAPACITY_S)
            finally:
                await env.close()

    async def _episode(self, env: Session, policy: AsyncOpenAI, task: Any) -> dict[str, Any]:
        given, reset = task.data.get("seed"), task.data.get("reset") or {}  # a row of a file may have null
        seed = zlib.crc32(task.uid.encode()) if given is None else given  # the same for all samples of a prompt
        found = await _asked(env.reset(**{"seed": seed, **reset}))
        messages, rewards, steps, malformed = list(task.messages), [], 0, 0
        said = self._text(found.observation)
        for _ in range(self._turns):
            if found.done:
                break
            _say(messages, said)
            try:
                asked = await policy.chat.completions.create(model=task.model, messages=messages, **self._chat)
            except BadRequestError as e:
                if e.code != "context_length_exceeded":
                    raise
                break  # as after the last turn: the rewards so far count
            answer = asked.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            try:
                found = await _asked(env.step(self._act(answer.content or "")))
            except _Malformed as e:
                malformed, said = malformed + 1, str(e)
                continue
            steps, said = steps + 1, self._text(found.observation)
            if found.reward is not None:
                rewards.append(float(found.reward))
        reward: float | None = 0.0  # also of answers none of which was an action
        if rewards:
            reward = sum(rewards) if self._reward == "sum" else rewards[-1]
        elif steps:  # an environment without rewards
            reward = None
        metrics = {"steps": steps, "malformed_actions": malformed, "done": float(bool(found.done))}
        return {"reward": reward, "metrics": metrics}

    def _act(self, text: str) -> dict[str, Any]:
        if self._action:
            return {**self._fields, self._action: text.strip()}
        start = text.find("{")
        while start >= 0:
            try:
                found, _ = json.JSONDecoder().raw_decode(text, start)
                return {**self._fields, **found}
            except (ValueError, RecursionError):
                start = text.find("{", start + 1)
        raise _Malformed("Expected an action, a JSON object.")

    def _text(self, observation: Mapping[str, Any]) -> str:
        if not self._observation:
            return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
        if self._observation not in observation:
            raise ValueError(f"observation: expected one of {sorted(observation)}, found {self._observation!r}")
        value = observation[self._observation]
        return value if isinstance(value, str) else json.dumps(value)


class Session(GenericEnvClient):
    """Does not connect again: the server would take the next step in an environment that was never reset."""

    async def _ensure_connected(self) -> None: ...


class _Malformed(Exception):
    """The answer is no action of this environment; the message is for the policy."""


class _Full(Exception):
    """The server has as many sessions as it can."""


async def _asked(request: Any) -> Any:
    """The server's reply. Raises _Malformed, _Full, EnvironmentFailed; RuntimeError for what its environment raised."""
    try:
        return await request
    except (OSError, ConnectionClosed, TimeoutError) as e:
        raise EnvironmentFailed(f"the server does not answer: {type(e).__name__}: {e}") from e
    except RuntimeError as e:  # the client has no class for them
        if "VALIDATION_ERROR" in str(e):
            raise _Malformed("This is no action of the environment.") from e
        if "CAPACITY_REACHED" in str(e):
            raise _Full from e
        if "FACTORY_ERROR" in str(e) or "SESSION_ERROR" in str(e):
            raise EnvironmentFailed(str(e)) from e
        raise


def _say(messages: list[dict[str, Any]], text: str) -> None:
    """Add a text of the user; templates want one message of theirs between two answers."""
    if messages and messages[-1]["role"] == "user":
        messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


async def healthy(address: str, seconds: float) -> None:
    """Wait for the server. Raises RuntimeError."""
    deadline = time.monotonic() + seconds
    url = address.replace("ws", "http", 1) if address.startswith("ws") else address

    def ask() -> None:
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=HEALTH_S).close()

    while True:
        try:
            return await asyncio.to_thread(ask)
        except OSError as e:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no OpenEnv server answers at {address}: {e}") from None
            await asyncio.sleep(0.2)


class Server:
    """An app under uvicorn, restarted when it ends. Its socket stays open meanwhile: sessions wait for the next one."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    async def start(self) -> None:
        """Raises RuntimeError, with the last line that it printed."""
        ended = asyncio.create_task(self._run())
        answering = asyncio.create_task(healthy(self.address, START_S))
        await asyncio.wait([ended, answering], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            answering.cancel()
            raise RuntimeError(f"the server {ended.result()}")
        await answering
        self._restarting = asyncio.create_task(self._restart(ended))

    async def _restart(self, ended: asyncio.Task[str]) -> None:
        pause, began = 0.0, time.monotonic()
        while True:
            how = await ended
            pause = 0.0 if time.monotonic() - began > MAX_BACKOFF_S else min(MAX_BACKOFF_S, 2 * pause + 0.5)
            print(f"openenv: the server {self._app} {how}; it is started again", file=sys.stderr)
            await asyncio.sleep(pause)
            began, ended = time.monotonic(), asyncio.create_task(self._run())

    async def _run(self) -> str:
        """How it ended. A program that it has started may live on and hold its stderr open."""
        descriptor, tail = self._socket.fileno(), ""
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "uvicorn", self._app, "--fd", str(descriptor), "--log-level", "warning"),
                pass_fds=[descriptor],
                stderr=asyncio.subprocess.PIPE,
                env={"ENABLE_WEB_INTERFACE": "false", **os.environ},
            )
        except OSError as e:
            return f"does not start: {e}"

        async def read(printed: asyncio.StreamReader) -> None:
            nonlocal tail
            while chunk := await printed.read(1 << 16):
                text = chunk.decode(errors="replace")
                sys.stderr.write(text)
                tail = (tail + text)[-TAIL:]

        assert process.stderr is not None
        reading = asyncio.create_task(read(process.stderr))
        while process.returncode is None:
            await asyncio.sleep(ENDED_EVERY_S)
        await asyncio.wait([reading], timeout=LAST_WORDS_S)
        reading.cancel()
        return ": ".join([f"ended with exit code {process.returncode}", *tail.strip().splitlines()[-1:]])
