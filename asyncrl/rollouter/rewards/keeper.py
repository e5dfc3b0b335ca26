"""Keeper of a reward worker: starts it, measures it, passes on what it prints, and kills it with all that it started.

See `asyncrl.processes.keeper`. Since Linux 6.12 the worker cannot signal its keepers (`asyncrl.processes.isolation`);
before, code that kills both at once can leave a process behind.

Frames pass between pool and worker directly. On the keeper's standard input the pool writes the time limit of each call
as it begins, and a zero as it ends; on its standard output the keeper writes why the worker has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys

from asyncrl.processes.isolation import isolate
from asyncrl.processes.keeper import Relay, keep
from asyncrl.rollouter.rewards.limits import Limits, Meter, bound_process

CALL = struct.Struct("<d")  # seconds
MAX_OUTPUT_BYTES = 64 * 1024  # per call
_POOL, _WHY = 0, 1


def main() -> None:
    """``python -m asyncrl.rollouter.rewards.keeper SOCKET FOLDER LIMITS``: the descriptor of the worker's end, its
    folder, and `Limits` as JSON."""
    connection, folder, limits = int(sys.argv[1]), sys.argv[2], Limits(**json.loads(sys.argv[3]))
    os.set_inheritable(connection, False)

    def work() -> None:
        bound_process(limits)
        isolate()
        from asyncrl.rollouter.rewards.worker import serve

        serve(socket.socket(fileno=connection))

    watch = lambda stand_in: _Watch(Meter(limits, stand_in, folder))
    why, code = keep(work, watch, folder, private=[connection])
    with contextlib.suppress(BrokenPipeError):
        os.write(_WHY, (why or f"ended its process with exit code {code}").encode())


class _Watch:
    def __init__(self, meter: Meter) -> None:
        self._meter, self._relay = meter, Relay(MAX_OUTPUT_BYTES, "call")

    def heard(self) -> None:
        for limit_s in _calls():
            self._meter.call(limit_s)
            if limit_s:
                self._relay.begin()

    def printed(self, descriptor: int, chunk: bytes) -> None:
        self._relay.write(chunk)

    def exceeded(self) -> str:
        return self._meter.exceeded()


def _calls() -> list[float]:
    """What the pool has written since the last call of this function."""
    written = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(_POOL, 1024 * CALL.size):
            written += chunk
    return [limit_s for (limit_s,) in CALL.iter_unpack(written)]


if __name__ == "__main__":
    main()
