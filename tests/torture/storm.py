"""``python -m tests.torture.storm SEED [--faults N] [--steps N] [--machines 2]``: a storm over whole runs on Ray.

A nemesis outside of the run's processes kills, stops and damages them at moments of progress that the seed chose,
resumes the run whenever its driver has died, and checks the ledger after each incarnation and at the end. Over two
machines (`tests.torture.machines`) it also cuts their cable and ends the other machine's Ray node.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from asyncrl.run.run_folder import journal_folder
from asyncrl.sample_queue.spool import SEGMENT_BYTES
from tests.support.faults import ACTORS, FaultyRun, trained_steps
from tests.support.stranger import PAYLOADS
from tests.support.tiny import make_inputs
from tests.torture.checker import Checker, Expected
from tests.torture.fast import damage
from tests.torture.machines import OTHER, Machines

STEPS, BATCH = 60, 2  # of a run, unless asked for another number; groups per step
ANSWER_S = 10.0
#: from the last fault to a new step, or to the end of the driver: an answer, two restarts and two steps
PATIENCE_S = ANSWER_S + 120.0
NODE_DEATH_S = 60.0  # added for two machines: until Ray gives up one of them

KINDS = {
    "kill": 6,  # an actor
    "kill two": 2,  # in one millisecond
    "stop": 3,  # an actor, for a while
    "reward worker": 1,
    "driver": 2,  # killed, then resumed
    "interrupt": 1,  # SIGINT, then resumed
    "second driver": 1,
    "garbage": 1,  # to the listening sockets of the run
    "damage": 2,  # to a checkpoint, while the run is down
}
#: ends of Ray that end the run, and what it says then
RAY_DIED = {"raylet": "the raylet of the driver's machine died", "gcs": "Failed to connect to GCS"}
ONE_MACHINE = dict.fromkeys(RAY_DIED, 1)
TWO_MACHINES = {"cable": 4, "other raylet": 2}  # unplugged for a while; killed, and replaced


@dataclass
class Outcome:
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    hangs: int = 0
    resumes: int = 0
    seconds_to_next_step: list[float] = field(default_factory=list)


class FarRun(FaultyRun):
    """A run over two machines, whose actors are not below its driver."""

    def __init__(self, machines: Machines, *args: Any) -> None:
        self._machines = machines
        options = (f"ray.address={machines.address}", "ray.rollout_strategy=spread", "ray.trainer_strategy=pack")
        super().__init__(*args, *options, within=machines.command(), environment=machines.environment)

    def below(self) -> list[psutil.Process]:
        return self._machines.processes()

    def close(self) -> None:
        """Kill the driver, if it lives. Fails if one of its actors outlives it by 60 s."""
        super().close()
        deadline = time.monotonic() + 60
        while (left := [p for name in ACTORS for p in self.actors(name)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left


class Storm:
    """One run of ``steps`` steps, over one machine or two. ``outcome`` is shared by several storms."""

    def __init__(self, seed: int, outcome: Outcome, machines: int = 1, steps: int = STEPS) -> None:
        self.seed, self.outcome, self._far = seed, outcome, machines == 2
        self._machines: Machines | None = None
        self._kinds = KINDS | (TWO_MACHINES if self._far else ONE_MACHINE)
        self._patience_s = PATIENCE_S + (NODE_DEATH_S if self._far else 0.0)
        self._random = draw = random.Random(seed)
        self._scratch = Path(tempfile.mkdtemp(prefix="storm-"))
        self._folder = self._scratch / "run"
        self._inputs = make_inputs(self._scratch)
        staging = draw.choice(("bucket", "full"))
        staleness = draw.choice(("0", "1", "2"))
        policy, overdue = draw.choice(("fifo", "ready_first")), draw.choice(("wait", "drop"))
        local = [f"journal_dir={self._scratch / 'local'}"] if draw.random() < 0.3 else []
        rolling = staging == "full" and draw.random() < 0.5
        ranks, replicas = draw.choice((1, 2)), draw.choice((1, 2))
        self.options = [
            f"trainer.total_steps={steps}",
            f"async_training.staleness_threshold={staleness}",
            f"async_training.queue_policy={policy}",
            f"async_training.overdue={overdue}",
            f"param_sync.staging={staging}",
            f"param_sync.rollout_update={'rolling' if rolling else 'all_at_once'}",
            f"param_sync.transport={'gloo' if self._far else draw.choice(('shared_memory', 'gloo'))}",
            f"trainer.ranks={ranks}",
            f"rollout.replicas={replicas}",
            f"ray.cpus_per_rank={0.5 / ranks}",
            f"ray.cpus_per_replica={0.5 / replicas}",
            "checkpoint.every_steps=5",
            f"supervision.answer_s={ANSWER_S}",
            *local,
        ]
        self._journal = self._folder
        if local:
            self._journal = journal_folder(self._folder.resolve(), str(self._scratch / "local"))
        config = load_config(
            None, [f"data.train_files=[{self._inputs / 'train.jsonl'}]", "model.path=x", "reward.function=x"]
        )
        prompts = load_prompts(config.data.train_files, config.data)
        order = lambda count: [
            p.uid for p in itertools.islice(PromptOrder(prompts, config.seed, config.data.shuffle), count)
        ]
        bound = math.ceil(float(staleness))
        self._checker = Checker(Expected(steps, BATCH, bound, policy == "fifo", order, SEGMENT_BYTES))
        self._marks = self._scratch / "marks"
        self._marks.mkdir()
        uids = order(40)
        parts = {"MARKS": str(self._marks), "PROMPT": draw.choice(uids), "TOOL": draw.choice(uids)}
        os.environ.update({f"BROKEN_{name}": value for name, value in parts.items()})
        if draw.random() < 0.5:
            broken = "tests.support.broken"
            self.options += [f"rollout.engine.name={broken}:ENGINE", f"rollout.agent_loop={broken}:Raises"]
            self.options += [f"algorithm.advantage={broken}:ADVANTAGE"]

    def run(self, faults: int) -> None:
        """At most ``faults`` faults, then undisturbed."""
        self._machines = Machines() if self._far else None
        try:
            self._storm(faults)
        finally:
            if self._machines is not None:
                self._machines.close()

    def _storm(self, faults: int) -> None:
        began = self.outcome.faults.total()
        run = self._begin()
        try:
            while self.outcome.faults.total() - began < faults and not self._failed:
                due = trained_steps(self._journal) + self._random.randint(0, 2)
                if not self._until_step(run, due) or run.process.poll() is not None:
                    if self._failed or run.process.poll() == 0:
                        break
                    run = self._resumed(run)
                    continue
                time.sleep(self._random.random() * 0.5)
                kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
                before, struck_s = trained_steps(self._journal), time.monotonic()
                if not self._strike(run, kind):
                    continue
                self.outcome.faults[kind] += 1
                if run.process.poll() is not None or kind in ("driver", "interrupt", "damage", *RAY_DIED):
                    if run.process.poll() == 0:
                        break
                    run = self._resumed(run, kind)
                if self._until_step(run, before + 1):
                    self.outcome.seconds_to_next_step.append(time.monotonic() - struck_s)
            while not self._failed and self._ended(run) != 0:
                run = self._resumed(run)
            if not self._failed:
                self._check("at the end", over=True)
                self._count_broken_parts()
        finally:
            try:
                run.close()
            except AssertionError as left:
                self._violation(f"processes outlived the run: {left}")
        if not self._failed:
            shutil.rmtree(self._scratch)

    # -- one fault -----------------------------------------------------------------------------------------------------

    def _strike(self, run: FaultyRun, kind: str) -> bool:
        """False if there was nothing to strike."""
        draw = self._random
        actors = [p for name in ACTORS for p in run.actors(name)]
        if not actors or run.process.poll() is not None:
            return False
        try:
            if kind == "kill":
                self._log(kind, draw.choice(actors), signal.SIGKILL)
            elif kind == "kill two":
                for process in draw.sample(actors, min(2, len(actors))):
                    self._log(kind, process, signal.SIGKILL)
            elif kind == "stop":
                process = draw.choice(actors)
                self._log(kind, process, signal.SIGSTOP)
                time.sleep(draw.choice((0.1, 1.0, ANSWER_S / 2, 2 * ANSWER_S)))
                with suppress(psutil.NoSuchProcess):  # it may have been replaced
                    process.send_signal(signal.SIGCONT)
            elif kind == "reward worker":
                workers = [p for p in run.below() if "rewards" in " ".join(p.cmdline())]
                if not workers:
                    return False
                self._log(kind, draw.choice(workers), signal.SIGKILL)
            elif kind in ("driver", "damage"):
                self._log(kind, psutil.Process(run.process.pid), signal.SIGKILL)
                run.process.wait()
            elif kind == "interrupt":
                self._log(kind, psutil.Process(run.process.pid), signal.SIGINT)
                self._ended(run)
            elif kind in RAY_DIED:
                self._log(kind, next(p for p in run.below() if p.name().startswith(kind)), signal.SIGKILL)
                self._ended(run)
            elif kind == "other raylet":
                if self._machines is None or (raylet := self._machines.raylet(OTHER)) is None:
                    return False
                self._log(kind, raylet, signal.SIGKILL)
                time.sleep(draw.choice((0.0, 5.0, 40.0)))
                self._machines.restart(OTHER)
            elif kind == "cable":
                assert self._machines is not None
                seconds = draw.choice((0.5, 3.0, ANSWER_S, 40.0))
                print(f"  cable: out for {seconds:g} s", flush=True)
                self._machines.cut(OTHER, seconds)
            elif kind == "second driver":
                second = self._begin()
                refused = second.wait(120) == 2 and "is in use by another" in second.text
                if not refused and run.process.poll() is None:  # otherwise the first one had ended
                    self._violation(f"a second driver was not refused: {second.text[-2000:]}")
                FaultyRun.close(second)  # the actors of a cluster that both joined are the first one's
            elif kind == "garbage":
                return _send_garbage(run, draw)
        except (psutil.NoSuchProcess, ProcessLookupError, StopIteration):  # it had just ended
            return False
        return True

    def _log(self, kind: str, process: psutil.Process, number: int) -> None:
        print(f"  {kind}: {process.name()} pid {process.pid} {signal.Signals(number).name}", flush=True)
        process.send_signal(number)

    # -- incarnations --------------------------------------------------------------------------------------------------

    def _begin(self) -> FaultyRun:
        if self._machines is None:
            return FaultyRun(self._inputs, self._folder, *self.options)
        self._machines.restart(OTHER)
        return FarRun(self._machines, self._inputs, self._folder, *self.options)

    def _resumed(self, run: FaultyRun, kind: str = "") -> FaultyRun:
        self._check("after a death of the driver")
        status = run.process.poll()
        ray_died = kind in RAY_DIED and RAY_DIED[kind] in run.text
        if status not in (-signal.SIGKILL, 128 + signal.SIGINT) and not ray_died:
            self._violation(f"the run ended with status {status}: {run.text[-3000:]}")
        run.close()
        if kind == "damage":
            checkpoints = self._folder / "checkpoints"
            files = sorted(p for p in checkpoints.rglob("*") if p.is_file() and p.parts[-2] != "checkpoints")
            whole = sorted(p.name for p in checkpoints.glob("step_*") if "." not in p.name)
            newest = whole[1:][-1:]  # never the only one
            if files := [p for p in files if newest and newest[0] in p.parts and p.stat().st_size]:
                draw, path = self._random, self._random.choice(files)
                print(f"  damage: {path.relative_to(checkpoints)}", flush=True)
                damage(path, draw.choice(("flipped", "shortened", "deleted")), draw)
        self.outcome.resumes += 1
        return self._begin()

    def _until_step(self, run: FaultyRun, step: int) -> bool:
        """Waits for a step; False if the run ended before. A run that trains nothing is a hang."""
        deadline = time.monotonic() + self._patience_s
        while trained_steps(self._journal) < step:
            if run.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self.outcome.hangs += 1
                self._violation(f"no step {step} within {self._patience_s:g} s: {run.text[-3000:]}")
                return False
            time.sleep(0.05)
        return True

    def _ended(self, run: FaultyRun) -> int | None:
        """Exit status; a run that neither ends nor trains is a hang."""
        newest, deadline = -1, 0.0
        while run.process.poll() is None:
            if (step := trained_steps(self._journal)) > newest:
                newest, deadline = step, time.monotonic() + self._patience_s
            elif time.monotonic() > deadline:
                self.outcome.hangs += 1
                self._violation(f"neither ended nor trained for {self._patience_s:g} s: {run.text[-3000:]}")
                return None
            time.sleep(0.05)
        return run.process.returncode

    def _check(self, when: str, over: bool = False) -> None:
        for violation in self._checker.check(self._journal, over):
            self._violation(f"{when}: {violation}")

    def _count_broken_parts(self) -> None:
        """Faults that the run's own parts have made: poisonous groups, a raising engine, a lost device."""
        with closing(sqlite3.connect(self._journal / "ledger.sqlite")) as db:
            for (reason,) in db.execute("SELECT reason FROM groups WHERE reason IN ('poison', 'agent_error')"):
                self.outcome.faults[reason] += 1
        self.outcome.faults.update(path.name for path in self._marks.iterdir())

    @property
    def _failed(self) -> bool:
        return bool(self.outcome.violations)

    def _violation(self, what: str) -> None:
        text = f"seed {self.seed}: {what} ({' '.join(self.options)}; {self._scratch})"
        self.outcome.violations.append(text)
        print(f"VIOLATION {text}", flush=True)


