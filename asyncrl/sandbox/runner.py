"""The program in a sandbox: runs programs, reads and writes files for the process outside.

A script for an interpreter that need not have asyncrl. It serves frames on standard input and output::

    in    uint32 length, then marshal: (call, name of the call, its arguments)
    out   int32 call, int32 status, int32 code, uint32 lengths of two byte strings, then these

It is the parent of all that runs in the sandbox, and none of that can look into it. The process outside bounds and
checks every frame all the same.
"""

from __future__ import annotations

# few imports, because each sandbox waits for them; `signal` would import enum, which takes as long as all of these
import _signal as signal
import ctypes
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

FRAME, REPLY = struct.Struct("<I"), struct.Struct("<iiiII")
EXITED, TIMEOUT, FAILED = range(3)  # statuses
READY = -1  # the first reply's call
_CHUNK = 65536
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38


class Program:
    """A running program. ``reads``: descriptor → 0 for its output, 1 for its errors. ``lost``: it printed more than is
    kept."""

    def __init__(
        self,
        call: int,
        argv: list[str],
        stdin: bytes,
        env: dict[str, str],
        cwd: str,
        timeout_s: float,
        output_bytes: int,
    ) -> None:
        self.call, self.stdin, self.output_bytes = call, memoryview(stdin), output_bytes
        self.ends_at = time.monotonic() + timeout_s
        self.status = EXITED
        self.lost = False
        inputs, outputs, errors = os.pipe(), os.pipe(), os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            for descriptor in (*inputs, *outputs, *errors):
                os.close(descriptor)
            raise
        if not self.pid:
            _become(argv, env, cwd, inputs[0], outputs[1], errors[1])
        for descriptor in (inputs[0], outputs[1], errors[1]):
            os.close(descriptor)
        self.writes, self.reads = inputs[1], {outputs[0]: 0, errors[0]: 1}
        self.output = {0: bytearray(), 1: bytearray()}
        for descriptor in (self.writes, *self.reads):
            os.set_blocking(descriptor, False)

    def feed(self) -> None:
        """Write standard input as far as the program takes it."""
        try:
            self.stdin = self.stdin[os.write(self.writes, self.stdin[:_CHUNK]) :] if self.stdin else self.stdin
        except BlockingIOError:
            return
        except OSError:  # the program has closed it
            self.stdin = self.stdin[:0]
        if not self.stdin:
            os.close(self.writes)
            self.writes = -1

    def take(self, descriptor: int) -> bool:
        """Read what the program printed; False at the end."""
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return True
        except OSError:
            chunk = b""
        taken = self.output[self.reads[descriptor]]
        room = self.output_bytes - len(taken)
        taken += chunk[:room]
        self.lost |= len(chunk) > room
        return bool(chunk)

    def close(self) -> None:
        if self.writes >= 0:
            os.close(self.writes)
        for descriptor in self.reads:
            os.close(descriptor)


def _become(argv: list[str], env: dict[str, str], cwd: str, *descriptors: int) -> None:
    """The new process, which becomes the program or ends."""
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.chdir(cwd)
    except BaseException as error:
        _give_up(126, f"{error}\n")
    try:
        os.execvpe(argv[0], argv, env)
    except FileNotFoundError:
        _give_up(127, f"{argv[0]}: not found\n")
    except BaseException as error:
        _give_up(126, f"{argv[0]}: {error}\n")


def _give_up(code: int, why: str) -> None:
    """Ends the new process, come what may: a second runner would take requests from the first."""
    try:
        os.write(2, why.encode(errors="replace"))
    finally:
        os._exit(code)


