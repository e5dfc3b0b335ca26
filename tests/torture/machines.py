"""Two machines on one: network namespaces with a cable between them, and a Ray node in each. Needs root on Linux."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

HEAD, OTHER = "10.211.0.1", "10.211.0.2"
PORT = 6379
START_S = 120.0
CPUS = 2


class TwoMachines:
    """``head`` is where drivers run: ``command(...)`` is a command there, ``environment`` holds the cluster's token."""

    def __init__(self) -> None:
        self._names = [f"asyncrl-{os.getpid()}-{side}" for side in ("head", "other")]
        self._ray_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the sockets in it have long names
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        try:
            self._connect()
            self.start_ray(HEAD)
            self.start_ray(OTHER)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def possible() -> bool:
        """True if this machine lets this user make namespaces and cables."""
        name = f"asyncrl-{os.getpid()}-try"
        attempt = f"ip netns add {name} && ip -n {name} link add wire type veth peer name end"
        done = subprocess.run(["sh", "-c", f"{attempt}; made=$?; ip netns del {name}; exit $made"], capture_output=True)
        return done.returncode == 0

    @property
    def address(self) -> str:
        return f"{HEAD}:{PORT}"

    def command(self, *command: str, address: str = HEAD) -> list[str]:
        return ["ip", "netns", "exec", self._name(address), *command]

    def processes(self, *addresses: str) -> list[psutil.Process]:
        """Those of the machines at these addresses."""
        found = []
        for address in addresses:
            listed = subprocess.run(["ip", "netns", "pids", self._name(address)], capture_output=True, text=True)
            for pid in listed.stdout.split():
                with suppress(psutil.NoSuchProcess):
                    found.append(psutil.Process(int(pid)))
        return found

    def raylet(self, address: str) -> psutil.Process | None:
        for process in self.processes(address):
            with suppress(psutil.NoSuchProcess):
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def start_ray(self, address: str) -> None:
        """A Ray node at an address that has none."""
        joins = ["--head", f"--port={PORT}", "--include-dashboard=false"] if address == HEAD else [self._join]
        options = [f"--node-ip-address={address}", f"--num-cpus={CPUS}", "--object-store-memory=200000000"]
        ray = [str(Path(sys.executable).parent / "ray"), "start", *joins, *options, "--disable-usage-stats"]
        if address == HEAD:
            ray.append(f"--temp-dir={self._ray_dir}")
        environment = os.environ | self.environment | {"RAY_worker_niceness": "0"}
        with tempfile.TemporaryFile("w+") as out:  # not a pipe, which Ray's processes would hold open
            subprocess.run(
                self.command(*ray, address=address),
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=START_S,
                check=True,
            )

    @property
    def _join(self) -> str:
        return f"--address={self.address}"

    def restart_other(self) -> None:
        """Start the other machine's Ray node, unless it lives."""
        if self.raylet(OTHER) is None:
            self.start_ray(OTHER)

    def cut(self, seconds: float) -> None:
        """Unplug the cable: what is sent is lost, and nobody is told."""
        self._ip("-n", self._names[1], "link", "set", "wire", "down")
        time.sleep(seconds)
        self._ip("-n", self._names[1], "link", "set", "wire", "up")

    def close(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (left := self.processes(HEAD, OTHER)):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.1)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _name(self, address: str) -> str:
        return self._names[address == OTHER]

    def _connect(self) -> None:
        for name in self._names:
            self._ip("netns", "add", name)
        head, other = self._names
        self._ip("-n", head, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", other)
        for name, address in zip(self._names, (HEAD, OTHER), strict=True):
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            self._ip("-n", name, "link", "set", "wire", "up")
            self._ip("-n", name, "link", "set", "lo", "up")

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)
