"""Any process of a run may die or hang at any time: the run recovers, or is resumed, and loses nothing.

Whole runs on real Ray, whose processes are killed (SIGKILL) or stopped (SIGSTOP); an audit of the ledger follows. The
long form, ``make test-faults`` and ``make test-resume``, kills more often and sweeps the points between transitions.
"""

import contextlib
import importlib
import inspect
import itertools
import json
import os
import random
import re
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import DataConfig
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from tests.support.faults import ACTORS, NAMES, RELAY, FaultyRun, audit, crash_at, restores, run_through, trained_steps
from tests.support.processes import is_alive

BATCH = 2
QUICKSTART = "configs/quickstart.yaml"

#: durable transitions and points between them, by the process that dies there
QUEUE_POINTS = [
    f"asyncrl.sample_queue.{point}"
    for point in (
        "ledger:Ledger.commit:before:3",
        "ledger:Ledger.commit:after:2",
        "spool:Spool.flush:before:2",
        "spool:Spool.flush:after:2",
        "core:SampleQueue.issue:after:2",
        "core:SampleQueue.put_and_issue:after:2",
        "core:SampleQueue.lease:after:1",
        "core:SampleQueue.trained:before:1",
        "core:SampleQueue.trained:after:1",
        "core:SampleQueue.publish:before:1",
        "core:SampleQueue.publish:after:1",
        "core:SampleQueue.covered:before:1",
        "journal:Journal._sweep:before:1",
        "core:SampleQueue.covered:after:1",
        "core:SampleQueue.snapshot:after:1",
        "core:SampleQueue.finish:after:1",
    )
]
WORKER_POINTS = [
    "asyncrl.param_sync.live_weights:LiveWeights.take:before:2",
    "asyncrl.trainer.rank:TrainerRank.train:after:2",
    "asyncrl.param_sync.live_weights:LiveWeights.commit:before:2",
    "asyncrl.trainer.rank:TrainerRank.stage:after:1",
    "asyncrl.sample_queue.core:SampleQueue.rollback:after:1",
    "asyncrl.param_sync.live_weights:LiveWeights.commit:after:2",
    "asyncrl.trainer.rank:TrainerRank.write:before:1",
    "asyncrl.trainer.rank:TrainerRank.write:after:2",  # after the first one, so that there is a checkpoint to load
    "asyncrl.trainer.rank:TrainerRank.load:after:1",
    "asyncrl.param_sync.sender:Sender.send:before:2",
    "asyncrl.param_sync.sender:Sender.send:after:2",
    "asyncrl.rollouter.in_flight:Snapshotter.store_changed:after:2",
]
#: in the order of startup: ranks are built, the first sync runs, its version is validated and published
STARTING_POINTS = [
    "asyncrl.trainer.rank:TrainerRank.__init__:after:1",
    "asyncrl.trainer.rank:TrainerRank.manifest:before:1",
    "asyncrl.param_sync.live_weights:LiveWeights.take:before:1",
    "asyncrl.param_sync.sender:Sender.send:before:1",
    "asyncrl.param_sync.live_weights:LiveWeights.commit:after:1",
    "asyncrl.rollouter.validation:Validation.part:before:1",
    "asyncrl.sample_queue.core:SampleQueue.publish:before:1",
    "asyncrl.trainer.rank:TrainerRank.train:before:1",
]
#: in the order of startup from a checkpoint
RESUMING_POINTS = [
    "asyncrl.sample_queue.journal:Journal.__init__:after:1",
    "asyncrl.trainer.rank:TrainerRank.load:before:1",
    "asyncrl.trainer.rank:TrainerRank.load:after:1",
    "asyncrl.sample_queue.core:SampleQueue.rollback:before:1",
    "asyncrl.sample_queue.core:SampleQueue.rollback:after:1",
    "asyncrl.trainer.rank:TrainerRank.manifest:before:1",
    "asyncrl.param_sync.live_weights:LiveWeights.take:before:1",
]
DRIVER_POINTS = [
    "asyncrl.trainer.loop:TrainLoop.begin:after:1",
    "asyncrl.param_sync.coordinator:ParameterSyncCoordinator.__call__:after:2",
    "asyncrl.trainer.actors:SampleQueueClient.lease:after:2",
    "asyncrl.trainer.actors:RankGroup.train:after:2",
    "asyncrl.trainer.loop:TrainLoop._report:before:2",
    "asyncrl.trainer.actors:RankGroup.write:after:1",
    "asyncrl.trainer.checkpoints:CheckpointStore.complete:after:1",
    "asyncrl.trainer.checkpoints:CheckpointStore._rotate:before:2",
    "asyncrl.trainer.checkpoints:CheckpointStore.mark_final:before:1",
    "asyncrl.trainer.checkpoints:CheckpointStore.mark_final:after:1",
]
FULL_DISK_POINTS = {
    "spool": "asyncrl.sample_queue.spool:Disk.write:full:6",
    "ledger": "asyncrl.sample_queue.ledger:Ledger.commit:full:9",
    "checkpoint": "asyncrl.trainer.rank:TrainerRank.write:full:1",
}
CRASH_POINTS = [
    *QUEUE_POINTS,
    *WORKER_POINTS,
    *STARTING_POINTS,
    *RESUMING_POINTS,
    *DRIVER_POINTS,
    *FULL_DISK_POINTS.values(),
]


