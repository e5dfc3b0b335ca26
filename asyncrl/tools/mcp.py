"""Tools of MCP servers, by the package ``mcp``: programs that speak over standard input and output, or URLs.

``rollout.agent.args.mcp`` names servers. Each sample has a session of its own with each of them, and a process of its
own of each program::

    mcp:
      files: {command: [my-mcp-server, --root, /data], env: {LEVEL: "1"}}
      search: {url: "http://127.0.0.1:8000/mcp"}
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from asyncrl.tools.base import Tool, ToolError

_START_S = 60.0
_CLOSED = (-32000, "Connection closed")  # the client's own error; a server may have others of this code


class ServerFailed(RuntimeError):
    """A server does not serve, or no longer does: its sample is started again."""

    infra = True


class Sessions(contextlib.AsyncExitStack):
    """All that a sample uses. A session makes an exception group of whatever ends it: of the user's own error, which
    then counts, or of its server's end, for which it cancels its user."""

    async def __aexit__(self, *raised: Any) -> bool | None:
        error = raised[1]
        try:
            return await super().__aexit__(*raised)
        except BaseExceptionGroup as e:
            if error is not None and not isinstance(error, asyncio.CancelledError):
                return False
            raise ServerFailed(f"mcp: a server no longer serves: {_first(e)}") from e


def check_servers(servers: Mapping[str, Any]) -> None:
    """Raises ValueError for servers that are described otherwise, or without the package."""
    for name, server in servers.items():
        described = isinstance(server, Mapping) and (
            {"command"} <= server.keys() <= {"command", "env"} or server.keys() == {"url"}
        )
        if not described or (isinstance(server.get("command", []), str)):
            raise ValueError(f"mcp.{name}: expected command (a list) and perhaps env, or url; found {server!r}")
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise ValueError("mcp: expected the package mcp in the agents' environment; pip install 'mcp>=2'") from None


async def mcp_tools(stack: contextlib.AsyncExitStack, servers: Mapping[str, Any], timeout_s: float) -> list[Tool]:
    """The tools of all servers; their sessions end with ``stack``, which the caller's task must close."""
    found: dict[str, Tool] = {}
    for name, server in servers.items():
        for tool in await _tools_of(stack, name, server, timeout_s):
            if tool.name in found:
                raise RuntimeError(f"mcp.{name}: its tool {tool.name} has the name of another server's")
            found[tool.name] = tool
    return list(found.values())


async def _tools_of(
    stack: contextlib.AsyncExitStack, name: str, server: Mapping[str, Any], timeout_s: float
) -> list[Tool]:
    from mcp import Client, StdioServerParameters

    if "url" in server:
        reached: Any = server["url"]
    else:
        command, *args = map(str, server["command"])
        reached = StdioServerParameters(command=command, args=args, env=dict(server.get("env", {})))
    try:
        client = await stack.enter_async_context(Client(reached, read_timeout_seconds=_START_S))
        listed, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            listed += page.tools
            if (cursor := page.next_cursor) is None:
                break
    except Exception as e:
        raise ServerFailed(f"mcp.{name}: the server does not serve: {_first(e)}") from e
    return [_McpTool(client, name, tool, timeout_s) for tool in listed]


class _McpTool:
    def __init__(self, client: Any, server: str, tool: Any, timeout_s: float) -> None:
        self._client, self._server, self._timeout_s = client, server, timeout_s
        self.name: str = tool.name
        self.description: str = tool.description or tool.title or tool.name
        self.schema: Mapping[str, Any] = tool.input_schema

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        from mcp.shared.exceptions import MCPError

        try:
            result = await self._client.call_tool(self.name, dict(arguments), read_timeout_seconds=self._timeout_s)
        except MCPError as e:
            if (e.code, e.message) == _CLOSED:
                raise ServerFailed(f"mcp.{self._server}: the server has ended") from None
            raise ToolError(str(e)) from None
        told = "\n".join(_told(part) for part in result.content)
        if result.is_error:
            raise ToolError(told or "the tool failed")
        return told


def _told(part: Any) -> str:
    """What a model that reads text gets of a part of a result."""
    return part.text if part.type == "text" else f"[{part.type}]"


def _first(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
