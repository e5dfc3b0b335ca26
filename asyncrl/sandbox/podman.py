"""Sandboxes in containers of podman, with a system of their own: an image with python3."""

from __future__ import annotations

import inspect
import itertools
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence

from asyncrl.sandbox import runner
from asyncrl.sandbox.base import WORKDIR, Limits, SandboxFailed
from asyncrl.sandbox.local import Launch, process_limits
from asyncrl.sandbox.users import Users

_RUNNER = "/runner.py"
_ID = 1000  # of the user inside, where podman gives each of us users of our own
_ELSEWHERE_MB = 8  # each of /tmp and /dev/shm
REMOVE_S = 30.0
_PAUSE_S = 0.1
_RUNNING_MB = 16  # the runner, which counts here
_REMOVE = ("rm", "--force", "--ignore", "--time", "0")
#: of this process, what podman needs: where its images and sockets are
VARIABLES = (
    *("PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS", "TMPDIR"),
    *("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"),
)
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKDIR,
    "TMPDIR": WORKDIR,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
_names = itertools.count()

log = logging.getLogger(__name__)


class Podman:
    """Launches runners in containers without network, as root each as a user of its own.

    ``image``: is not pulled. ``python``: must be empty, for the image has its own. ``paths``: files and folders that
    programs in the sandbox may read, at the same place."""

    name, weaker, limited_by = "podman", "", "podman's control group"

    def __init__(self, limits: Limits, image: str, python: str = "", paths: Sequence[str] = ()) -> None:
        """Raises SandboxFailed if this machine lacks the program or the image."""
        self._limits, self._image, self._paths = limits, image, [os.path.abspath(path) for path in paths]
        if python:
            raise SandboxFailed("task", f"sandbox.python: podman runs the image's python3, found {python}")
        if odd := next((path for path in self._paths if not re.fullmatch(r"[^:,]+", path)), ""):
            raise SandboxFailed("task", f"sandbox.paths: podman takes paths without colon and comma, found {odd}")
        self._program = shutil.which("podman") or ""
        if not self._program:
            raise SandboxFailed("infra", "podman is not installed; apt-get install podman")
        if self._podman("image", "exists", image) == 1:
            raise SandboxFailed("infra", f"sandbox.image: podman has no image {image}; podman pull {image}")
        self._users = Users()
        self._folder = tempfile.mkdtemp(prefix="asyncrl-sandbox-")
        os.chmod(self._folder, 0o711)
        self._runner = os.path.join(self._folder, os.path.basename(_RUNNER))
        with open(self._runner, "w") as file:
            file.write(inspect.getsource(runner))
        os.chmod(self._runner, 0o644)

    def launch(self, bound: bool) -> Launch:
        uid = self._users.take()
        container = f"{_prefix(os.getpid())}{next(_names)}"
        return Launch(
            self._command(container, uid),
            _ENVIRONMENT,
            variables=_variables(),
            after=lambda ended: self._after(container, uid),
        )

    def close(self) -> None:
        """When no sandbox runs any more."""
        os.unlink(self._runner)
        os.rmdir(self._folder)

    def _command(self, container: str, uid: int | None) -> list[str]:
        user = uid if uid is not None else _ID
        memory = f"{self._limits.memory_mb + _RUNNING_MB}m"
        command = [self._program, "run", "--rm", "--interactive", "--name", container, "--pull", "never"]
        command += ["--log-driver", "none", "--sig-proxy=false", "--no-healthcheck", "--hostname", "sandbox"]
        command += ["--network", "none", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
        command += ["--user", f"{user}:{user}", "--read-only", "--read-only-tmpfs=false"]
        command += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(self._limits.processes + 1)]
        command += ["--shm-size", f"{_ELSEWHERE_MB}m", "--tmpfs", f"/tmp:size={_ELSEWHERE_MB}m,mode=1777"]
        command += ["--tmpfs", f"{WORKDIR}:size={self._limits.disk_mb}m,mode=1777,exec", "--workdir", WORKDIR]
        limits = dict(limit.removeprefix("RLIMIT_").split("=") for limit in process_limits(self._limits, bound=True))
        for name in ("NPROC", "NOFILE", "CORE"):  # else podman asks for more than it may
            command += ["--ulimit", f"{name.lower()}={limits[name]}:{limits[name]}"]
        command += ["--volume", f"{self._runner}:{_RUNNER}:ro,z"]  # z: our own file may be labelled for SELinux
        for path in self._paths:
            command += ["--volume", f"{path}:{path}:ro"]
        return [
            *(*command, "--entrypoint", "python3", self._image, "-I", "-S", _RUNNER),
            *(f"RLIMIT_{name}={most}" for name, most in limits.items()),
        ]

    def _after(self, container: str, uid: int | None) -> None:
        """The container goes on when its client is killed. It may be about to remove itself, which another removal may
        disturb."""
        until = time.monotonic() + REMOVE_S
        while self._podman(*_REMOVE, container):
            if time.monotonic() > until:
                log.warning("podman did not remove the container %s", container)
                return
            time.sleep(_PAUSE_S)
        self._users.give_back(uid)

    def _podman(self, *arguments: str) -> int:
        """Exit status; 125 if podman failed itself, or took too long."""
        return _run(self._program, *arguments).returncode


def remove_containers(pid: int) -> None:
    """Remove those of a process that has ended, within `REMOVE_S`. Where podman serves nothing, there are none."""
    if not (program := shutil.which("podman")):
        return
    until, names = time.monotonic() + REMOVE_S, list[str]()
    asked = ("ps", "--all", "--filter", f"name=^{_prefix(pid)}", "--format", "{{.Names}}")
    while (left_s := until - time.monotonic()) > 0:
        found = _run(program, *asked, within_s=left_s)
        names = [name for name in found.stdout.split() if name.startswith(_prefix(pid))]
        if names:
            _run(program, *_REMOVE, *names, within_s=until - time.monotonic())
        elif not found.returncode:
            return
        time.sleep(_PAUSE_S)
    log.warning("podman did not remove the containers %s* (%s)", _prefix(pid), ", ".join(names) or "not listed")


def _prefix(pid: int) -> str:
    """Of the names of a process's containers."""
    return f"asyncrl-{pid}-"


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _run(program: str, *arguments: str, within_s: float = REMOVE_S) -> subprocess.CompletedProcess[str]:
    """Exit status 125, without output, if it did not run, or not to its end."""
    command = [program, *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=within_s, env=_variables()
        )
    except (OSError, subprocess.TimeoutExpired):
        return subprocess.CompletedProcess(command, 125, "", "")