@pytest.mark.parametrize(("module", "method"), sorted({tuple(point.split(":")[:2]) for point in CRASH_POINTS}))
def test_a_crash_point_names_a_method_of_its_class(module, method):
    class_name, attribute = method.split(".")
    owner = getattr(importlib.import_module(module), class_name)
    assert inspect.isfunction(vars(owner)[attribute])


SHARDS = ["rollout.shards=2", "rollout.replicas=2", "ray.cpus_per_replica=0.25"]


@pytest.fixture
def start(inputs, tmp_path):
    """Start a run, or resume the test's earlier one."""
    with contextlib.ExitStack() as stack:

        def start(*more: str) -> FaultyRun:
            run = FaultyRun(inputs, tmp_path / "run", *more)
            stack.callback(run.close)
            return run

        yield start


def test_a_run_survives_the_death_of_each_process(start, tmp_path):
    steps = 24
    run = start(f"trainer.total_steps={steps}")
    moment = random.Random(1)
    run.until_trained(1)
    if sys.platform == "linux":  # trainer ranks have priority on shared cores, see asyncrl.cpu.priority
        policies = {kind: os.sched_getscheduler(run.actor(kind).pid) for kind in ACTORS}
        assert policies == dict.fromkeys(ACTORS, os.SCHED_BATCH) | {"rank": os.SCHED_OTHER}
    # the rank last: without it the run cannot end before its death is noticed
    for step, kind in ((4, "queue"), (7, "replica"), (10, "rollouter"), (13, "rank")):
        run.until_trained(step)
        time.sleep(moment.uniform(0, 0.5))
        run.kill(kind)
    assert run.wait() == 0, run.text
    for kind in ACTORS:
        assert f"supervision: {NAMES[kind]} died" in run.text
    audit(tmp_path / "run", [BATCH] * steps)
    assert restores(tmp_path / "run") >= 1  # for the rank; a replica that died may have got its own version


@pytest.mark.faults
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=lambda by: by.name)
def test_a_relay_that_dies_or_hangs_costs_a_run_nothing(by, start, tmp_path):
    run = start("trainer.total_steps=8", "rollout.replicas=4", "ray.cpus_per_replica=0.2")
    run.until_trained(2)
    run.actor(RELAY).send_signal(by)
    assert run.wait() == 0, run.text
    why = "relay/0 died" if by == signal.SIGKILL else "it was silent for 15 s"
    assert run.text.count(f"calls go to their replicas without this relay from now on: {why}") == 2  # driver, rollouter
    assert "restarting it" not in run.text
    audit(tmp_path / "run", [BATCH] * 8)


@pytest.mark.resume
def test_the_death_of_ray_s_node_ends_the_run_resumable(start, tmp_path):
    run = start("trainer.total_steps=200")
    run.until_trained(4)
    actors = [run.actor(kind) for kind in ACTORS]
    (raylet,) = [p for p in psutil.Process(run.process.pid).children() if p.name() == "raylet"]
    raylet.kill()
    assert run.wait(120) == 1, run.text
    assert "the raylet of the driver's machine died" in run.text
    assert not any(is_alive(actor) for actor in actors)
    trained = trained_steps(tmp_path / "run")
    again = start(f"trainer.total_steps={trained + 3}")
    assert again.wait() == 0, again.text
    audit(tmp_path / "run", [BATCH] * (trained + 3))


