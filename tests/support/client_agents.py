"""Agents of all clients in one run, each in its client's environment: the index of a sample picks its agent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from asyncrl.rollouter.agent_processes.pool import AgentOptions, AgentProcesses

os.chdir(Path(__file__).parents[2])  # where processes in other environments look for modules

_processes: dict[str, asyncio.Task[AgentProcesses]] = {}


async def solve(task, agents: list[list[str]]):
    """``agents``: for each sample of a group an interpreter (empty: this one), and the import path of a function."""
    python, path = agents[task.index]
    if path not in _processes:
        _processes[path] = asyncio.create_task(_start(AgentOptions(path=path, python=python)))
    outcome = await (await _processes[path]).run(task)
    return {"reward": outcome.reward, "metrics": outcome.metrics}


async def _start(options: AgentOptions) -> AgentProcesses:
    processes = AgentProcesses(options)
    await processes.start()
    return processes
