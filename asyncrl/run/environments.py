"""Python environments of the two pools: required packages, and checks that they are installed.

The packages of a backend and those of an engine may conflict, so each pool can have its own interpreter
(``trainer.python``, ``rollout.engine.python``; Ray's ``py_executable``). Only bytes, NumPy arrays and asyncrl's own
types cross between them.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.trainer.backends.base import BACKENDS

_LIST_VERSIONS = (
    "import importlib.metadata as m, platform\n"
    "versions = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
    "print(platform.python_version(), versions.get('ray'), *sorted(versions))"
)


class _Pool(NamedTuple):
    python_option: str
    python: str
    part_option: str  # names the pool's engine or backend
    part: str
    distributions: frozenset[str]  # one of them must be installed; empty: none needed


def interpreter(option: str) -> str:
    """Interpreter that an option names. A path is relative to the driver's working directory; a command is looked up on
    each machine; empty is the driver's interpreter."""
    return str(Path(option).absolute()) if "/" in option else option


def environment_problems(config: Config, trains: bool = True) -> list[str]:
    """One line per pool whose environment, on this machine, lacks a required package. ``trains``: the trainer's pool
    counts. Raises UnknownPart."""
    engine, trainer = config.rollout.engine, config.trainer
    needs = ENGINES.find(engine.name).distributions, BACKENDS.find(trainer.backend).distributions
    pools = [
        _Pool("rollout.engine.python", engine.python, "rollout.engine.name", engine.name, needs[0]),
        _Pool("trainer.python", trainer.python, "trainer.backend", trainer.backend, needs[1]),
    ]
    return [problem for pool in pools[: 1 + trains] if (problem := _problem(pool))]


def _problem(pool: _Pool) -> str | None:
    if not pool.python and not pool.distributions:
        return None
    python = interpreter(pool.python) or sys.executable
    try:
        command = [python, "-c", _LIST_VERSIONS]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        python_version, ray_version, *packages = listed.split()
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        return f"{pool.python_option}: {python} cannot be run ({e}); expected a Python with asyncrl installed"
    found, ours = (python_version, ray_version), (platform.python_version(), importlib.metadata.version("ray"))
    if found != ours:
        return (
            f"{pool.python_option}: Ray needs the driver's versions, Python {ours[0]} and Ray {ours[1]}; {python} has "
            f"Python {found[0]} and Ray {found[1]}"
        )
    expected = f"expected {pool.python_option} to name an interpreter that has it"
    if pool.distributions and pool.part in (*ENGINES.built_in(), *BACKENDS.built_in()):
        expected += f"; `make venv-{pool.part}` makes .venv-{pool.part}/bin/python"
    if "asyncrl" not in packages:
        return f"{pool.python_option}: asyncrl is not installed for {python}; {expected}"
    if pool.distributions and not pool.distributions & set(packages):
        return (
            f"{pool.part_option}: {' or '.join(sorted(pool.distributions))} is not installed for {python}; {expected}"
        )
    return None