@pytest.mark.faults
def test_parts_that_fail_while_their_processes_live_are_replaced_and_poison_is_dropped(
    start, inputs, tmp_path, monkeypatch
):
    """A replica whose engine raises, a rank that loses its device, a request that kills its engine, an agent loop that
    raises."""
    (tmp_path / "marks").mkdir()
    order = PromptOrder(load_prompts([str(inputs / "train.jsonl")], DataConfig()), seed=0)
    uids = [prompt.uid for prompt in itertools.islice(order, 10)]
    for variable, value in (("MARKS", str(tmp_path / "marks")), ("PROMPT", uids[5]), ("TOOL", uids[9])):
        monkeypatch.setenv(f"BROKEN_{variable}", value)
    steps, broken = 12, "tests.support.broken"
    run = start(
        f"trainer.total_steps={steps}",
        f"rollout.engine.name={broken}:ENGINE",
        f"rollout.agent_loop={broken}:Raises",
        f"algorithm.advantage={broken}:ADVANTAGE",
        "rollout.replicas=2",
        "ray.cpus_per_replica=0.25",
    )
    assert run.wait(300) == 0, run.text
    assert {path.name for path in (tmp_path / "marks").iterdir()} == {"engine", "device"}
    assert run.text.count("answers with errors (ValueError: the engine is confused); killing it") == 1, run.text
    assert "trainer/0 is broken: RuntimeError: CUDA error: an illegal memory access" in run.text
    assert "KeyError: 'no such tool'" in run.text
    with closing(sqlite3.connect(tmp_path / "run/ledger.sqlite")) as db:
        dropped = dict(db.execute("SELECT uid, reason FROM groups WHERE state = 'dropped'"))
    assert dropped == {uids[5]: "poison", uids[9]: "agent_error"}
    audit(tmp_path / "run", [BATCH] * steps)


def strike_each_kind(run: FaultyRun, strike: Callable[[psutil.Process], None]) -> None:
    """Kill or stop the processes of each kind as soon as they exist."""
    struck: set[str] = set()

    def all_struck() -> bool:
        for kind in ACTORS.keys() - struck:
            for process in run.actors(kind):
                strike(process)
                struck.add(kind)
        return len(struck) == len(ACTORS)

    run.until(all_struck, "had a process of each kind")


@pytest.mark.faults
def test_a_run_survives_the_death_of_each_process_during_startup(start, tmp_path):
    run = start("trainer.total_steps=4")
    strike_each_kind(run, psutil.Process.kill)
    assert run.wait() == 0, run.text
    for name in NAMES.values():
        assert run.text.count(f"supervision: {name} died") == 1, run.text
    assert "Traceback" not in run.text
    audit(tmp_path / "run", [BATCH] * 4)
    assert restores(tmp_path / "run") == 0  # nothing had been trained yet


@pytest.mark.faults
def test_a_run_survives_deaths_in_each_phase_of_startup(inputs, tmp_path, monkeypatch):
    options = ("trainer.total_steps=6", f"data.validation_files=[{inputs / 'heldout.jsonl'}]")
    (run,) = run_through(inputs, tmp_path / "run", *options, points=STARTING_POINTS, monkeypatch=monkeypatch)
    assert run.text.count("restarting it") >= len(STARTING_POINTS)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["samples_before"], summary["samples_after"]) == (6, 6)
    audit(tmp_path / "run", [BATCH] * 6)


@pytest.mark.faults
def test_ranks_and_the_only_replica_may_die_in_the_first_validation(start, inputs, tmp_path):
    """Validation waits for the replica, which waits for the ranks, which receive no calls meanwhile."""
    run = start(
        "trainer.total_steps=3",
        f"data.validation_files=[{inputs / 'heldout.jsonl'}]",
        "validation.samples=300",
        "reporting.console_every_s=0.3",
    )
    run.until_printed("rollout/validate")
    run.actor("rank").kill()
    run.kill("replica")
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 3)


