"""The interface of a tool, and how a model is told what a tool found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ToolError(Exception):
    """A call that the model got wrong; the message is for the model, which may call again."""


class Tool(Protocol):
    """Serves the calls of one sample, several at once. ``schema``: of its arguments, as JSON Schema."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def schema(self) -> Mapping[str, Any]: ...

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """What the model is told. Raises ToolError; other exceptions fail the sample."""


def function_of(tool: Tool) -> dict[str, Any]:
    """The tool as chat completions name it."""
    described = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": described}


def texts(**described: str) -> dict[str, Any]:
    """Schema of required arguments that are texts: name → description."""
    properties = {name: {"type": "string", "description": text} for name, text in described.items()}
    return {"type": "object", "properties": properties, "required": list(described)}


def text_argument(arguments: Mapping[str, Any], name: str) -> str:
    """Raises ToolError."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f"{name}: expected a string, found {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as e:  # half of a surrogate pair, which JSON may have
        raise ToolError(f"{name}: expected text: {e}") from None
    return value
