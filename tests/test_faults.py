"""Any process of a run may die or hang, at any moment: the run goes on by itself, or is resumed, and nothing is lost.

Whole runs on real Ray, whose processes are killed (SIGKILL) or stopped (SIGSTOP); afterwards the ledger is held against
what the run was to train. The long form, ``make test-faults``, kills more and sweeps the moments between transitions.
"""

import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.config.load import load_config
from tests.support.faults import ACTORS, NAMES, FaultyRun, audit, crash_at, restores, run_through, trained_steps

BATCH = 2
QUICKSTART = "configs/quickstart.yaml"

#: durable transitions, and what lies between them, by the process that dies there
QUEUE_POINTS = [
    f"asyncrl.sample_queue.{point}"
    for point in (
        "ledger:Ledger.commit:before:3",
        "ledger:Ledger.commit:after:2",
        "spool:Spool.flush:before:2",
        "spool:Spool.flush:after:2",
        "core:SampleQueue.issue:after:2",
        "core:SampleQueue.put:after:2",
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
    "asyncrl.param_sync.live_receiver:LiveViewReceiver.take:before:2",
    "asyncrl.trainer.rank:TrainerRank.train:after:2",
    "asyncrl.param_sync.live_receiver:LiveViewReceiver.commit:before:2",
    "asyncrl.trainer.rank:TrainerRank.stage:after:1",
    "asyncrl.sample_queue.journal:Journal.rollback:after:1",
    "asyncrl.param_sync.live_receiver:LiveViewReceiver.commit:after:2",
    "asyncrl.trainer.rank:TrainerRank.write:before:1",
    "asyncrl.trainer.rank:TrainerRank.write:after:2",  # the first one is a checkpoint, which is loaded
    "asyncrl.trainer.rank:TrainerRank.load:after:1",
    "asyncrl.param_sync.sender:Sender.send:before:2",
    "asyncrl.param_sync.sender:Sender.send:after:2",
    "asyncrl.rollouter.loop:RolloutLoop._tell_news:after:2",
]
DRIVER_POINTS = [
    "asyncrl.trainer.loop:TrainLoop.begin:after:1",
    "asyncrl.param_sync.group:ParameterSyncGroup.__call__:after:2",
    "asyncrl.trainer.actors:QueueOfRay.lease:after:2",
    "asyncrl.trainer.actors:RankGroup.train:after:2",
    "asyncrl.trainer.loop:TrainLoop._report:before:2",
    "asyncrl.trainer.actors:RankGroup.write:after:1",
    "asyncrl.trainer.checkpoints:CheckpointStore.complete:after:1",
    "asyncrl.trainer.checkpoints:CheckpointStore._rotate:before:2",
    "asyncrl.trainer.checkpoints:CheckpointStore.mark_final:before:1",
    "asyncrl.trainer.checkpoints:CheckpointStore.mark_final:after:1",
]


@pytest.fixture
def start(inputs, tmp_path):
    """Start a run, or resume the one that was started before."""
    with contextlib.ExitStack() as stack:

        def start(*more: str) -> FaultyRun:
            run = FaultyRun(inputs, tmp_path / "run", *more)
            stack.callback(run.close)
            return run

        yield start


def test_a_run_that_loses_each_of_its_processes_goes_on_by_itself(start, tmp_path):
    steps = 18
    run = start(f"trainer.total_steps={steps}")
    moment = random.Random(1)
    run.until_trained(1)
    if sys.platform == "linux":  # whoever trains comes first on shared cores, see asyncrl.priority
        policies = {kind: os.sched_getscheduler(run.actor(kind).pid) for kind in ACTORS}
        assert policies == dict.fromkeys(ACTORS, os.SCHED_BATCH) | {"rank": os.SCHED_OTHER}
    # the ranks last: without them the run cannot end before it has noticed
    for step, kind in ((4, "queue"), (7, "replica"), (10, "rollouter"), (13, "rank")):
        run.until_trained(step)
        time.sleep(moment.uniform(0, 0.5))
        run.kill(kind)
    assert run.wait() == 0, run.text
    for kind in ACTORS:
        assert f"supervision: {NAMES[kind]} died" in run.text
    audit(tmp_path / "run", [BATCH] * steps)
    assert restores(tmp_path / "run") >= 1  # for the rank; a replica that died alone may have had a version of its own


@pytest.mark.faults
def test_a_queue_that_dies_between_two_transitions_is_where_it_was(inputs, tmp_path, monkeypatch):
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


@pytest.mark.faults
@pytest.mark.parametrize(
    "full",
    [
        "asyncrl.sample_queue.spool:Disk.write:full:6",
        "asyncrl.sample_queue.ledger:Ledger.commit:full:9",
        "asyncrl.trainer.rank:TrainerRank.write:full:1",
    ],
    ids=["spool", "ledger", "checkpoint"],
)
def test_a_full_disk_ends_the_run_with_the_reason_and_costs_nothing(start, tmp_path, monkeypatch, full):
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
        (["async_training.queue_policy=ready_first"], {"in_order": False}),
        (["async_training.partial_rollout=false"], {}),
        (
            ["async_training.trigger_parameter_sync_step=2", "async_training.staleness_threshold=0.5"],
            {"steps_per_version": 2},
        ),
        (["param_sync.staging=full"], {}),
    ],
    ids=["ready first", "whole samples", "two steps a version", "a host copy"],
)
def test_in_every_mode_processes_may_die(start, tmp_path, mode, held_to):
    steps = 20
    run = start(f"trainer.total_steps={steps}", *mode)
    for step, kind in ((3, "replica"), (6, "queue"), (9, "rollouter"), (12, "rank")):
        run.until_trained(step)
        run.kill(kind)
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * steps, **held_to)


