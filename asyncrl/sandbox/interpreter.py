"""The Python interpreter of a sandbox, and the folders that it needs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.sandbox.base import WORKDIR, SandboxFailed

_COMPILE = "import py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], doraise=True)"
_ASK = "import json, sys; print(json.dumps([sys.executable, sys.base_prefix, sys.prefix]))"


@dataclass(frozen=True)
class Interpreter:
    """``path``: of the program. ``folders``: which it reads. ``environment``: of programs, in which it is python3."""

    path: str
    folders: Sequence[str]
    environment: Mapping[str, str]

    def compile(self, source: str, compiled: str) -> None:
        """Write a file that this interpreter runs. Raises SandboxFailed."""
        words = [self.path, "-I", "-S", "-c", _COMPILE, source, compiled]
        try:
            subprocess.run(words, capture_output=True, timeout=60, check=True)
        except (OSError, subprocess.SubprocessError) as e:
            raise SandboxFailed("task", f"sandbox.python: {self.path} does not compile a program ({e})") from None


def find_interpreter(python: str = "") -> Interpreter:
    """The interpreter of an environment, with its packages; empty: this process's own, without any. Raises
    SandboxFailed."""
    if python:
        try:
            said = subprocess.run([python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=True)
            path, base, prefix = json.loads(said.stdout)
        except (OSError, ValueError, subprocess.SubprocessError) as e:
            raise SandboxFailed(
                "task", f"sandbox.python: expected a Python interpreter, found {python} ({e})"
            ) from None
    else:
        path, base = os.path.realpath(sys.executable), sys.base_prefix
        prefix = base
    search = [os.path.dirname(path), os.path.join(base, "bin"), "/usr/local/bin", "/usr/bin", "/bin"]
    environment = {
        "PATH": os.pathsep.join(dict.fromkeys(search)),
        "HOME": WORKDIR,
        "TMPDIR": f"{WORKDIR}/.tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return Interpreter(path, list(dict.fromkeys([prefix, base, *_on_the_way(path)])), environment)


def _on_the_way(path: str) -> Iterator[str]:
    """Folders of the links that lead from ``path`` to a file."""
    while os.path.islink(path):
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
        yield os.path.dirname(path)
