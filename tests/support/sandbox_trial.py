"""Tries every attack of `tests.support.sandbox_attacks` in sandboxes of this machine, and looks what got through."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import json
import multiprocessing
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from asyncrl.processes.tree import descendants
from asyncrl.sandbox.base import Limits, Sandbox, SandboxFailed
from asyncrl.sandbox.pool import SandboxPool
from tests.support import sandbox_attacks
from tests.support.sandbox_attacks import BOMBS, ESCAPED

MIB = 1 << 20
LIMITS = Limits(memory_mb=192, processes=24, disk_mb=64, output_kb=64)
BOMB_S = 3.0
#: an ordinary user of the machine, who can be anybody
SOMEBODY = 12_345


class Host:
    """What attacks look for on the machine: a secret, a process, and servers that note who reaches them."""

    def __init__(self, folder: str) -> None:
        self.secret = secrets.token_hex(16)
        self.mark = f"mark-{secrets.token_hex(8)}"  # argument of each attack
        file = Path(folder) / "secret"
        file.write_text(self.secret)
        file.chmod(0o600)
        self._process = subprocess.Popen(["sleep", "600"], env={"SECRET": self.secret})
        libc = ctypes.CDLL(None)
        key = secrets.randbelow(1 << 30)
        self._shm = libc.shmget(key, 4096, 0o1600)
        self._sockets = [socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
        self._sockets += [socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        self._sockets += [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)]
        self._sockets[0].bind(("127.0.0.1", 0))
        port = self._sockets[0].getsockname()[1]
        self._sockets[1].bind(("127.0.0.1", port))
        self._sockets[2].bind(f"\0asyncrl-{self.secret}")
        self._sockets[3].bind(f"{folder}/socket")
        self._sockets[4].bind(f"{folder}/datagrams")
        self._queue = f"/asyncrl-{key}"
        os.close(libc.mq_open(self._queue.encode(), os.O_RDWR | os.O_CREAT, 0o600, None))
        for listening in self._sockets:
            listening.setblocking(False)
            if listening.type == socket.SOCK_STREAM:
                listening.listen()
        self.facts = {
            "secret": self.secret[:24],  # the beginning is enough to know it by
            "secret_file": str(file),
            "pid": self._process.pid,
            "port": port,
            "abstract": f"asyncrl-{self.secret}",
            "socket": f"{folder}/socket",
            "datagrams": f"{folder}/datagrams",
            "queue": self._queue,
            "shm": key,
            "disk_bytes": LIMITS.disk_mb * MIB + 16 * MIB,
            "memory_bytes": LIMITS.memory_mb * MIB + 16 * MIB,
        }
        self._file = file
        self._as_it_was = self._state()

    def harm(self) -> str:
        """What has happened to it; empty: nothing."""
        for listening in self._sockets:
            with contextlib.suppress(BlockingIOError):
                if listening.type == socket.SOCK_STREAM:
                    listening.accept()
                else:
                    listening.recv(100)
                return f"reached {listening.getsockname()!r}"
        if self._process.poll() is not None:
            return "killed a process of the host"
        if self._state() != self._as_it_was:
            return f"changed the host: {self._as_it_was} became {self._state()}"
        return ""

    def left(self) -> int:
        """Processes of attacks that go on."""
        found = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found += self.mark.encode() in path.read_bytes()
        return found

    def _state(self) -> dict[str, Any]:
        pid = self._process.pid
        found = {"limits": Path(f"/proc/{pid}/limits").read_text(), "nice": os.getpriority(os.PRIO_PROCESS, pid)}
        found |= {"cores": os.sched_getaffinity(pid), "scheduler": os.sched_getscheduler(pid)}
        if not self._file.exists():
            return found
        file = self._file.stat()
        found |= {"mode": file.st_mode, "time": file.st_mtime_ns, "owner": file.st_uid, "links": file.st_nlink}
        return found | {"text": self._file.read_text(), "marks": os.listxattr(self._file)}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        ctypes.CDLL(None).shmctl(self._shm, 0, None)
        ctypes.CDLL(None).mq_unlink(self._queue.encode())
        for listening in self._sockets:
            listening.close()


async def try_attack(pool: SandboxPool, host: Host, name: str) -> str:
    """How the attack got through; empty: it did not."""
    async with _sandbox(pool) as sandbox, _sandbox(pool) as other:
        await other.write("other-secret", host.secret.encode())
        await sandbox.write("attacks.py", inspect.getsource(sandbox_attacks).encode())
        environment = {"ATTACK": json.dumps(host.facts)}
        limit_s = BOMB_S if name in BOMBS else 30.0
        try:
            execution = await sandbox.exec(
                ["python3", "attacks.py", name, host.mark], env=environment, timeout_s=limit_s
            )
        except SandboxFailed as e:
            return "" if e.kind == "model" else f"{e.kind}: {e}"
        if execution.code == ESCAPED:
            return "it says so"
        if len(execution.stdout) > LIMITS.output_kb * 1024:
            return f"printed {len(execution.stdout)} characters"
        if name in CHECKS and (found := await CHECKS[name](sandbox)):
            return found
        try:  # it still serves, or has ended
            answer = await sandbox.exec(["echo", "alive"], timeout_s=30.0)
            if answer.stdout != "alive\n" and answer.code == 0:
                return f"the runner answers {answer.stdout!r}"
        except SandboxFailed as e:
            if e.kind not in ("model", "task"):
                return f"{e.kind}: {e}"
    return host.harm()


async def _after_links(sandbox: Sandbox) -> str:
    """The sandbox's own calls follow its links, but only inside."""
    for path in ("link", "secret-link", "pipe", "endless"):
        try:
            if await sandbox.read(path):
                return f"{path} was read"
        except SandboxFailed as e:
            if e.kind != "task":
                return f"{path}: {e.kind}: {e}"
        with contextlib.suppress(SandboxFailed):
            await sandbox.write(path, b"overwritten")
    return ""


