"""Runs agents in processes of their own: a function for many samples at once, or a command for each sample.

::

    agents = AgentProcesses(options)
    await agents.start()                # raises AgentError if the function does not load
    outcome = await agents.run(task)    # raises AgentFailed; cancelling it ends the agent
    await agents.close()

A process that ends, exceeds its memory or whose event loop is blocked is killed with all that it started. Its samples
fail, and may be repeated; a new process takes its place.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from asyncrl.rollouter.agent_processes.function_host import CLOSED, FunctionHost
from asyncrl.rollouter.agent_processes.host_program import AgentTask
from asyncrl.rollouter.agent_processes.keeper import MAX_RESULT_BYTES, Job
from asyncrl.rollouter.agent_processes.options import (
    OPTION,
    AgentError,
    AgentOptions,
    environment,
    program,
    search_path,
)
from asyncrl.rollouter.agent_processes.outcomes import AgentFailed, AgentOutcome, failure, json_object, outcome, to_json
from asyncrl.rollouter.agent_processes.tree import AgentTree
from asyncrl.rollouter.rewards.environment import unset_secrets
from asyncrl.rollouter.rewards.replies import one_line

STARTS = 3  # attempts to replace a process

log = logging.getLogger(__name__)

__all__ = ["AgentError", "AgentFailed", "AgentOptions", "AgentOutcome", "AgentProcesses", "AgentTask"]


class AgentProcesses:
    """``options.processes`` processes that run the function, each for many samples at once; or one for each sample that
    runs the command. Calls of `run` may overlap."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._hosts: list[FunctionHost] = []
        self._replacing: list[asyncio.Task[None]] = []
        self._commands: set[AgentTree] = set()
        self._changed = asyncio.Event()  # replaced each time: hosts, or the problem
        self._problem = "agents are not running: call start() first"

    async def start(self) -> None:
        """Raises AgentError, one line that begins with the option, if the function does not load within
        `START_TIMEOUT_S`, a program is not found or a secret is missing; nothing is left running then."""
        options = self._options
        if missing := unset_secrets(options.secrets, f"{OPTION}.secrets"):
            raise AgentError(missing)
        self._python = program("python", options.python or sys.executable, search_path())
        if options.command:
            self._program = program("command", options.command[0], search_path(self._python if options.python else ""))
        else:
            await self._start_hosts()
        self._problem = ""
        self._replacing = [asyncio.create_task(self._replace(slot)) for slot in range(len(self._hosts))]

    async def run(self, task: AgentTask) -> AgentOutcome:
        """Run a sample's agent. Raises AgentFailed, or AgentError if agents cannot run. Cancelling it cancels a
        coroutine, kills a command, and drops the result of a function in a thread, which cannot be stopped."""
        options = self._options
        name = f"{options.path or options.command[0]} on {task.uid}:"
        try:
            fields = {key: to_json(value) for key, value in vars(task).items()}
        except (TypeError, ValueError) as e:
            message = one_line(f"{name} the task has no form in JSON ({e})")
            raise AgentFailed("agent_error", message, retry=False) from None
        if options.command:
            return outcome(await self._run_command(task, fields, name), name)
        return outcome(await (await self._ready_host()).run(fields, name), name)

    async def close(self) -> None:
        """Kill all agents; pending calls of `run` raise AgentError."""
        self._problem = CLOSED
        self._notify()
        for replacing in self._replacing:
            replacing.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)  # a process that is starting is killed, too
        await asyncio.gather(*(one.close() for one in self._hosts), *(tree.kill() for tree in self._commands))

    def _check(self) -> None:
        if self._problem:
            raise AgentError(self._problem)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- a function ------------------------------------------------------------------------------------------------

    async def _start_hosts(self) -> None:
        self._hosts = [FunctionHost(self._options, self._python) for _ in range(self._options.processes)]
        try:
            async with asyncio.TaskGroup() as group:
                for host in self._hosts:
                    group.create_task(host.start())
        except BaseException as e:
            await asyncio.gather(*(host.close() for host in self._hosts))
            if isinstance(e, ExceptionGroup):
                raise e.exceptions[0] from None
            raise

    async def _ready_host(self) -> FunctionHost:
        """The one with the fewest samples."""
        while True:
            self._check()
            if ready := [host for host in self._hosts if host.ready]:
                return min(ready, key=lambda host: len(host.samples))
            await self._changed.wait()

    async def _replace(self, slot: int) -> None:
        """Replace the slot's process whenever it ends."""
        while True:
            await self._hosts[slot].wait()
            for attempt in range(STARTS):
                await asyncio.sleep(attempt)
                host, problem = FunctionHost(self._options, self._python), ""
                try:
                    await host.start()
                    break
                except Exception as e:  # whatever it is, samples wait for this process
                    problem = str(e) if isinstance(e, AgentError) else f"{OPTION}: {type(e).__name__}: {e}"
                    log.warning("%s", problem)
            self._hosts[slot], self._problem = host, self._problem or problem
            self._notify()
            if problem:
                return

    # -- a command -------------------------------------------------------------------------------------------------

    async def _run_command(self, task: AgentTask, fields: Mapping[str, str], name: str) -> Any:
        self._check()
        try:
            tree = await self._start_command(task, fields)
        except OSError as e:
            raise AgentFailed("agent_exited", one_line(f"{name} it does not start: {e}"), retry=True) from e
        self._commands.add(tree)
        try:
            self._check()  # closed meanwhile
            report = await tree.ended()
        except BaseException:
            await tree.kill()
            raise
        finally:
            self._commands.discard(tree)
        self._check()
        if report.exceeded or report.code:
            raise failure(report, self._options, name)
        if report.result is None:
            return None
        try:
            return json.loads(report.result)
        except (ValueError, RecursionError) as e:
            message = f"{name} wrote a result that is not JSON of at most {MAX_RESULT_BYTES} bytes ({e})"
            raise AgentFailed("bad_result", one_line(message), retry=False) from None

    async def _start_command(self, task: AgentTask, fields: Mapping[str, str]) -> AgentTree:
        options, folder = self._options, tempfile.mkdtemp(prefix="asyncrl-agent-")
        own = {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url,
            "ANTHROPIC_API_KEY": task.api_key,
            "ASYNCRL_MODEL": task.model,
            "ASYNCRL_TASK": os.path.join(folder, "task.json"),
            "ASYNCRL_RESULT": os.path.join(folder, "result.json"),
        }
        files = {own["ASYNCRL_TASK"]: json_object({key: fields[key] for key in fields if key != "api_key"})}
        job = Job([self._program, *options.command[1:]], folder, options.memory_mb, result=own["ASYNCRL_RESULT"])
        return await AgentTree.start(job, environment(options, self._python, folder) | own, files)
