"""The built-in agent with tools: asks the policy, runs the tools that it calls, several at once, until it answers.

    rollout:
      agent:
        path: asyncrl.tools.agent:AGENT
        sandbox: true
        args: {tools: [python, shell, edit, calculator]}

It calls the endpoint like any other agent, see docs/agents.md. ``reward.function`` scores its last answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from asyncrl.sandbox.base import Sandboxes
from asyncrl.sandbox.client import SandboxClient
from asyncrl.sandbox.service import TOKEN_VARIABLE, URL_VARIABLE
from asyncrl.tools.base import Tool, ToolError, function_of
from asyncrl.tools.calculator import Calculator
from asyncrl.tools.mcp import Sessions, check_servers, mcp_tools
from asyncrl.tools.sandboxed import Edit, Python, SampleSandbox, Shell

if TYPE_CHECKING:
    from asyncrl.rollouter.agent_processes.host_program import AgentTask

SANDBOXED = {tool.name: tool for tool in (Python, Shell, Edit)}
NAMES = [*SANDBOXED, Calculator.name]
_MAX_TOLD = 20_000  # characters of a tool's answer


class ToolAgent:
    """``tools``: names among `NAMES`. ``mcp``: servers, see `asyncrl.tools.mcp`. ``system``: the first message.
    ``turns``: calls of the policy. ``timeout_s``: of a program, and of a call of an MCP server."""

    def __init__(self) -> None:
        self._sandboxes: Sandboxes | None = None

    def prepare(
        self,
        tools: Sequence[str] = (),
        mcp: Mapping[str, Any] | None = None,
        system: str = "",
        turns: int = 16,
        timeout_s: float = 30.0,
    ) -> None:
        """Raises ValueError for arguments that it cannot serve."""
        if isinstance(tools, str) or (unknown := [name for name in tools if name not in NAMES]):
            raise ValueError(
                f"tools: expected a list of {', '.join(NAMES)}; found {tools if isinstance(tools, str) else unknown}"
            )
        if not (tools or mcp):
            raise ValueError(f"tools: expected some of {', '.join(NAMES)}, or servers as mcp; found none")
        if turns < 1:
            raise ValueError(f"turns: expected at least 1, found {turns}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s: expected more than 0, found {timeout_s}")
        if wanted := [name for name in tools if name in SANDBOXED]:
            if URL_VARIABLE not in os.environ:
                raise ValueError(f"tools: {', '.join(wanted)} run in a sandbox; set rollout.agent.sandbox=true")
            self._sandboxes = SandboxClient(os.environ[URL_VARIABLE], os.environ[TOKEN_VARIABLE])
        if mcp:
            check_servers(mcp)

    async def __call__(
        self,
        task: AgentTask,
        tools: Sequence[str] = (),
        mcp: Mapping[str, Any] | None = None,
        system: str = "",
        turns: int = 16,
        timeout_s: float = 30.0,
    ) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}] if system else []
        messages += task.messages or [{"role": "user", "content": task.text or ""}]
        async with Sessions() as stack:
            offered = {tool.name: tool for tool in self._own(stack, tools, timeout_s)}
            offered |= {tool.name: tool for tool in await mcp_tools(stack, mcp or {}, timeout_s)}
            client = await stack.enter_async_context(_Client(task, [function_of(tool) for tool in offered.values()]))
            counts = dict.fromkeys(("turns", "tool_calls", "tool_errors"), 0)
            for _ in range(turns):
                answer = await client.ask(messages)
                messages.append(answer)
                counts["turns"] += 1
                calls = answer.get("tool_calls") or []
                told = await asyncio.gather(*(_answer(offered, call) for call in calls))
                counts["tool_calls"] += len(calls)
                counts["tool_errors"] += sum(failed for _, failed in told)
                if not calls:
                    break
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, (text, _) in zip(calls, told, strict=True)
                ]
        return {"metrics": counts}

    def _own(self, stack: contextlib.AsyncExitStack, names: Sequence[str], timeout_s: float) -> list[Tool]:
        offered: list[Tool] = [Calculator()] if Calculator.name in names else []
        if sandboxed := [SANDBOXED[name] for name in names if name in SANDBOXED]:
            assert self._sandboxes is not None, "prepare() comes first"
            sandbox = SampleSandbox(self._sandboxes, timeout_s)
            stack.push_async_callback(sandbox.close)
            offered += [tool(sandbox) for tool in sandboxed]
        return offered


class _Client:
    """Chat completions of the endpoint, for one sample."""

    def __init__(self, task: AgentTask, functions: Sequence[Mapping[str, Any]]) -> None:
        self._url, self._body = f"{task.base_url}/chat/completions", {"model": task.model, "tools": functions}
        self._headers = {"Authorization": f"Bearer {task.api_key}"}

    async def __aenter__(self) -> _Client:
        # an answer comes when the engine has it: limits are the endpoint's
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The policy's message. Raises RuntimeError with the endpoint's words."""
        async with self._session.post(self._url, json={**self._body, "messages": messages}) as response:
            answered = await response.json()
            if response.status != 200:
                raise RuntimeError(answered["error"]["message"])
        message = answered["choices"][0]["message"]
        return {name: value for name, value in message.items() if value is not None}


async def _answer(offered: Mapping[str, Tool], call: Mapping[str, Any]) -> tuple[str, bool]:
    """What the model is told of its call, and whether it got the call wrong."""
    name = call["function"]["name"]
    try:
        if name not in offered:
            raise ToolError(f"there is no tool {name!r}; there is {', '.join(offered)}")
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError as e:
            raise ToolError(f"expected arguments in JSON: {e}") from None
        if not isinstance(arguments, dict):
            raise ToolError(f"expected an object of arguments, found {type(arguments).__name__}")
        text = await offered[name](arguments)
    except ToolError as e:
        return f"error: {e}", True
    return (text if len(text) <= _MAX_TOLD else f"{text[:_MAX_TOLD]}\n[the rest was dropped]"), False


AGENT = ToolAgent()