class Runner:
    """``kill_others``: kills what runs in the sandbox besides this process."""

    def __init__(self, requests: int, replies: int, kill_others: Callable[[], object]) -> None:
        self._requests, self._replies, self._kill_others = requests, replies, kill_others
        self._received = bytearray()
        self._programs: dict[int, Program] = {}

    def serve(self) -> None:
        """Until the process outside closes its end."""
        wakeup, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakeup, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._reply(READY, EXITED, os.getpid())
        while True:
            events = select.poll()
            events.register(self._requests, select.POLLIN)
            events.register(wakeup, select.POLLIN)
            owners: dict[int, Program] = {}
            for program in self._programs.values():
                for descriptor in program.reads:
                    events.register(descriptor, select.POLLIN)
                    owners[descriptor] = program
                if program.writes >= 0:
                    events.register(program.writes, select.POLLOUT)
                    owners[program.writes] = program
            next_end = min((p.ends_at for p in self._programs.values()), default=None)
            wait = None if next_end is None else max(0, 1000 * (next_end - time.monotonic()))
            for descriptor, _ in events.poll(wait):
                if descriptor == wakeup:
                    os.read(wakeup, _CHUNK)
                elif descriptor == self._requests:
                    if not self._receive():
                        return
                elif descriptor in owners:
                    self._pass(owners[descriptor], descriptor)
            self._reap()
            if any(program.ends_at <= time.monotonic() for program in self._programs.values()):
                self._time_out()

    def _receive(self) -> bool:
        chunk = os.read(self._requests, 1 << 20)
        self._received += chunk
        while len(self._received) >= FRAME.size:
            end = FRAME.size + FRAME.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            frame = bytes(self._received[FRAME.size : end])
            del self._received[:end]
            call, name, arguments = marshal.loads(frame)
            try:
                getattr(self, name)(call, *arguments)
            except (OSError, ValueError) as error:
                self._reply(call, FAILED, getattr(error, "errno", None) or 0, str(error).encode())
        return bool(chunk)

    def exec(self, call: int, *arguments: object) -> None:
        self._programs[call] = Program(call, *arguments)  # type: ignore[arg-type]

    def read(self, call: int, path: str, most: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would keep us waiting
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("expected a file")
            contents = bytearray()
            while chunk := os.read(descriptor, _CHUNK * 16):
                contents += chunk
                if len(contents) > most:
                    raise ValueError(f"expected at most {most} bytes")
        finally:
            os.close(descriptor)
        self._reply(call, EXITED, 0, bytes(contents))

    def write(self, call: int, path: str, contents: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("expected a file")
            os.ftruncate(descriptor, 0)
            left = memoryview(contents)
            while left:
                left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)
        self._reply(call, EXITED, 0)

    def _pass(self, program: Program, descriptor: int) -> None:
        if descriptor == program.writes:
            program.feed()
        elif descriptor in program.reads and not program.take(descriptor):
            os.close(descriptor)
            del program.reads[descriptor]

    def _reap(self) -> bool:
        """Answer for the programs that have ended; orphans end silently. False: no other process is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if not pid:
                return True
            for program in list(self._programs.values()):
                if program.pid == pid:
                    code = os.waitstatus_to_exitcode(status)
                    self._end(program, code if code >= 0 else 128 - code)

    def _end(self, program: Program, code: int) -> None:
        for descriptor, stream in program.reads.items():  # what is in the pipes; others may hold them open
            before = -1
            while len(program.output[stream]) > before:  # once more when all that is kept has come: was there more?
                before = len(program.output[stream])
                program.take(descriptor)
        program.close()
        del self._programs[program.call]
        status = program.status | (4 if program.lost else 0)
        self._reply(program.call, status, code, bytes(program.output[0]), bytes(program.output[1]))

    def _time_out(self) -> None:
        """Kill all: what a program started may have left its session, and look like anybody's."""
        now = time.monotonic()
        for program in self._programs.values():
            if program.ends_at <= now:
                program.status = TIMEOUT
        while self._reap():  # one that forks again and again needs several rounds
            self._kill_others()
            time.sleep(0.001)

    def _reply(self, call: int, status: int, code: int, first: bytes = b"", second: bytes = b"") -> None:
        left = memoryview(REPLY.pack(call, status, code, len(first), len(second)) + first + second)
        while left:
            left = left[os.write(self._replies, left) :]


def serve(kill_others: Callable[[], object], limits: list[str]) -> None:
    """Serve calls on standard input and output. ``kill_others``: sends SIGKILL to all others in the sandbox, which are
    below this process. ``limits``: LIMIT=VALUE, names of `resource.RLIMIT_…`."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    libc = ctypes.CDLL(None)
    for option, value in ((_PR_SET_DUMPABLE, 0), (_PR_SET_NO_NEW_PRIVS, 1)):
        libc.prctl(option, *map(ctypes.c_ulong, (value, 0, 0, 0)))
    for limit in limits:
        name, _, most = limit.partition("=")
        resource.setrlimit(getattr(resource, name), (int(most), int(most)))
    Runner(requests, replies, kill_others).serve()


def _kill_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left
        return


def main() -> None:
    """``python -I -S runner.py LIMIT=VALUE…``, as the first process of a pid namespace."""
    if os.getpid() != 1:  # it would kill all that its user runs
        sys.exit(f"expected to be the first process of a sandbox, with pid 1; found pid {os.getpid()}")
    serve(_kill_all, sys.argv[1:])


if __name__ == "__main__":
    main()