# -- the long form -----------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("kind", list(ACTORS))
def test_five_deaths_of_one_kind(start, tmp_path, kind):
    run = start("trainer.total_steps=60")
    moment = random.Random(kind)
    for step in range(4, 29, 5):
        run.until_trained(step)
        time.sleep(moment.uniform(0, 0.8))
        run.kill(kind)
    assert run.wait() == 0, run.text
    assert f"supervision: {NAMES[kind]} died" in run.text
    audit(tmp_path / "run", [BATCH] * 60)


@pytest.mark.faults
def test_five_deaths_of_the_driver(start, tmp_path):
    moment = random.Random(5)
    for _ in range(5):
        run = start("trainer.total_steps=60")
        run.until_printed("checkpoint of step")  # it has come further than the one before
        time.sleep(moment.uniform(0, 0.8))
        run.process.kill()
        run.process.wait()
    run = start("trainer.total_steps=60")
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 60)
    assert restores(tmp_path / "run") >= 5


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


@pytest.mark.faults
@pytest.mark.parametrize("points", [QUEUE_POINTS, WORKER_POINTS, DRIVER_POINTS], ids=["queue", "workers", "driver"])
def test_a_sweep_of_crash_points(inputs, tmp_path, monkeypatch, points):
    run_through(inputs, tmp_path / "run", "trainer.total_steps=40", points=points, monkeypatch=monkeypatch)
    audit(tmp_path / "run", [BATCH] * 40)


@pytest.mark.faults
@pytest.mark.parametrize("kind", list(ACTORS))
def test_a_process_that_hangs_is_taken_for_dead(start, tmp_path, kind):
    run = start("trainer.total_steps=12", "supervision.answer_s=10", "supervision.progress_s=10")
    run.until_trained(4)
    run.actor(kind).suspend()
    assert run.wait() == 0, run.text
    assert f"supervision: {NAMES[kind]} has" in run.text  # … not answered, or given no token
    assert f"supervision: {NAMES[kind]} died" in run.text
    audit(tmp_path / "run", [BATCH] * 12)


@pytest.mark.faults
def test_of_two_replicas_one_goes_on_until_the_other_is_back(start, tmp_path):
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
    time.sleep(2)  # of the 3 before there is another
    assert trained_steps(run.folder) > before + 1
    assert run.wait() == 0, run.text
    audit(tmp_path / "run", [BATCH] * 40)


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_quickstart_with_five_kills_learns_as_much_as_one_without(tmp_path, capsys):
    accuracy: dict[str, float] = {}
    for name, kills in (("undisturbed", []), ("disturbed", ["replica", "rank", "rollouter", "queue", "driver"])):
        folder = tmp_path / name
        steps = load_config(QUICKSTART).trainer.total_steps
        run = quickstart(folder)
        try:
            for n, kind in enumerate(kills, start=1):
                run.until_trained(n * steps // 6, timeout_s=600)
                if kind != "driver":
                    run.kill(kind)
                    continue
                run.process.kill()
                run.process.wait()
                run.close()
                run = quickstart(folder)
            assert run.wait(600) == 0, run.text
        finally:
            run.close()
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["samples_after"] >= 500
        accuracy[name] = summary["accuracy_after"]
    audit(folder, [load_config(QUICKSTART).trainer.mini_batch_groups] * steps, staleness_bound=2)
    with capsys.disabled():
        print("\nheld-out accuracy:", ", ".join(f"{value:.3f} {name}" for name, value in accuracy.items()))
    assert accuracy["disturbed"] == pytest.approx(accuracy["undisturbed"], abs=0.03)


def quickstart(folder: Path) -> FaultyRun:
    """The quickstart (`make quickstart` makes what it needs), with a checkpoint every 3 steps."""
    options = ("checkpoint.every_steps=3", "checkpoint.export_hf=none", "reporting.report=false")
    return FaultyRun(None, folder, "reporting.wandb.mode=disabled", *options, config=QUICKSTART)
