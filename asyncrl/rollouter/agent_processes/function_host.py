"""A process that runs an agent function for many samples at once, as seen by the process that started it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from typing import Any

from asyncrl.processes.tasks import Late, cancelled, within
from asyncrl.rollouter.agent_processes.keeper import Job, Report
from asyncrl.rollouter.agent_processes.options import OPTION, AgentError, AgentOptions, environment
from asyncrl.rollouter.agent_processes.outcomes import AgentFailed, failure, json_object, to_json
from asyncrl.rollouter.agent_processes.tree import AgentTree, how_it_ended
from asyncrl.rollouter.rewards.replies import one_line

START_TIMEOUT_S = 120.0  # to import the function's module, however heavy
CLOSED = "agents are closed"
_SLICES = 4  # pings per `unresponsive_s`; a pause of our own counts as one at most
_MAX_FRAME_BYTES = 1 << 20
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "host_program.py")

log = logging.getLogger(__name__)


class FunctionHost:
    """A process that runs the function. ``samples``: those under way, by id. ``ready``: it takes further ones."""

    def __init__(self, options: AgentOptions, python: str) -> None:
        self._options, self._python = options, python
        self.ready = False
        self.samples: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ids = itertools.count()
        self._silent = 0  # slices of `unresponsive_s` without a word of it
        self._fault = ""
        self._living: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises AgentError."""
        options, key = self._options, f"{OPTION}.path"
        ours, theirs = socket.socketpair()
        self._frames, self._requests = await asyncio.open_connection(sock=ours, limit=_MAX_FRAME_BYTES)
        try:
            folder = tempfile.mkdtemp(prefix="asyncrl-agent-")
            words = [self._python, _PROGRAM, str(theirs.fileno())]
            job = Job(words, folder, options.memory_mb, connection=theirs.fileno(), relay=True)
            self._tree = await AgentTree.start(job, environment(options, self._python, folder))
        except OSError as e:
            self._requests.transport.abort()
            raise AgentError(f"{key}: a process for {options.path} does not start: {e}") from e
        except BaseException:
            self._requests.transport.abort()
            raise
        finally:
            theirs.close()
        try:
            self._send({"path": json.dumps(options.path), "args": to_json(options.args)})
            started = await within(START_TIMEOUT_S, self._frame(), f"{key}: the start of {options.path}")
            if not started.get("ready"):
                report = await self._kill()
                how = f"{options.path} {report.exceeded or self._fault or how_it_ended(report)} on import"
                raise AgentError(one_line(f"{key}: {started.get('problem') or how}"))
        except Late as e:
            await self._kill()
            raise AgentError(str(e)) from None
        except BaseException:
            await self._kill()
            raise
        self._receiving, self._pinging = asyncio.create_task(self._receive()), asyncio.create_task(self._ping())
        self._living = asyncio.create_task(self._live())
        self.ready = True

    async def run(self, fields: Mapping[str, str], name: str) -> Any:
        """What the function returns for a task. Raises AgentFailed, or AgentError if it is closed."""
        number = next(self._ids)
        self.samples[number] = reply = asyncio.get_running_loop().create_future()
        self._tree.begin_sample()
        self._send({"run": str(number), "task": json_object(fields)})
        try:
            found = await reply
        except AgentFailed as e:
            raise AgentFailed(e.reason, one_line(f"{name} {e}"), e.retry) from None
        finally:
            if self.samples.pop(number, None) is not None:  # nobody waits any more
                self._send({"cancel": str(number)})
        if "error" in found:
            message, trace = one_line(f"{name} {found['error']}"), str(found.get("traceback", ""))
            infra = bool(found.get("infra"))
            raise AgentFailed("infra" if infra else "agent_error", message, retry=infra, traceback=trace)
        if "bad" in found:
            raise AgentFailed("bad_result", one_line(f"{name} returned {found['bad']}"), retry=False)
        return found.get("result")

    async def wait(self) -> None:
        """Until it has ended and nothing is left of it."""
        if self._living is not None:
            await asyncio.wait({self._living})

    async def close(self) -> None:
        """Kill it; its samples raise AgentError."""
        if self._living is not None:
            self._fault = CLOSED
            self._receiving.cancel()
            await self.wait()

    async def _live(self) -> None:
        await asyncio.wait({self._receiving, self._pinging}, return_when=asyncio.FIRST_COMPLETED)
        self.ready = False
        if not self._receiving.done():
            self._fault = self._fault or "blocked"
        await cancelled([self._receiving, self._pinging])
        report = await self._kill()
        closed = self._fault == CLOSED
        failed = failure(report, self._options, "its process", self._fault)
        if not closed:
            log.warning("%s: %s; it had %d samples, and is replaced", self._options.path, failed, len(self.samples))
        samples, self.samples = self.samples, {}
        for reply in samples.values():
            if not reply.done():
                reply.set_exception(
                    AgentError(CLOSED) if closed else AgentFailed(failed.reason, str(failed), retry=True)
                )

    async def _kill(self) -> Report:
        report = await self._tree.kill()
        self._requests.transport.abort()
        return report

    async def _receive(self) -> None:
        """Until it ends, or sends anything but a frame."""
        while frame := await self._frame():
            self._silent = 0
            reply = self.samples.pop(frame.get("id", -1), None)
            if reply is not None and not reply.done():
                reply.set_result(frame)

    async def _ping(self) -> None:
        """Until it has been silent for `unresponsive_s`."""
        while self._silent < _SLICES:
            self._silent += 1
            self._send({"ping": str(self._silent)})
            await asyncio.sleep(self._options.unresponsive_s / _SLICES)

    async def _frame(self) -> dict[str, Any]:
        """The next frame; empty at the end, and for anything else."""
        try:
            line = await self._frames.readline()
            frame = json.loads(line) if line else {}
        except ConnectionError:
            return {}
        except (ValueError, RecursionError):  # too long, or not JSON
            frame = None
        if isinstance(frame, dict):
            return frame
        self._fault = "sent something that is no frame of its protocol"
        return {}

    def _send(self, fields: Mapping[str, str]) -> None:
        self._requests.write(json_object(fields).encode() + b"\n")
