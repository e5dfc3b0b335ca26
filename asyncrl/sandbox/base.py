"""The interface of sandboxes: five calls, what they return, how they fail, and the limits that hold inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

#: infra: the sandbox or what serves it failed, whatever the code in it did, so that another attempt may help. task: the
#: caller asked for what cannot be done, such as to read a file that is not there. model: the code inside broke its own
#: sandbox. timeout: a call was not served in time.
FailureKind = Literal["infra", "task", "model", "timeout"]

WORKDIR = "/sandbox"  # inside: working directory, HOME and TMPDIR, empty at first
MAX_FILE_BYTES = 16 * 1024 * 1024  # of one `Sandbox.read` or `Sandbox.write`


class SandboxFailed(RuntimeError):
    """A call was not served; ``kind`` says whose fault it is."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind

    @property
    def infra(self) -> bool:
        """Another attempt may help: an agent that raises it starts its sample again."""
        return self.kind in ("infra", "timeout")


@dataclass(frozen=True)
class Limits:
    """Of one sandbox, with all that runs in it together; see `asyncrl.config.schema.SandboxConfig`."""

    memory_mb: int = 512
    processes: int = 64
    disk_mb: int = 256
    output_kb: int = 64


@dataclass(frozen=True)
class Execution:
    """Result of a program. ``code``: its exit status, 128 + n after signal n, 127 if it was not found. A program that
    exceeded its time, or the sandbox its memory, was killed, with all else that ran in the sandbox; its files stay.
    ``stdout`` and ``stderr``: the first `Limits.output_kb` of each; ``truncated``: there was more."""

    code: int
    stdout: str
    stderr: str
    ended: Literal["exited", "timeout", "memory"] = "exited"
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.ended == "exited" and self.code == 0


class Sandbox(Protocol):
    """A computer of its own for untrusted code: without network, with a folder of its own and programs to read.

    Every call may raise SandboxFailed. Several may be under way at once. A relative path is below `WORKDIR`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        timeout_s: float = 30.0,
    ) -> Execution:
        """Run a program to its end. What it leaves running goes on until `close`, or until a program exceeds its
        time."""

    async def read(self, path: str) -> bytes:
        """Contents of a file of at most `MAX_FILE_BYTES`."""

    async def write(self, path: str, contents: bytes) -> None:
        """Create or replace a file, and the folders that it is in."""

    async def close(self) -> None:
        """End all that runs in it, and remove its files. Never fails; a second time does nothing."""


class Sandboxes(Protocol):
    """Makes sandboxes."""

    async def create(self) -> Sandbox:
        """One that nobody has used. Raises SandboxFailed."""
