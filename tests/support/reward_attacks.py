"""Reward functions that attack what runs them. Workers import this module, so it is light.

Those that leave processes behind hold the lock of the file ``lock`` in them, and it stays locked until the last has
ended."""

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import pickle
import signal
import stat
from pathlib import Path

MIB = 1024 * 1024


def environment(prompt, response):
    """Writes the environment to the path in ``response``."""
    Path(response).write_text(json.dumps(dict(os.environ)))
    own = [os.environ["HOME"], os.environ["TMPDIR"], os.getcwd()]
    return {"reward": 1.0, "folders": len(set(own))}


def reads_environment_of(prompt, response):
    """Bytes of environment of the process whose pid is ``response``; -1 if it may not read them."""
    try:
        return float(len(Path(f"/proc/{response}/environ").read_bytes()))
    except PermissionError:
        return -1.0


def has_open(prompt, response):
    """Whether it has inherited a descriptor of the file ``response``."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return float(any(os.path.exists(link) and os.path.samefile(link, response) for link in links))


class Unpickled:
    """Creates the file ``path`` when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def forges_replies(prompt, response, path=""):
    """Writes the reply that ``response`` names to the worker's socket, and never returns."""
    if response == "fine":
        return 1.0
    payload = {"pickle": pickle.dumps(Unpickled(path)), "empty": b"[]", "giant": b""}[response]
    length = 2**40 if response == "giant" else len(payload)
    os.write(_worker_socket(), length.to_bytes(8, "little") + payload)
    signal.pause()


def _worker_socket() -> int:
    """Those of the event loop do not block."""
    open_now = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    (found,) = [fd for fd in open_now if stat.S_ISSOCK(os.fstat(fd).st_mode) and os.get_blocking(fd)]
    return found


def leaves_behind(prompt, response, lock=""):
    """Leaves a sleeper in a session of its own, whose parents have ended; then does what ``response`` says."""
    _leave_a_daemon(lock)
    if response == "hang":
        signal.pause()
    if response.startswith("kill"):
        above = [os.getppid()]
        while response == "kill all above" and len(above) < 3:
            above.append(_parent(above[-1]))
        for pid in reversed(above):
            with contextlib.suppress(PermissionError):
                os.kill(pid, signal.SIGKILL)
    if response != "return":
        os._exit(7)
    return {"reward": 1.0, "worker": os.getpid(), "parent": os.getppid()}


def forks_and_ends_again_and_again(prompt, response, lock=""):
    """Leaves a process that is never the same for long."""
    _hold(lock)
    if os.fork() == 0:
        os.setsid()
        while os.fork() == 0:
            pass
        os._exit(0)
    os.wait()
    signal.pause()


def leaves_a_spinner(prompt, response, lock=""):
    """Leaves a process that uses CPU time, unless it is told not to."""
    if response == "spin":
        _hold(lock)
        if os.fork() == 0:
            for _ in itertools.count():
                pass
    return {"reward": 1.0, "worker": os.getpid()}


def forks(prompt, response, lock=""):
    """Starts as many processes as ``response`` says, and never returns."""
    _hold(lock)
    for _ in range(int(response)):
        if os.fork() == 0:
            signal.pause()
    signal.pause()


def allocates(prompt, response, lock=""):
    """Uses 600 MiB of memory, where ``response`` says, and does not return unless it fails."""
    if response == "itself":
        return float(len(b"x" * (600 * MIB)))
    _hold(lock)
    for _ in range(6):
        if os.fork() == 0:
            memory = mmap.mmap(-1, 100 * MIB) if response == "shared" else bytearray(100 * MIB)
            for page in range(0, len(memory), 4096):
                memory[page] = 1
            signal.pause()
    signal.pause()


def fills_its_folder(prompt, response):
    """Writes where ``response`` says more than the 1 MiB that it may; names its folder first."""
    way, _, path = response.partition(" ")
    Path(path).write_text(os.getcwd())
    if way == "file":
        Path("file").write_bytes(bytes(2 * MIB))
        return 1.0
    if way == "nested":  # deeper than a path can be long
        for _ in range(1500):
            os.mkdir("folder")
            os.chdir("folder")
    if way == "names":
        for i in range(10_001):
            os.mknod(f"{i}")
    if way in ("files", "closed"):
        for i in range(4):
            Path(f"{i}").write_bytes(bytes(MIB // 2))
    if way == "closed":
        os.chmod(".", 0)
        return 1.0
    signal.pause()


def prints(prompt, response):
    """Prints ``response`` MiB."""
    os.write(1, b"it begins\n")
    for _ in range(int(response)):
        left = memoryview(b"x" * MIB)
        while left:
            left = left[os.write(1, left) :]
    return 1.0


def many_metrics(prompt, response):
    """``response`` is the first and the last number in the names of its metrics."""
    first, last = map(int, response.split())
    return {"reward": 1.0, **{f"m{i}": float(i) for i in range(first, last)}}


def long_name(prompt, response):
    return {"reward": 1.0, response: 1.0}


def announces_its_folder_and_hangs(prompt, response, lock=""):
    _leave_a_daemon(lock)
    print(os.getcwd(), flush=True)
    signal.pause()


def _leave_a_daemon(lock: str) -> None:
    _hold(lock)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pause()
        os._exit(0)
    os.wait()


def _hold(lock: str) -> None:
    """Lock a file for as long as this process or one that it starts lives."""
    if lock:
        fcntl.flock(os.open(lock, os.O_RDWR), fcntl.LOCK_EX)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
