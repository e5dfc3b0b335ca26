"""Sandboxes: how fast they start and serve, and whether any of many attacks gets out of them.

    python -m benchmarks.sandbox            # as root: attacks as root and as an ordinary user
    python -m benchmarks.sandbox --no-attacks

``launch_ms_p50``: from nothing to a sandbox that serves. ``execs_per_s``: a warm sandbox taken, ``true`` run in it,
and the sandbox thrown away, by as many callers as there are cores. ``escapes``: attacks that got through, of
``attempts``; an attack that could not be tried counts as one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time

from asyncrl.sandbox.base import Limits
from asyncrl.sandbox.bubblewrap import Bubblewrap
from asyncrl.sandbox.cgroups import Cgroups
from asyncrl.sandbox.interpreter import find_interpreter
from asyncrl.sandbox.local import LocalSandbox
from asyncrl.sandbox.pool import SandboxPool
from tests.support.sandbox_attacks import ATTACKS
from tests.support.sandbox_trial import LIMITS, as_somebody, trial

_EXECS = 400
_SYSTEM_PYTHON = "/usr/bin/python3"  # an ordinary user may not be able to read this process's own


async def launches(count: int) -> list[float]:
    """Milliseconds of each."""
    kind, cgroups, took = Bubblewrap(Limits(), find_interpreter()), Cgroups(), []
    for _ in range(count):
        began = time.perf_counter()
        sandbox = await LocalSandbox.start(kind.launch(bool(cgroups.version)), Limits(), cgroups)
        took.append(1000 * (time.perf_counter() - began))
        await sandbox.close()
    kind.close()
    return took


async def execs(count: int) -> tuple[float, float]:
    """Sandboxes taken, used and thrown away per second; and the median milliseconds of a program in a sandbox that
    lives."""
    callers = len(os.sched_getaffinity(0))
    async with SandboxPool(Bubblewrap(Limits(), find_interpreter()), Limits(), warm=2 * callers, most=callers) as pool:

        async def use() -> None:
            sandbox = await pool.create()
            assert (await sandbox.exec(["true"])).ok
            await sandbox.close()

        async def caller() -> None:
            for _ in range(count // callers):
                await use()

        await use()
        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(callers)))
        rate = count // callers * callers / (time.perf_counter() - began)
        sandbox, took = await pool.create(), []
        for _ in range(100):
            began = time.perf_counter()
            await sandbox.exec(["true"])
            took.append(1000 * (time.perf_counter() - began))
        await sandbox.close()
    return rate, statistics.median(took)


def attacks(python: str) -> dict[str, str]:
    make = lambda: SandboxPool(Bubblewrap(LIMITS, find_interpreter(python)), LIMITS, warm=2, most=4)
    return asyncio.run(trial(make, list(ATTACKS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-attacks", action="store_true")
    args = parser.parse_args()
    took = asyncio.run(launches(60))
    rate, exec_ms = asyncio.run(execs(_EXECS))
    figures = {"launch_ms_p50": round(statistics.median(took), 1), "execs_per_s": round(rate, 1)}
    spread = f"of {len(took)}, {min(took):.1f} to {max(took):.1f}"
    print(f"launch                {figures['launch_ms_p50']:8.1f} ms   ({spread})")
    print(f"warm sandboxes used   {rate:8.1f} /s   (create, true, close)")
    print(f"program in a live one {exec_ms:8.1f} ms")
    if not args.no_attacks:
        users = {"root": lambda: attacks(""), "an ordinary user": lambda: as_somebody(lambda: attacks(_SYSTEM_PYTHON))}
        if os.geteuid():
            users = {f"user {os.geteuid()}": lambda: attacks("")}
        found = {user: tried() for user, tried in users.items()}
        for user, results in found.items():
            through = {name: how for name, how in results.items() if how}
            print(f"attacks as {user:18} {len(results)} tried, {len(through)} through")
            for name, how in through.items():
                print(f"    {name}: {how}")
        figures["attempts"] = sum(map(len, found.values()))
        figures["escapes"] = sum(bool(how) for results in found.values() for how in results.values())
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