def _send_garbage(run: FaultyRun, draw: random.Random) -> bool:
    """Nonsense to every TCP port that the run's actors listen on, and to their abstract sockets."""
    import socket

    sent = 0
    for process in [p for name in ACTORS for p in run.actors(name)]:
        with suppress(psutil.Error):
            for connection in process.net_connections("all"):
                name = connection.laddr
                with suppress(OSError):
                    if connection.status == psutil.CONN_LISTEN:
                        with socket.create_connection((name.ip, name.port), timeout=2) as link:
                            link.sendall(draw.choice(list(PAYLOADS.values())))
                            sent += 1
                    elif isinstance(name, str) and name.startswith(("@", "\0")):
                        with socket.socket(socket.AF_UNIX) as link:
                            link.settimeout(2)
                            link.connect("\0" + name[1:])
                            link.sendall(draw.choice(list(PAYLOADS.values())))
                            sent += 1
    print(f"  garbage: to {sent} sockets", flush=True)
    return sent > 0


def storms(seed: int, faults: int, machines: int = 1, steps: int = STEPS) -> Outcome:
    """Storms from a seed until there were this many faults, or a violation."""
    outcome = Outcome()
    for number in itertools.count():
        Storm(seed * 1000 + number, outcome, machines, steps).run(faults - outcome.faults.total())
        if outcome.violations or outcome.faults.total() >= faults:
            return outcome
    raise AssertionError


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", type=int)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--machines", type=int, choices=(1, 2), default=1)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run")
    args = parser.parse_args()
    if args.machines == 2 and not Machines.possible():
        print("left out: two machines need root, and a kernel with network namespaces")
        return 0
    outcome = storms(args.seed, args.faults, args.machines, args.steps)
    print(f"{outcome.faults.total()} faults {dict(outcome.faults)}, {outcome.resumes} resumes")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