async def _after_timeout(sandbox: Sandbox) -> str:
    seen = await sandbox.read("alive")
    await asyncio.sleep(0.3)
    return "it goes on after its timeout" if await sandbox.read("alive") != seen else ""


CHECKS: dict[str, Callable[[Sandbox], Awaitable[str]]] = {
    "leave_links_for_the_host": _after_links,
    "survive_the_timeout": _after_timeout,
}


@contextlib.asynccontextmanager
async def _sandbox(pool: SandboxPool) -> Any:
    sandbox = await pool.create()
    try:
        yield sandbox
    finally:
        await sandbox.close()


async def trial(make_pool: Callable[[], SandboxPool], names: list[str]) -> dict[str, str]:
    """attack → how it got through, or empty. What runs when all sandboxes are closed counts, too."""
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(Host(folder)) as host:
        async with make_pool() as pool:
            for name in names:
                try:
                    found[name] = await try_attack(pool, host, name)
                except SandboxFailed as e:
                    found[name] = f"{e.kind}: {e}"
        if left := host.left():
            found["left_behind"] = f"{left} processes"
        host.close()
        if left := len(descendants(os.getpid())):
            found["left_behind"] = f"{left} processes"
    return found


def as_somebody(work: Callable[[], Any], uid: int = SOMEBODY) -> Any:
    """Result of ``work`` in a process of an ordinary user. Everything that it imports must be imported."""
    receives, sends = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a change of user takes /proc/self away, as no login does
            os.chdir("/")
            os.environ |= {"HOME": "/tmp", "TMPDIR": "/tmp"}
            sends.send(work())
        except BaseException as e:
            sends.send(e)
        finally:
            os._exit(0)
    sends.close()
    try:
        result = receives.recv()
    except EOFError:
        result = RuntimeError("the process ended")
    os.waitpid(pid, 0)
    if isinstance(result, BaseException):
        raise result
    return result
