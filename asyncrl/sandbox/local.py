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

from asyncrl.sandbox.base import WORKDIR, Execution, Limits, SandboxFailed
from asyncrl.sandbox.cgroups import Cgroup, Cgroups
from asyncrl.sandbox.channel import RunnerChannel
from asyncrl.sandbox.measure import too_much_memory

START_S = 30.0
_EMPTY_S = 5.0  # for the kernel to end what was killed
_MEASURE_EVERY_S = 0.1
_MEASURING_SHARE = 5  # pauses are at least this many times as long as a measurement
_END_S = 10.0
_MAX_OPEN_FILES = 1024  # of a process
_MAX_LOCKED_BYTES = 64 * 1024  # likewise
_KEPT_ERROR_BYTES = 2000
_OURS = 4  # processes of a control group: the runner, and what started it
_MIB = 1024 * 1024
_CLONE_NEWNS, _MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 17, 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
_PR_CAPBSET_DROP, _CAPABILITIES = 24, 64
_NICENESS = 5  # trainer and engine come first
_OOM_SCORE = "1000"  # the kernel ends a sandbox before anything else of ours


@dataclass(frozen=True)
class Launch:
    """How a kind of sandbox starts the runner: a program, and what belongs to it.

    ``environment``: of programs in the sandbox. ``variables``: of the program that starts it. ``inputs``: file
    descriptors that it inherits, closed once it has them. ``uid``: of whom it runs, None: as this process. ``mounts``:
    place → what only the program and its children see there, to read. ``workdir``: where the sandbox has `WORKDIR`.
    ``ends_by``: signal to the program that ends all. ``exceeded``: measures, with the program's pid; returns a limit
    that is exceeded, as a sentence. ``after``: cleans up; False: something may still run. Both may block."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    variables: Mapping[str, str] = field(default_factory=dict)
    inputs: Sequence[int] = ()
    uid: int | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    workdir: str = WORKDIR
    ends_by: signal.Signals = signal.SIGKILL
    exceeded: Callable[[int], str] | None = None
    after: Callable[[bool], object] = field(default=lambda ended: None)


def process_limits(limits: Limits, bound: bool, others: int = 1) -> list[str]:
    """Arguments of the runner: what the kernel bounds in each process. ``bound``: a control group bounds all of them
    together, too. ``others``: processes of the same user, and user namespace, that are not the sandbox's; the runner is
    one."""
    most = {
        "NPROC": limits.processes + others,
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
    """See `asyncrl.sandbox.base.Sandbox`."""

    def __init__(
        self, process: asyncio.subprocess.Process, launch: Launch, limits: Limits, cgroup: Cgroup | None
    ) -> None:
        self._process, self._launch, self._limits, self._cgroup = process, launch, limits, cgroup
        self._channel = RunnerChannel(process, limits, launch.workdir)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def start(cls, launch: Launch, limits: Limits, cgroups: Cgroups | None) -> LocalSandbox:
        """``cgroups`` None: the launched program makes its own. Raises SandboxFailed."""
        starting = asyncio.ensure_future(cls._start(launch, limits, cgroups))
        try:
            sandbox = await asyncio.shield(starting)
        except asyncio.CancelledError:  # in the middle of it, asyncio would leave a process behind
            await asyncio.wait([starting])
            if starting.exception() is None:
                await starting.result().close()
            raise
        try:
            await sandbox._ready()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @classmethod
    async def _start(cls, launch: Launch, limits: Limits, cgroups: Cgroups | None) -> LocalSandbox:
        cgroup = None
        try:
            if cgroups is not None and cgroups.version:
                cgroup = cgroups.make(limits.memory_mb, limits.processes + _OURS)
            process = await asyncio.create_subprocess_exec(
                *launch.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=launch.inputs,
                start_new_session=True,
                env=launch.variables,
                preexec_fn=_Entrance(cgroup.joined_by if cgroup else (), launch.mounts, launch.uid),
            )
        except OSError as e:
            await asyncio.to_thread(launch.after, True)
            if cgroup is not None:
                cgroup.remove()
            raise SandboxFailed("infra", f"a sandbox could not be started: {e}") from None
        finally:
            for descriptor in launch.inputs:
                os.close(descriptor)
        return cls(process, launch, limits, cgroup)

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
        if self._launch.exceeded is not None:
            self._tasks.append(asyncio.create_task(self._measure(self._launch.exceeded)))

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
            execution = await self._channel.exec(argv, stdin, variables, cwd, timeout_s)
        except SandboxFailed:
            if self._killed_for_memory() > killed:
                raise SandboxFailed("model", too_much_memory(self._limits)) from None
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
        self._kill(self._launch.ends_by)
        ended = True
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            ended = False
        self._process._transport.close()  # type: ignore[attr-defined]  # and kill; else pipes stay open for long
        await asyncio.to_thread(self._launch.after, ended)
        if self._cgroup is not None:
            ends = time.monotonic() + _EMPTY_S
            while not self._cgroup.remove() and time.monotonic() < ends:
                await asyncio.sleep(0.001)  # what was killed is still there

    def _kill(self, sent: signal.Signals) -> None:
        """Not `Process.send_signal`, which may reap the process where asyncio waits for it. A runner that has just been
        started may not be tied to the process yet; it ends with its input."""
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():  # asyncio fails to close one twice
            self._process.stdin.transport.abort()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, sent)

    def _killed_for_memory(self) -> int:
        return self._cgroup.killed_for_memory() if self._cgroup is not None else 0

    async def _measure(self, exceeded: Callable[[int], str]) -> None:
        """End the sandbox if all in it together use more than it may."""
        pause_s = _MEASURE_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            if limit := await asyncio.to_thread(exceeded, self._process.pid):
                self._channel.fail("model", limit)
                return self._kill(self._launch.ends_by)
            pause_s = max(_MEASURE_EVERY_S, _MEASURING_SHARE * (time.monotonic() - began))


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
            for capability in range(_CAPABILITIES):  # what it could gain; unknown ones fail
                self._libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3)
            os.setgroups([])
            os.setresgid(self._uid, self._uid, self._uid)
            os.setresuid(self._uid, self._uid, self._uid)

    def _mount(self, source: str, target: str, flags: int) -> None:
        self._checked(self._libc.mount(source.encode(), target.encode(), None, ctypes.c_ulong(flags), None))

    def _checked(self, failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
