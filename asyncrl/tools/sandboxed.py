"""Tools that work in the sample's own sandbox: python, shell, and edits of its files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from asyncrl.sandbox.base import Execution, Sandbox, Sandboxes, SandboxFailed
from asyncrl.tools.base import ToolError, text_argument, texts


class SampleSandbox:
    """One sandbox for all calls of a sample, made when it is first needed. When the model has broken it, it gets an
    empty one."""

    def __init__(self, sandboxes: Sandboxes, timeout_s: float) -> None:
        self._sandboxes, self.timeout_s = sandboxes, timeout_s
        self._sandbox: Sandbox | None = None
        self._making = asyncio.Lock()

    async def get(self) -> Sandbox:
        """Raises SandboxFailed."""
        async with self._making:
            if self._sandbox is None:
                self._sandbox = await self._sandboxes.create()
            return self._sandbox

    async def failed(self, sandbox: Sandbox | None, failure: SandboxFailed) -> ToolError:
        """For the model, if the failure is its own. Raises the others. ``sandbox``: where it failed; it may have been
        replaced since."""
        if failure.kind == "task":
            return ToolError(str(failure))
        if failure.kind != "model":
            raise failure
        if sandbox is self._sandbox:  # calls at the same time may all have failed in it
            await self.close()
        return ToolError(f"{failure}. It was replaced by an empty one.")

    async def close(self) -> None:
        async with self._making:
            sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await sandbox.close()


class Python:
    name = "python"
    description = "Runs a Python program, without network, and returns what it prints. Files stay for later calls."
    schema = texts(code="the program")

    def __init__(self, sandbox: SampleSandbox) -> None:
        self._sandbox = sandbox

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return await _run(self._sandbox, ["python3", "-"], text_argument(arguments, "code"))


class Shell:
    name = "shell"
    description = (
        "Runs a command of the shell, without network, and returns what it prints. Files stay for later calls."
    )
    schema = texts(command="the command")

    def __init__(self, sandbox: SampleSandbox) -> None:
        self._sandbox = sandbox

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        return await _run(self._sandbox, ["sh", "-c", text_argument(arguments, "command")])


class Edit:
    name = "edit"
    description = "Replaces a text that occurs once in a file by another; an empty old text creates the file."
    schema = texts(path="the file", old="text to replace", new="text that takes its place")

    def __init__(self, sandbox: SampleSandbox) -> None:
        self._sandbox = sandbox

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        path, old, new = (text_argument(arguments, name) for name in ("path", "old", "new"))
        sandbox: Sandbox | None = None
        try:
            sandbox = await self._sandbox.get()
            if old:
                text = (await sandbox.read(path)).decode(errors="surrogateescape")
                if (count := text.count(old)) != 1:
                    raise ToolError(f"{path}: expected the old text once, found it {count} times")
                new = text.replace(old, new)
            await sandbox.write(path, new.encode(errors="surrogateescape"))
        except SandboxFailed as e:
            raise await self._sandbox.failed(sandbox, e) from None
        return f"{path}: {len(new.splitlines())} lines"


async def _run(sample: SampleSandbox, argv: list[str], stdin: str = "") -> str:
    sandbox: Sandbox | None = None
    try:
        sandbox = await sample.get()
        return _told(await sandbox.exec(argv, stdin=stdin, timeout_s=sample.timeout_s), sample.timeout_s)
    except SandboxFailed as e:
        raise await sample.failed(sandbox, e) from None


def _told(ran: Execution, timeout_s: float) -> str:
    parts = [ran.stdout, ran.stderr]
    if ran.truncated:
        parts.append("[further output was dropped]")
    if ran.ended == "timeout":
        parts.append(f"[ended after {timeout_s:g} s, its time limit]")
    elif ran.ended == "memory":
        parts.append("[ended because the sandbox had used up its memory]")
    elif ran.code:
        parts.append(f"[exit code {ran.code}]")
    return "\n".join(part.rstrip("\n") for part in parts if part) or "[no output]"
