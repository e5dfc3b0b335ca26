"""A sandbox that this machine serves: a runner in a process tree of its own, with its limits, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.processes.memory import memory_above
from asyncrl.processes.tree import pids_below
from asyncrl.sandbox.base import WORKDIR, Execution, Limits, SandboxFailed
from asyncrl.sandbox.cgroups import Cgroup, Cgroups
from asyncrl.sandbox.channel import RunnerChannel

START_S = 30.0
_END_S = 5.0  # for the kernel to end what was killed
_MEASURE_EVERY_S = 0.1
_MAX_FILES = 20_000
_MAX_OPEN_FILES = 1024  # of a process
_MAX_LOCKED_BYTES = 64 * 1024  # likewise
_KEPT_ERROR_BYTES = 2000
_OURS = 4  # processes of a control group: the runner, and what started it
_MIB = 1024 * 1024
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 17, 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_NICENESS = 5  # trainer and engine come first
_OOM_SCORE = "1000"  # the kernel ends a sandbox before anything else of ours


@dataclass(frozen=True)
class Launch:
    """How a kind of sandbox starts the runner: a program, and what belongs to it. ``environment``: of programs in the
    sandbox. ``inputs``: file descriptors that it inherits, closed once it has them. ``uid``: of whom it runs, None: as
    this process. ``mounts``: place → what only the program and its children see there, to read. ``after``: cleans up
    when nothing runs any more."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    inputs: Sequence[int] = ()
    uid: int | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    after: Callable[[], object] = field(default=lambda: None)


def process_limits(limits: Limits, bound: bool) -> list[str]:
    """Arguments of the runner: what the kernel bounds in each process. ``bound``: a control group bounds all of them
    together, too."""
    most = {
        "NPROC": limits.processes + 1,  # and the runner; counted per user and user namespace
        "FSIZE": limits.disk_mb * _MIB,
        "NOFILE": _MAX_OPEN_FILES,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": _MAX_LOCKED_BYTES,
    }
    if not bound:
        most["DATA"] = limits.memory_mb * _MIB
    return [f"RLIMIT_{name}={value}" for name, value in most.items()]


class LocalSandbox:
    """See `asyncrl.sandbox.base.Sandbox`. ``cgroup`` None: memory is measured instead of bound."""

    def __init__(
        self, process: asyncio.subprocess.Process, launch: Launch, limits: Limits, cgroup: Cgroup | None
    ) -> None:
        self._process, self._launch, self._limits, self._cgroup = process, launch, limits, cgroup
        self._channel = RunnerChannel(process, limits)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def start(cls, launch: Launch, limits: Limits, cgroups: Cgroups) -> LocalSandbox:
        """Raises SandboxFailed."""
        cgroup = None
        try:
            if cgroups.version:
                cgroup = cgroups.make(limits.memory_mb, limits.processes + _OURS)
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=launch.inputs,
                start_new_session=True,
                env={},
                preexec_fn=_Entrance(cgroup.joined_by if cgroup else (), launch.mounts, launch.uid),
            )
        except OSError as e:
            if cgroup is not None:
                cgroup.remove()
            launch.after()
            raise SandboxFailed("infra", f"a sandbox could not be started: {e}") from None
        finally:
            for descriptor in launch.inputs:
                os.close(descriptor)
        sandbox = cls(process, launch, limits, cgroup)
        try:
            await sandbox._ready()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def _ready(self) -> None:
        try:
            await self._channel.ready(START_S)
        except SandboxFailed as e:
            assert self._process.stderr is not None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    said = (await self._process.stderr.read(_KEPT_ERROR_BYTES)).decode(errors="replace").strip()
                    raise SandboxFailed("infra", f"{e}: {said.splitlines()[-1]}" if said else str(e)) from None
            raise
        self._tasks = [asyncio.create_task(self._channel.listen())]
        if self._cgroup is None:
            self._tasks.append(asyncio.create_task(self._measure()))

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str = WORKDIR,
        timeout_s: float = 30.0,
    ) -> Execution:
        killed = self._killed_for_memory()
        try:
            variables = {**self._launch.environment, **(env or {})}
            execution = await self._channel.exec(argv, stdin.encode(), variables, cwd, timeout_s)
        except SandboxFailed:
            if self._killed_for_memory() > killed:
                raise SandboxFailed("model", self._too_much_memory()) from None
            raise
        if execution.ended == "exited" and execution.code and self._killed_for_memory() > killed:
            return replace(execution, ended="memory")
        return execution

    async def read(self, path: str) -> bytes:
        return await self._channel.read(path)

    async def write(self, path: str, contents: bytes) -> None:
        await self._channel.write(path, contents)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._channel.fail("task", "the sandbox was closed")
        for task in self._tasks:
            task.cancel()
        self._kill()
        await self._process.wait()
        self._process._transport.close()  # type: ignore[attr-defined]  # else pipes stay open until garbage is collected
        if self._cgroup is not None:
            ends = time.monotonic() + _END_S
            while not self._cgroup.remove() and time.monotonic() < ends:
                await asyncio.sleep(0.001)  # what was killed is still there
        self._launch.after()

    def _kill(self) -> None:
        """With the process that started it, all that runs in the sandbox ends. Not `Process.kill`, which may reap the
        process where asyncio waits for it."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _killed_for_memory(self) -> int:
        return self._cgroup.killed_for_memory() if self._cgroup is not None else 0

    def _too_much_memory(self) -> str:
        return f"the sandbox used more than its {self._limits.memory_mb} MiB of memory"

    async def _measure(self) -> None:
        """End the sandbox if all in it together use more than it may."""
        most = self._limits.memory_mb * _MIB
        while True:
            await asyncio.sleep(_MEASURE_EVERY_S)
            pids = pids_below(self._process.pid)
            if memory_above(most, pids):
                self._channel.fail("model", self._too_much_memory())
            elif pids and _files(pids[-1]) > _MAX_FILES:
                self._channel.fail("model", f"the sandbox had more than {_MAX_FILES} files")
            else:
                continue
            return self._kill()


class _Entrance:
    """What the new process does before it becomes the program: joins its groups, mounts what it may not reach
    otherwise, and gives up its privileges."""

    def __init__(self, groups: Sequence[str], mounts: Mapping[str, str], uid: int | None) -> None:
        self._groups, self._mounts, self._uid = groups, mounts, uid
        self._libc = ctypes.CDLL(None, use_errno=True)

    def __call__(self) -> None:
        try:
            self._enter()
        except BaseException as e:
            os.write(2, f"{e}\n".encode())
            os._exit(1)

    def _enter(self) -> None:
        for path in self._groups:
            descriptor = os.open(path, os.O_WRONLY)
            os.write(descriptor, b"0")
            os.close(descriptor)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE)
        os.nice(_NICENESS)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self._mounts:
            # of this process alone: in ours, whoever removes the folder of these places would remove what is there
            self._checked(self._libc.unshare(_CLONE_NEWNS))
            self._mount("none", "/", _MS_REC | _MS_PRIVATE)
            for place, path in self._mounts.items():
                self._mount(path, place, _MS_BIND | _MS_REC)
                self._mount("none", place, _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
        if self._uid is not None:
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)

    def _mount(self, source: str, target: str, flags: int) -> None:
        self._checked(self._libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None))

    def _checked(self, failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _files(pid: int) -> int:
    """Number of files in the folder of the sandbox that this process is in."""
    try:
        found = os.statvfs(f"/proc/{pid}/root{WORKDIR}")
    except OSError:  # it has ended
        return 0
    return found.f_files - found.f_ffree
