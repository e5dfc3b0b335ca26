"""Another user of this machine, who repeatedly connects to abstract sockets and sends malformed bytes.

python -m tests.support.stranger UID SOCKET... < payloads in hexadecimal, one per line; prints a line per round
"""

import contextlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from asyncrl.param_sync.transports.messages import framed

NOBODY = 65534
MUTE = 50  # connections per round that send nothing
#: payloads that no reader sends
PAYLOADS = {
    "noise": b"\xff" * 10_000,
    "huge": struct.pack("<I", 1 << 31) + b" " * 10_000,
    "no JSON": struct.pack("<I", 12) + b"\xffnot a hello",
    "no object": struct.pack("<I", 8) + b"[1, 2, 3]",
    "nested": struct.pack("<I", 4000) + b"[" * 4000,
    "no keys": framed({"stranger": "r0"}),
    "no text": framed({"session": ["s"], "who": {}, "holds": 0}),
}


@contextlib.contextmanager
def stranger(names: Sequence[str], payloads: Sequence[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Runs the attacker as the user ``nobody`` if this process is root, else as the same user."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.stranger", str(user), *names],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            process.stdin.write("".join(f"{payload.hex()}\n" for payload in payloads))
            process.stdin.close()
            yield process
        finally:
            process.kill()


def main(user: int, names: Sequence[str]) -> None:
    payloads = [bytes.fromhex(line) for line in sys.stdin]
    if user != os.geteuid():
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    while True:
        with contextlib.ExitStack() as stack:
            for name in names:
                for payload in [*payloads, *[b""] * MUTE]:
                    sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                    sock.settimeout(1)
                    with contextlib.suppress(OSError):  # refused, closed, or its process has ended
                        sock.connect("\0" + name)
                        sock.sendall(payload)
        print("attacked", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
