"""What runs agents: the options, and the programs and the environment of their processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema import AgentConfig
from asyncrl.rollouter.rewards.environment import worker_environment

OPTION = "rollout.agent"


class AgentError(RuntimeError):
    """Agents cannot run at all, or `AgentProcesses` is closed; a retry would not help."""


@dataclass(frozen=True)
class AgentOptions:
    """See `asyncrl.config.schema.AgentConfig`."""

    path: str = ""
    command: tuple[str, ...] = ()
    python: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    processes: int = 1
    memory_mb: int = 4096
    unresponsive_s: float = 60.0
    variables: Mapping[str, str] = field(default_factory=dict)  # further environment variables

    @classmethod
    def of(cls, config: AgentConfig, args: Mapping[str, Any], variables: Mapping[str, str]) -> AgentOptions:
        """``args``: `config.args` with the values of its secrets."""
        return cls(
            path=config.path,
            command=tuple(config.command),
            python=config.python,
            args=args,
            secrets=tuple(config.secrets),
            processes=config.processes,
            memory_mb=config.memory_mb,
            unresponsive_s=config.unresponsive_s,
            variables=variables,
        )


def program(option: str, word: str, path: str) -> str:
    """Absolute path of a program. Raises AgentError."""
    if (found := shutil.which(word, path=path)) is None:
        raise AgentError(f"{OPTION}.{option}: expected a program on PATH, or the path of one; found {word!r}")
    return os.path.abspath(found)


def search_path(python: str = "") -> str:
    return os.pathsep.join(filter(None, [os.path.dirname(python), os.environ.get("PATH", os.defpath)]))


def environment(options: AgentOptions, python: str, folder: str) -> dict[str, str]:
    """Another interpreter, or a program, finds modules of the working directory, but not those of this environment."""
    variables = {**worker_environment(options.secrets, folder), **options.variables}
    if options.python:
        variables["PATH"] = search_path(python)
    if options.python or options.command:
        variables["PYTHONPATH"] = os.getcwd()
    return variables
