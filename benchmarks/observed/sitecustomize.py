"""Measures the CPU time of a process's observability calls by wrapping them at import.

Python imports this file at the start of every process that has this folder on its PYTHONPATH. Each process writes its
seconds to its own file in ASYNCRL_OBSERVED."""

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import threading
import time
from collections import Counter

FOLDER = os.environ.get("ASYNCRL_OBSERVED")
seconds: Counter[str] = Counter()
inside = threading.local()  # nested calls count once, for the outermost call

#: module → (class, or "" for a function; name; key in `seconds`)
CLOCKED = {
    "asyncrl.observability.telemetry.recorder": [
        ("Recorder", name, "recorder") for name in ("begin", "end", "add_span", "count", "gauge", "drain")
    ],
    "asyncrl.observability.sinks.hub": [("Hub", "_call", "driver")],
    "asyncrl.run.monitor": [("Monitor", "_drain", "driver")],
    "asyncrl.observability.report.report": [("", "write_report", "report")],
}


def clocked(function, kind: str):
    if inspect.iscoroutinefunction(function):  # includes other work of the event loop during the call

        @functools.wraps(function)
        async def wrapped(self, *args, **kwargs):
            began_s = time.thread_time()
            try:
                return await function(self, *args, **kwargs)
            finally:
                seconds[kind] += time.thread_time() - began_s
                seconds["answers"] += len(self._system.drains())
                write()
    else:

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            if getattr(inside, "it", False):
                return function(*args, **kwargs)
            inside.it, began_s = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                inside.it = False
                seconds[kind] += time.thread_time() - began_s
                if function.__name__ in ("drain", "write_report"):
                    write()

    return wrapped


def write() -> None:
    """Write this process's seconds; called repeatedly, since actors are killed at the end."""
    threads_s = 0.0
    for thread in threading.enumerate():
        if "wandb" in thread.name.lower() or "asyncio" in thread.name.lower():
            with open(f"/proc/self/task/{thread.native_id}/stat") as file:
                user, system = file.read().rsplit(")", 1)[1].split()[11:13]
            threads_s += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    path = os.path.join(FOLDER, str(os.getpid()))
    with open(f"{path}.new", "w") as file:
        json.dump({**seconds, **({"wandb_threads": threads_s} if "wandb" in sys.modules else {})}, file)
    os.replace(f"{path}.new", path)


class Patcher(importlib.abc.MetaPathFinder):
    """Import hook that wraps the calls in `CLOCKED` when their module is imported."""

    def find_spec(self, name, path, target=None):
        if name not in CLOCKED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_patch(module) -> None:
            execute(module)
            for owner_name, attribute, kind in CLOCKED[name]:
                owner = getattr(module, owner_name) if owner_name else module
                setattr(owner, attribute, clocked(getattr(owner, attribute), kind))

        spec.loader.exec_module = execute_and_patch
        return spec


if FOLDER:
    sys.meta_path.insert(0, Patcher())