@pytest.mark.resume
def test_a_run_survives_deaths_while_it_resumes(start, inputs, tmp_path, monkeypatch):
    run = start("trainer.total_steps=100")
    run.until_printed("checkpoint of step 3")
    run.process.kill()
    run.process.wait()
    run.close()
    options = ("trainer.total_steps=12",)
    (run,) = run_through(inputs, tmp_path / "run", *options, points=RESUMING_POINTS, monkeypatch=monkeypatch)
    assert "back at step" in run.text
    audit(tmp_path / "run", [BATCH] * 12)


@pytest.mark.faults
def test_processes_that_hang_during_startup_count_as_dead(start, tmp_path):
    run = start("trainer.total_steps=4", "supervision.start_s=40", "supervision.answer_s=40")
    strike_each_kind(run, psutil.Process.suspend)
    assert run.wait() == 0, run.text
    for name in NAMES.values():
        # it may be up just before it is stopped, and Ray's own health check may detect it first
        late = rf"supervision: {name} (did not start within 40 s|has not answered for 40 s|died: its process was)"
        assert re.search(late, run.text), run.text
    audit(tmp_path / "run", [BATCH] * 4)


@pytest.mark.faults
def test_too_many_hangs_during_startup_end_the_run_with_the_reason(start, tmp_path):
    run = start("trainer.total_steps=4", "supervision.start_s=40", "supervision.max_restarts=0")
    run.actor("replica").suspend()
    assert run.wait(120) == 1, run.text
    failed = json.loads((tmp_path / "run/summary.json").read_text())["failed"]
    assert "replica/0 did not start within 40 s (supervision.start_s) (supervision.max_restarts is 0)" in failed


@pytest.mark.faults
def test_a_queue_that_dies_between_two_transitions_loses_nothing(inputs, tmp_path, monkeypatch):
    points = [QUEUE_POINTS[1], QUEUE_POINTS[3]]
    run_through(inputs, tmp_path / "run", "trainer.total_steps=6", points=points, monkeypatch=monkeypatch)
    audit(tmp_path / "run", [BATCH] * 6)


@pytest.mark.faults
def test_ranks_that_die_too_often_end_the_run_with_the_reason(start, tmp_path):
    run = start("trainer.total_steps=1000", "supervision.max_restarts=0")
    run.until_trained(2)
    run.actor("rank").kill()
    assert run.wait(60) == 1, run.text
    assert "trainer/0 died" in (failed := json.loads((tmp_path / "run/summary.json").read_text())["failed"])
    assert "supervision.max_restarts is 0" in failed


@pytest.mark.resume
@pytest.mark.parametrize("full", FULL_DISK_POINTS.values(), ids=list(FULL_DISK_POINTS))
def test_a_full_disk_ends_the_run_with_the_reason_and_loses_nothing(start, tmp_path, monkeypatch, full):
    marks = crash_at([full], tmp_path, monkeypatch)
    run = start("trainer.total_steps=8")
    assert run.wait() == 1, run.text
    assert len(list(marks.iterdir())) == 1
    assert "No space left on device" in json.loads((tmp_path / "run/summary.json").read_text())["failed"]
    assert run.text.count("Traceback") == 1, run.text
    run = start("trainer.total_steps=8")
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 8)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mode", "held_to"),
    [
        (
            [
                "async_training.queue_policy=ready_first",
                "async_training.partial_rollout=false",
                "param_sync.staging=full",
            ],
            {"in_order": False},
        ),
        (
            [*SHARDS, "async_training.trigger_parameter_sync_step=2", "async_training.staleness_threshold=0.5"],
            {"steps_per_version": 2},
        ),
    ],
    ids=["ready first, whole samples, a host copy", "two shards, two steps a version"],
)
def test_processes_may_die_in_every_mode(start, tmp_path, mode, held_to):
    steps = 20
    run = start(f"trainer.total_steps={steps}", *mode)
    for step, kind in ((3, "replica"), (6, "queue"), (9, "rollouter"), (12, "rank")):
        run.until_trained(step)
        run.kill(kind)
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * steps, **held_to)


@pytest.mark.resume
def test_a_run_is_resumed_with_another_number_of_shards(start, tmp_path):
    for shards, steps in ((2, 4), (1, 8)):
        run = start("trainer.total_steps=12", *SHARDS, f"rollout.shards={shards}")
        run.until_trained(steps)
        run.process.kill()
        run.process.wait()
    run = start("trainer.total_steps=12", *SHARDS)
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 12)


