"""A program of agents below its keeper, as seen by the process that started it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from asyncrl.rollouter.agent_processes.keeper import Job, Report

KILL_TIMEOUT_S = 15.0  # for the keeper to kill what is below it
_ROOT = str(Path(__file__).parents[3])  # the folder that holds asyncrl
#: without site packages, which take longer to find than a keeper to start
_KEEPER = (
    *(sys.executable, "-I", "-S", "-c"),
    f"import sys; sys.path.append({_ROOT!r}); from asyncrl.rollouter.agent_processes.keeper import main; main()",
)


class AgentTree:
    """``job``'s program with all that it starts; none of it outlives the program, nor this process."""

    def __init__(self, keeper: asyncio.subprocess.Process) -> None:
        self._keeper = keeper
        self._report = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, job: Job, environment: Mapping[str, str], files: Mapping[str, str] | None = None) -> AgentTree:
        """Start it in ``job.folder``, which is removed when it ends. ``files``: path → text. Raises OSError."""
        try:
            for path, text in (files or {}).items():
                Path(path).write_text(text)
            keeper = asyncio.create_subprocess_exec(
                *(*_KEEPER, json.dumps(job)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=[] if job.connection is None else [job.connection],
                env=environment,
                cwd=job.folder,
                process_group=0,  # signals to ours do not reach it
            )
            starting = asyncio.create_task(keeper)
            try:
                return cls(await asyncio.shield(starting))
            except asyncio.CancelledError:  # the program may run already
                await cls(await starting).kill()
                raise
        except BaseException:
            shutil.rmtree(job.folder, ignore_errors=True)
            raise

    def begin_sample(self) -> None:
        """What it prints is bounded per sample."""
        assert self._keeper.stdin is not None
        if not self._keeper.stdin.is_closing():
            self._keeper.stdin.write(b"\n")

    async def ended(self) -> Report:
        """Wait for its end."""
        return await asyncio.shield(self._report)

    async def kill(self) -> Report:
        """Kill it, if it has not ended."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.ended(), KILL_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            self._keeper.kill()  # it is stopped or stuck; its stand-in does the rest
        return await self.ended()

    async def _read(self) -> Report:
        assert self._keeper.stdout is not None
        written = await self._keeper.stdout.read()
        await self._keeper.wait()
        return Report(*json.loads(written)) if written else Report("", -1, "its keeper was killed", None)


def how_it_ended(report: Report) -> str:
    """The end of a sentence about the program."""
    code = report.code
    by = f" ({signal.Signals(code - 128).name})" if code - 128 in set(signal.Signals) else ""
    return f"ended with exit code {code}{by}" + (f": {report.last_line}" if report.last_line else "")
