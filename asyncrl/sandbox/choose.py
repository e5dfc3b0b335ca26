"""Which kind of sandbox serves on this machine: found by running one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.config.schema import SandboxConfig
from asyncrl.sandbox.base import Limits, SandboxFailed
from asyncrl.sandbox.bubblewrap import Bubblewrap
from asyncrl.sandbox.interpreter import Interpreter, find_interpreter
from asyncrl.sandbox.landlock import Landlock
from asyncrl.sandbox.podman import Podman
from asyncrl.sandbox.pool import Kind, SandboxPool

_PROBE_S = 60.0

#: the strongest first
KINDS: Mapping[str, Callable[[SandboxConfig, Interpreter], Kind]] = {
    "bubblewrap": lambda config, python: Bubblewrap(limits_of(config), python, config.paths),
    "podman": lambda config, python: Podman(limits_of(config), config.image, config.python, config.paths),
    "landlock": lambda config, python: Landlock(limits_of(config), python, config.paths),
}


@dataclass(frozen=True)
class Probed:
    """What a kind of sandbox said. ``problem``: why it does not serve here; empty: it does. ``memory``: what bounds the
    memory of a sandbox."""

    name: str
    problem: str
    weaker: str = ""
    memory: str = ""


def limits_of(config: SandboxConfig) -> Limits:
    return Limits(config.memory_mb, config.processes, config.disk_mb, config.output_kb)


async def probe(config: SandboxConfig, name: str) -> Probed:
    """Run a program in one sandbox of this kind."""
    try:
        pool = _pool(config, name, warm=0)
        async with pool:
            sandbox = await pool.create()
            try:
                execution = await sandbox.exec(["python3", "-c", "print(6 * 7)"], timeout_s=_PROBE_S)
            finally:
                await sandbox.close()
    except SandboxFailed as e:
        return Probed(name, str(e))
    if execution.stdout != "42\n":
        return Probed(name, f"python3 does not run in it: {(execution.stderr or execution.stdout).strip()[-300:]!r}")
    return Probed(name, "", pool.kind.weaker, pool.memory)


async def open_pool(config: SandboxConfig) -> SandboxPool:
    """Sandboxes of ``config.kind``, or of the first kind that serves here. Raises SandboxFailed, in one line that says
    what to do."""
    if sys.platform != "linux":
        raise SandboxFailed("infra", f"sandbox.kind: expected Linux, found {sys.platform}; use sandbox.kind=remote")
    asked = [config.kind] if config.kind != "auto" else [name for name in KINDS if name != "podman" or config.image]
    problems: list[str] = []
    for name in asked:
        found = await probe(config, name)
        if found.problem:
            problems.append(f"{name}: {found.problem}")
        elif found.weaker and not (config.kind == name or config.allow_unsafe):
            problems.append(f"{name} serves, but {found.weaker}: choose sandbox.kind={name} if that is enough")
        else:
            return _pool(config, name, config.warm)
    raise SandboxFailed(
        "infra", f"sandbox.kind: {config.kind} serves no sandbox on this machine ({'; '.join(problems)})"
    )


def _pool(config: SandboxConfig, name: str, warm: int) -> SandboxPool:
    kind = KINDS[name](config, find_interpreter(config.python))
    return SandboxPool(kind, limits_of(config), warm, config.concurrent)
