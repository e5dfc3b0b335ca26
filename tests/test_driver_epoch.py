"""Epochs of drivers: each is taken once, by a driver whose predecessor is gone, and ends when the next one begins."""

import asyncio
import json
import multiprocessing
import os
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.schema import CheckpointConfig
from asyncrl.models.config import CheckpointError
from asyncrl.processes.identity import Process
from asyncrl.run import driver_epoch
from asyncrl.run.driver_epoch import FOLDER, DriverEpoch, EpochOver, InUse, _created
from asyncrl.run.resume import counts
from asyncrl.run.run_folder import RunFolder
from asyncrl.run.shutdown import Shutdown
from asyncrl.trainer.checkpoints import CheckpointMetadata, CheckpointStore
from asyncrl.types.versions import PolicyVersion
from tests.test_spool import in_child


@pytest.fixture
def elsewhere(monkeypatch):
    """Later calls come from another machine, which considers a driver dead after half a second."""

    def elsewhere() -> None:
        monkeypatch.setattr(driver_epoch, "machine", lambda: "another machine")
        monkeypatch.setattr(driver_epoch, "SILENT_S", 0.5)

    return elsewhere


def test_the_next_driver_begins_when_the_one_before_has_ended_in_order(tmp_path):
    first = DriverEpoch.take(tmp_path, 0)
    first.end()
    assert (first.number, DriverEpoch.take(tmp_path, 0).number) == (1, 2)


def test_the_next_driver_begins_when_the_process_of_the_one_before_is_gone(tmp_path):
    def body() -> None:
        DriverEpoch.take(tmp_path, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(body) == -signal.SIGKILL
    assert DriverEpoch.take(tmp_path, 0).number == 2


async def test_a_disk_that_does_not_answer_once_does_not_end_a_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_epoch, "BEAT_S", 0.01)
    epoch, beats = DriverEpoch.take(tmp_path, 0), []

    def utime(path):
        beats.append(path)
        if len(beats) == 2 or len(beats) > 4:
            raise OSError(116, "Stale file handle")

    monkeypatch.setattr(driver_epoch.os, "utime", utime)
    running = asyncio.create_task(epoch.run())
    while len(beats) < 4:
        await asyncio.sleep(0.01)
    monkeypatch.setattr(driver_epoch, "SILENT_S", 2.0)
    with pytest.raises(OSError, match="Stale file handle"):
        await asyncio.wait_for(running, 60)
    assert len(beats) > 5


def test_a_process_that_has_the_number_of_a_dead_driver_is_not_that_driver(tmp_path):
    DriverEpoch.take(tmp_path, 0)
    path = tmp_path / FOLDER / "000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "process_started": 1}))
    assert DriverEpoch.take(tmp_path, 0).number == 2


def test_a_second_driver_is_refused_while_the_first_is_alive(tmp_path):
    DriverEpoch.take(tmp_path, 0)
    with pytest.raises(InUse, match=rf"in use by another driver, process {os.getpid()} on "):
        DriverEpoch.take(tmp_path, 0.3)


def test_a_driver_of_another_machine_is_dead_when_its_file_no_longer_changes(tmp_path, elsewhere):
    first = DriverEpoch.take(tmp_path, 0)
    elsewhere()
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.02):
            first._beat()

    beating = threading.Thread(target=beat)
    beating.start()
    with pytest.raises(InUse):
        DriverEpoch.take(tmp_path, 1.0)
    stop.set()
    beating.join()
    assert DriverEpoch.take(tmp_path, 1.0).number == 2
    with pytest.raises(EpochOver, match="has taken over this run; this one, epoch 1, ends"):
        first.check()


def test_a_driver_whose_file_is_damaged_counts_as_one_of_another_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_epoch, "SILENT_S", 0.2)
    DriverEpoch.take(tmp_path, 0)
    (tmp_path / FOLDER / "000001.json").write_bytes(b"\xff{")
    assert DriverEpoch.take(tmp_path, 0).number == 2