# -- the long form -----------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_processes_of_each_kind_may_die_again_and_again(start, tmp_path):
    run = start("trainer.total_steps=60")
    moment = random.Random(1)
    kinds = list(ACTORS) * 4
    moment.shuffle(kinds)
    for step, kind in enumerate(kinds):
        run.until_trained(3 * step + 1)
        time.sleep(moment.uniform(0, 0.8))
        run.kill(kind)
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 60)


@pytest.mark.faults
def test_all_workers_may_die_at_once(start, tmp_path):
    run = start("trainer.total_steps=14")
    run.until_trained(5)
    for process in [run.actor(kind) for kind in ACTORS]:
        process.kill()
    assert run.wait() == 0, run.text
    for name in NAMES.values():
        assert f"supervision: {name} died" in run.text
    audit(tmp_path / "run", [BATCH] * 14)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(QUEUE_POINTS, marks=pytest.mark.faults, id="queue"),
        pytest.param(WORKER_POINTS, marks=pytest.mark.faults, id="workers"),
        pytest.param(DRIVER_POINTS, marks=pytest.mark.resume, id="driver"),
    ],
)
def test_a_run_survives_a_sweep_of_crash_points(inputs, tmp_path, monkeypatch, points):
    options = ("trainer.total_steps=40", "rollout.engine.slots=4")  # all are busy: groups end and start in one call
    run_through(inputs, tmp_path / "run", *options, points=points, monkeypatch=monkeypatch)
    audit(tmp_path / "run", [BATCH] * 40)


@pytest.mark.faults
def test_processes_that_hang_count_as_dead(start, tmp_path):
    run = start("trainer.total_steps=20", "supervision.answer_s=10", "supervision.progress_s=10")
    for step, kind in enumerate(ACTORS):
        run.until_trained(4 * step + 2)
        run.actor(kind).suspend()
        run.until(lambda name=NAMES[kind]: f"supervision: {name} died" in run.text, f"ended the {kind}")
        assert f"supervision: {NAMES[kind]} has" in run.text  # … not answered, or produced no token
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 20)


@pytest.mark.faults
def test_one_of_two_replicas_continues_until_the_other_is_back(start, tmp_path):
    run = start(
        "trainer.total_steps=40",
        "rollout.replicas=2",
        "ray.cpus_per_replica=0.25",
        "supervision.backoff_s=3",
        "supervision.max_backoff_s=3",
    )
    run.until_trained(4)
    killed = min(run.actors("replica"), key=psutil.Process.create_time)
    killed.kill()
    run.until(lambda: " died" in run.text, "noticed the death of a replica")
    before = trained_steps(run.folder)
    time.sleep(2)  # the back-off before its restart is 3 s
    assert trained_steps(run.folder) > before + 1
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 40)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_quickstart_with_five_kills_reaches_its_accuracy(tmp_path, capsys):
    """The accuracy asked of every seed (`benchmarks.quickstart`). That kills change no bit, see test_resume."""
    folder, steps = tmp_path / "run", load_config(QUICKSTART).trainer.total_steps
    run = quickstart(folder)
    try:
        for n, kind in enumerate((*ACTORS, "driver"), start=1):
            run.until_trained(n * steps // 6, timeout_s=600)
            if kind != "driver":
                run.kill(kind)
        run.process.kill()
        run.process.wait()
        run.close()
        run = quickstart(folder)
        assert run.wait(600) == 0, run.text
    finally:
        run.close()
    summary = json.loads((folder / "summary.json").read_text())
    with capsys.disabled():
        print(f"\nheld-out accuracy: {summary['accuracy_after']:.3f}")
    audit(folder, [load_config(QUICKSTART).trainer.mini_batch_groups] * steps, staleness_bound=1)
    assert summary["samples_after"] >= 500
    assert summary["accuracy_after"] >= 0.85


def quickstart(folder: Path) -> FaultyRun:
    """The quickstart with a checkpoint every 3 steps; `make quickstart` creates its inputs."""
    options = ("checkpoint.every_steps=3", "checkpoint.export_hf=none", "reporting.report=false")
    return FaultyRun(None, folder, "reporting.wandb.mode=disabled", *options, config=QUICKSTART)
