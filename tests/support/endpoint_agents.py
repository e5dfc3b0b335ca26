"""Agents for the tests of the endpoint, of the standard library alone: they run in any environment."""

import asyncio
import importlib.util
import os
import subprocess
import sys
import time

SLEEPS = "import time; time.sleep(600)"


async def sleeps(task, seconds=0.2):
    await asyncio.sleep(seconds)
    return float(task.answer)


def blocks_its_thread(task, seconds=0.2):
    time.sleep(seconds)
    return {"reward": float(task.answer), "metrics": {"length": len(task.messages[0]["content"])}}


class Number:
    def __float__(self):
        return 0.5


RETURNS = {
    "none": None,
    "number": 2,
    "true": True,
    "of a library": Number(),
    "metrics": {"metrics": {"turns": 3}},
    "reward": {"reward": -1.5},
    "both": {"reward": None, "metrics": {"turns": Number()}},
    "text": "high",
    "list": [1.0],
    "object": object(),
    "keys": {"score": 1.0},
    "nan": float("nan"),
    "long": "x" * 100_000,
    "many": {"metrics": {f"m{i}": i for i in range(100)}},
}


async def returns(task):
    return RETURNS[task.text]


class ServerGone(Exception):
    infra = True


async def misbehaves(task, lock=None):
    """In the way that the prompt names."""
    match task.text:
        case "raise":
            raise KeyError("no such unit")
        case "server":
            raise ServerGone("the server has gone")
        case "exit":
            sys.exit("enough")
        case "cancel":
            raise asyncio.CancelledError
        case "die":
            print("about to die", file=sys.stderr)
            os._exit(7)
        case "block":
            time.sleep(600)
        case "hog":
            leave_behind(lock)
            held = "x" * (600 << 20)
            await asyncio.sleep(600)
            return float(len(held))
        case "wait":
            await asyncio.sleep(600)
        case "leave":
            leave_behind(lock)
        case "write to every descriptor":
            for descriptor in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
                try:
                    os.write(descriptor, b"garbage\n")
                except OSError:
                    continue
            await asyncio.sleep(600)
    return 1.0


def in_thread(task):
    if task.text == "exit":
        sys.exit("enough")
    if task.text == "stop":
        raise StopIteration
    return "misbehaved"


async def notes_its_cancellation(task, path):
    open(f"{path}.began", "w").close()
    try:
        await asyncio.sleep(600)
    finally:
        open(path, "w").close()


def prints(task):
    print('{"id": 0, "result": 5.0}')
    print("x" * 200_000)
    sys.stderr.write('{"id": 0, "result": 6.0}\n')
    subprocess.run(["echo", "a child prints"], check=True)
    return 1.0


def process(task):
    return {"metrics": {"pid": os.getpid(), "asyncrl": importlib.util.find_spec("asyncrl") is not None}}


def environment(task, path):
    with open(path, "w") as file:
        file.write("\n".join(f"{name}={value}" for name, value in sorted(os.environ.items())))


def leave_behind(lock):
    """A daemon, by a double fork, that holds a lock on the file."""
    code = f"import fcntl, os; file = open({lock!r}); fcntl.flock(file, fcntl.LOCK_SH); os.write(1, b'x'); {SLEEPS}"
    outer = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.read(1)
        process.wait()
