"""Kills processes of a run with SIGKILL, or simulates a full disk, at chosen calls, without hooks in the tested code:
with this folder on PYTHONPATH, Python imports this file whenever a process starts.

CRASH_POINTS: comma-separated ``module:Class.method:before|after|full|stop:n``, taken in order. A process dies
(``full``: gets ENOSPC, ``stop``: stands still) at its n-th such call since the previous point was reached.
CRASH_MARKS: a folder with one file per point reached.
"""

import errno
import functools
import importlib.abc
import importlib.machinery
import inspect
import os
import signal
import sys
from collections import Counter

POINTS = [point.split(":") for point in os.environ.get("CRASH_POINTS", "").split(",") if point]
calls: Counter[int] = Counter()


def reach(method: str, when: str) -> None:
    """Die here if this call is the next crash point."""
    now = len(os.listdir(os.environ["CRASH_MARKS"]))
    if now == len(POINTS) or f"{POINTS[now][0]}:{POINTS[now][1]}" != method:
        return
    how = POINTS[now][2]
    if when != ("before" if how in ("full", "stop") else how):
        return
    calls[now] += 1
    if calls[now] == int(POINTS[now][3]):
        with open(os.path.join(os.environ["CRASH_MARKS"], str(now)), "x"):
            if how == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def dying(method: str, function):
    """Wraps ``function`` (coroutine functions too) with its crash points."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args, **kwargs):
            reach(method, "before")
            result = await function(*args, **kwargs)
            reach(method, "after")
            return result
    else:

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            reach(method, "before")
            result = function(*args, **kwargs)
            reach(method, "after")
            return result

    return wrapped


class Patcher(importlib.abc.MetaPathFinder):
    """Import hook that wraps the methods with crash points as soon as their module is imported."""

    def find_spec(self, name, path, target=None):
        methods = {method for module, method, *_ in POINTS if module == name}
        spec = importlib.machinery.PathFinder.find_spec(name, path) if methods else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_patch(module) -> None:
            execute(module)
            for method in methods:
                class_name, attribute = method.split(".")
                owner = getattr(module, class_name)
                setattr(owner, attribute, dying(f"{name}:{method}", getattr(owner, attribute)))

        spec.loader.exec_module = execute_and_patch
        return spec


if POINTS:
    sys.meta_path.insert(0, Patcher())
