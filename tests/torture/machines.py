"""Several machines on one: network namespaces with cables to a switch, and a Ray node in each. Needs root on Linux."""

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

ADDRESSES = tuple(f"10.211.0.{number}" for number in range(1, 9))
HEAD, OTHER, *_ = ADDRESSES
PORT = 6379
START_S = 120.0
CPUS = 2


class Machines:
    """``count`` machines at the first of `ADDRESSES`, and ``spare`` ones without a Ray node yet. Drivers run at `HEAD`:
    ``command(...)`` is a command there, ``environment`` holds the cluster's token. ``mbit``: millions of bits per
    second that each cable carries in either direction."""

    def __init__(self, count: int = 2, spare: int = 0, mbit: int | None = None) -> None:
        self._switch = f"asyncrl-{os.getpid()}-switch"
        self._names = {address: f"asyncrl-{os.getpid()}-{address}" for address in ADDRESSES[: count + spare]}
        self._mbit = mbit
        self._ray_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the sockets in it have long names
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        try:
            self._connect()
            for address in ADDRESSES[:count]:
                self.start_ray(address)
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
        return ["ip", "netns", "exec", self._names[address], *command]

    def processes(self, *addresses: str) -> list[psutil.Process]:
        """Those of the machines at these addresses; of all."""
        found = []
        for address in addresses or self._names:
            listed = subprocess.run(["ip", "netns", "pids", self._names[address]], capture_output=True, text=True)
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

    def received(self, address: str) -> int:
        """Bytes that have come in over the machine's cable."""
        count = self.command("cat", "/sys/class/net/wire/statistics/rx_bytes", address=address)
        return int(subprocess.run(count, capture_output=True, check=True).stdout)

    def restart(self, address: str) -> None:
        """Start a machine's Ray node, unless it lives."""
        if self.raylet(address) is None:
            self.start_ray(address)

    def cut(self, address: str, seconds: float) -> None:
        """Unplug a machine's cable: what is sent is lost without an error."""
        self._ip("-n", self._names[address], "link", "set", "wire", "down")
        time.sleep(seconds)
        self._ip("-n", self._names[address], "link", "set", "wire", "up")

    def kill(self, *addresses: str) -> None:
        """Kill all processes of these machines."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and (left := self.processes(*addresses)):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.1)

    def close(self) -> None:
        self.kill()
        for name in (*self._names.values(), self._switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        shutil.rmtree(self._ray_dir, ignore_errors=True)

    def _connect(self) -> None:
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "name", "switch", "type", "bridge")
        self._ip("-n", self._switch, "link", "set", "switch", "up")
        for port, (address, name) in enumerate(self._names.items()):
            socket = f"port{port}"
            self._ip("netns", "add", name)
            self._ip("-n", name, "link", "add", "wire", "type", "veth", "peer", "name", socket, "netns", self._switch)
            self._ip("-n", self._switch, "link", "set", socket, "master", "switch")
            self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            for where, link in ((name, "wire"), (name, "lo"), (self._switch, socket)):
                self._ip("-n", where, "link", "set", link, "up")
            if self._mbit is not None:
                for where, link in ((name, "wire"), (self._switch, socket)):
                    rate = ["rate", f"{self._mbit}mbit", "burst", "256kb", "latency", "100ms"]
                    subprocess.run(["tc", "-n", where, "qdisc", "add", "dev", link, "root", "tbf", *rate], check=True)

    @staticmethod
    def _ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)
