"""``python -m tests.torture.fast SEED [--faults N]``: storms over a run without Ray, hundreds of faults a minute. With
``--storm`` SEED is that of one storm, as a violation names it.

Each incarnation of the run is a forked process, which a fault ends or disturbs at an event of its disk: a write, a
sync, a change of a name, a commit. After each one the checker looks at what is left, then the run is resumed until it
is complete. Everything is drawn from the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.run import driver_epoch
from tests.torture.checker import Checker, Expected, final_weights
from tests.torture.disk import Tape, cut_power
from tests.torture.world import SEGMENT_BYTES, Setting, Survivors, World, uid_of

driver_epoch.SILENT_S = 0.2
PATIENCE_S = 60.0  # for an incarnation, which takes a second
EVENTS = 900  # of an incarnation that is not disturbed, about

#: fault → weight
LIVE = {"kill": 5, "cut": 5, "full": 2, "broken": 2, "slow": 1}
AT_REST = {"flipped": 1, "shortened": 1, "deleted": 1}
#: what the message of a refusal names, by the part of the file's path
DAMAGED = ("spool", "ledger.sqlite", "checkpoints", "drivers")


@dataclass
class Outcome:
    faults: Counter[str] = field(default_factory=Counter)
    resumes: int = 0
    hangs: int = 0
    violations: list[str] = field(default_factory=list)


class Storm:
    """One run to its end. ``outcome`` is shared by several storms."""

    def __init__(self, seed: int, outcome: Outcome, verbose: bool = False) -> None:
        self.seed, self.outcome, self._verbose = seed, outcome, verbose
        self._random = random.Random(seed)
        draw = self._random
        self.setting = Setting(
            steps=draw.choice((20, 40)),
            batch=draw.choice((1, 2, 4)),
            staleness=draw.choice(("0", "0.5", "1", "2")),
            policy=draw.choice(("fifo", "fifo", "ready_first")),
            overdue=draw.choice(("wait", "wait", "drop")),
            journal_dir=draw.random() < 0.4,
            shards=(1, 1, 2, 3, 2)[seed % 5],
        )
        memory = Path("/dev/shm")  # where a sync costs nothing
        self._scratch = Path(tempfile.mkdtemp(prefix="torture-", dir=memory if memory.is_dir() else None))
        self._folder, self._record = self._scratch / "disk", self._scratch / "record"
        self._folder.mkdir()
        self._survivors = self._scratch / "survivors"
        self._survivors.touch()
        expected = Expected(
            self.setting.steps,
            self.setting.batch,
            math.ceil(float(self.setting.staleness)),
            self.setting.policy == "fifo",
            lambda count: [uid_of(i) for i in range(count)],
            SEGMENT_BYTES,
        )
        self._checker = Checker(expected, self._survivors)

    def run(self, faults: int) -> None:
        """Resume until the run is complete; at most ``faults`` faults, then undisturbed."""
        quiet = 0
        for incarnation in range(10_000):
            left = faults - self.outcome.faults.total()
            kind = self._kind() if left > 0 else "none"
            over = self._rest(incarnation, kind) if kind in AT_REST else self._live(incarnation, kind)
            if over or self.outcome.violations or self.outcome.hangs:
                break
            quiet += kind == "none"
            if quiet > 5:
                self._violation(incarnation, kind, "no incarnation without a fault completes the run")
                break
        if not self.outcome.violations and not self.outcome.hangs:
            shutil.rmtree(self._scratch)

    def _kind(self) -> str:
        weights = {**LIVE, **AT_REST}
        return self._random.choices(list(weights), list(weights.values()))[0]

    def _live(self, incarnation: int, kind: str) -> bool:
        """An incarnation with a fault at one of its events; True if it has completed the run."""
        at, length = self._random.randint(1, EVENTS), self._random.choice((1, 1, 3, 10**9))
        if kind == "slow":
            length = 100
        record = self._scratch / f"record{incarnation}"
        status, text = self._incarnation(incarnation, "kill" if kind == "cut" else kind, at, length, record)
        struck = status != 0 or kind in ("full", "broken", "slow")
        if kind != "none" and struck:
            self.outcome.faults[kind] += 1
        losses = cut_power(record, self._random) if kind == "cut" and status == -signal.SIGKILL else 0
        self._say(f"{incarnation} {kind} at {at}, {length}: status {status}, {losses} losses {text[-120:]!r}")
        legal = {0, -signal.SIGKILL} if kind in ("kill", "cut", "none", "slow") else {0, 1}
        if status not in legal:
            self._violation(incarnation, kind, f"status {status}: {text}")
        self._check(incarnation, kind, over=status == 0)
        return status == 0

    def _rest(self, incarnation: int, kind: str) -> bool:
        """Damage to a file while no process runs. The run passes over it, or refuses it by name; then the file is
        restored, as from a backup."""
        files = [p for p in self._folder.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size]
        files = [p for p in files if not p.name.endswith((".yaml", "-shm", "-wal")) and "logs" not in p.parts]
        if not files:
            return False
        self.outcome.faults[kind] += 1
        backup = self._scratch / "backup"
        shutil.copytree(self._folder, backup, symlinks=True)
        path = self._random.choice(sorted(files))
        damage(path, kind, self._random)
        status, text = self._incarnation(incarnation, "none", 0, 0, self._scratch / f"record{incarnation}")
        self._say(f"{incarnation} {kind} {path.relative_to(self._folder)}: status {status} {text[-200:]!r}")
        if status == 0:
            shutil.rmtree(backup)
            if path.name == "ledger.sqlite" and "copying" not in path.parts:
                self._checker.forget()
            self._check(incarnation, f"{kind} {path}", over=True)
            return True
        if status != 1 or not any(part in text for part in DAMAGED):
            self._violation(incarnation, f"{kind} {path}", f"status {status}: {text}")
        shutil.rmtree(self._folder)
        backup.rename(self._folder)
        return False

    def _incarnation(self, number: int, fault: str, at: int, length: int, record: Path) -> tuple[int, str]:
        """Exit status of a process that runs until it is complete, refuses or dies, and what it said."""
        self.outcome.resumes += number > 0
        said = self._scratch / "said"
        seed = self._random.getrandbits(32)
        if (pid := os.fork()) == 0:
            _become(
                said, self._folder, self.setting, self._survivors, seed, Tape(self._folder, record, fault, at, length)
            )
        deadline = time.monotonic() + PATIENCE_S
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                self.outcome.hangs += 1
                self._say(f"HANG: seed {self.seed}, incarnation {number}, {fault} at {at}, {length}; {self._scratch}")
                return -signal.SIGKILL, said.read_text()
            time.sleep(0.002)
        return os.waitstatus_to_exitcode(ended[1]), said.read_text()

    def _check(self, incarnation: int, kind: str, over: bool) -> None:
        journal = self._folder / "run"
        if self.setting.journal_dir:
            journal = next((self._folder / "local").glob("run-*"), self._folder / "local" / "none")
        for violation in self._checker.check(journal, over):
            self._violation(incarnation, kind, violation)
        if over:
            found = (self._folder / "run/checkpoints/final/state/weights").read_text()
            if found != final_weights(journal):
                self._violation(incarnation, kind, "the final weights are not those of the groups in the ledger")

    def _violation(self, incarnation: int, kind: str, what: str) -> None:
        text = f"seed {self.seed}, incarnation {incarnation}, {kind}, {self.setting}: {what} ({self._scratch})"
        self.outcome.violations.append(text)
        print(f"VIOLATION {text}", flush=True)

    def _say(self, text: str) -> None:
        if self._verbose:
            print(text, flush=True)


def _become(said: Path, folder: Path, setting: Setting, survivors: Path, seed: int, tape: Tape) -> None:
    """The forked process: runs the world and exits."""
    status = 1
    try:
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        tape.install()
        shown, jumps = time.time, random.Random(seed)
        time.time = lambda: shown() + jumps.choice((-3600.0, 0.0, 3600.0))  # the wall clock decides nothing

        async def live() -> None:
            await World(folder, setting, Survivors(survivors), random.Random(seed), tape).run()

        asyncio.run(live())
        status = 0
    except AssertionError:
        traceback.print_exc()
        status = 77
    except BaseException as e:
        traceback.print_exc()
        print(f"{type(e).__name__}: {e}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def damage(path: Path, kind: str, random: random.Random) -> None:
    if kind == "deleted":
        path.unlink()
    elif kind == "shortened":
        os.truncate(path, random.randrange(path.stat().st_size))
    else:
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)


def storms(seed: int, faults: int, verbose: bool = False) -> Outcome:
    """Storms from a seed until there were this many faults, or a violation."""
    outcome = Outcome()
    for number in _numbers():
        Storm(seed * 1000 + number, outcome, verbose).run(faults)
        if outcome.violations or outcome.hangs or outcome.faults.total() >= faults:
            return outcome
    raise AssertionError


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--storm", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if args.storm:
        Storm(args.seed, outcome := Outcome(), args.verbose).run(args.faults)
    else:
        outcome = storms(args.seed, args.faults, args.verbose)
    print(f"{outcome.faults.total()} faults {dict(outcome.faults)}, {outcome.resumes} resumes")
    return 1 if outcome.violations or outcome.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
