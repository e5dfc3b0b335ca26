"""A server of the Model Context Protocol: ``python -m tests.support.mcp_server [PORT]``, else over standard input."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")
counted = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@server.tool()
def count() -> int:
    """How often this has been called in the session of a program."""
    global counted
    counted += 1
    return counted


@server.tool()
def fail() -> str:
    """Fails."""
    raise RuntimeError("it is broken")


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]), stateless_http=True)
    else:
        server.run("stdio")