async def test_a_driver_that_wakes_up_after_another_has_begun_ends(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(driver_epoch, "BEAT_S", 0.02)
    first = DriverEpoch.take(tmp_path, 0)
    first.end()  # as its file says nothing about a stopped process
    running = asyncio.create_task(first.run())
    await asyncio.sleep(0.1)
    assert not running.done()
    DriverEpoch.take(tmp_path, 0)
    with pytest.raises(EpochOver):
        await asyncio.wait_for(running, 30)


def _take(path, start, results) -> None:
    start.wait()
    results.put(_created(path, {"process": os.getpid()}))


def test_of_many_that_create_an_epoch_at_once_one_succeeds(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    path = tmp_path / "000001.json"
    processes = [context.Process(target=_take, args=(path, start, results)) for _ in range(6)]
    for process in processes:
        process.start()
    start.set()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert sorted(found) == [False] * 5 + [True]
    assert [p.name for p in tmp_path.iterdir()] == ["000001.json"]


def test_a_checkpoint_that_a_driver_completes_after_its_epoch_does_not_count(tmp_path):
    def store(epoch: DriverEpoch) -> CheckpointStore:
        return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=0), epoch.number, epoch.check)

    def save(store: CheckpointStore, step: int) -> None:
        metadata = CheckpointMetadata(step, PolicyVersion(0, step), step, step, driver_epoch=store.driver_epoch)
        store.complete(store.begin(step), metadata)

    def valid() -> dict[str, str]:
        found = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(), counts=partial(counts, tmp_path))
        return {checkpoint.path.name: checkpoint.digest for checkpoint in found.all()}

    first = DriverEpoch.take(tmp_path, 0)
    stopped = store(first)
    save(stopped, 3)
    began = stopped.begin(6)
    first.end()
    second = DriverEpoch.take(tmp_path, 0)
    second.found(valid())
    with pytest.raises(EpochOver):
        stopped.complete(began, CheckpointMetadata(6, PolicyVersion(0, 6), 6, 6, driver_epoch=1))
    stopped._check = lambda: None  # it was stopped after it had looked
    save(stopped, 9)
    save(store(second), 4)
    assert list(valid()) == ["step_000003", "step_000004"]
    (tmp_path / FOLDER / "000002.found.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"000002\.found\.json is damaged"):
        valid()


def test_a_process_is_told_from_another_that_gets_its_number():
    me = Process.of(os.getpid())
    assert me.alive
    assert not Process(me.pid, me.started + 1).alive
    assert not Process(me.pid, me.started + 1).kill()
    pid = os.fork()
    if pid == 0:
        signal.pause()
    child = Process.of(pid)
    assert child.alive
    assert child.kill()
    os.waitpid(pid, 0)
    assert not child.alive
    assert not child.kill()


def test_a_run_that_died_before_it_had_begun_leaves_its_folder_to_the_next_one(tmp_path):
    config = load_config(None, [f"run_dir={tmp_path / 'run'}", "model.path=none", "reward.function=none"])
    found = SimpleNamespace(prompts_fingerprint="p")

    def body() -> None:
        (tmp_path / "run").mkdir()
        DriverEpoch.take(tmp_path / "run", 0)
        (tmp_path / "run/config.yaml.partial").write_text("name: ru")
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(body) == -signal.SIGKILL
    folder = RunFolder.open(config, "auto", found)
    assert (folder.path, folder.epoch.number) == (tmp_path / "run", 2)
    assert RunFolder.create(config).path == tmp_path / "run-2"


@pytest.mark.parametrize(("groups", "kept"), [(0, 40), (39, 40), (40, 40), (512, 512)])
def test_a_short_resume_leaves_the_profile_of_the_longer_run(tmp_path, groups, kept):
    config = load_config(None, [f"run_dir={tmp_path / 'run'}", "model.path=none", "reward.function=none"])
    folder, ended = RunFolder.create(config), Shutdown()
    for count in (40, groups):
        folder.summarize(ended, {}, {"groups": [[0, []]] * count, "driver_of": count})
    profile = json.loads((tmp_path / "run/profile.json").read_text())
    assert (len(profile["groups"]), profile["driver_of"]) == (kept, kept)
