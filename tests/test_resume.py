"""A run that ended early resumes at its last checkpoint: each prompt once, and the same bits in deterministic mode.

A folder that cannot be resumed is refused with the reason, before anything starts or is written."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

import asyncrl.cli.ledger
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.fully_async_main import main
from asyncrl.models.checkpoint import read_tensors
from asyncrl.run import run_folder
from asyncrl.run.placement_plan import PlacementError
from tests.support.faults import OPTIONS, FaultyRun, audit, crash_at, restores
from tests.support.tiny import overrides

STEPS = 16
DETERMINISTIC = (
    f"trainer.total_steps={STEPS}",
    "async_training.staleness_threshold=0",
    "rollout.engine.deterministic=true",
    "checkpoint.export_hf=final",
    # groups are dropped and replaced, so that the ledger holds more than the trained ones
    "algorithm.filter_zero_variance=true",
    "reward.function=tests.test_synchronous_equality:coarse_reward",
)


@pytest.fixture(scope="module")
def begin():
    """Start a run in a folder, or resume the run in it."""
    with contextlib.ExitStack() as stack:

        def begin(*args, **kwargs) -> FaultyRun:
            run = FaultyRun(*args, **kwargs)
            stack.callback(run.close)
            return run

        yield begin


@pytest.fixture(scope="module")
def killed(inputs, begin, tmp_path_factory) -> Path:
    """Folder of a run whose driver was killed after step 7, with checkpoints of steps 3 and 6."""
    for _ in range(5):  # again if this process was held up and the run went further
        run = begin(inputs, tmp_path_factory.mktemp("killed") / "run", "trainer.total_steps=1000")
        run.until_trained(7)
        run.until((run.folder / "checkpoints/step_000006").exists, "saved step 6")
        run.process.kill()
        run.process.wait()
        run.close()
        if not (run.folder / "checkpoints/step_000009").exists():
            return run.folder
    pytest.fail("each run went on to step 9 before it was killed")


@pytest.fixture
def folder(killed, tmp_path) -> Path:
    """A copy of the killed run's folder."""
    return Path(shutil.copytree(killed, tmp_path / "run", symlinks=True))


@pytest.mark.resume
@pytest.mark.timeout(600)
def test_a_run_whose_processes_are_all_killed_equals_an_undisturbed_one_bit_for_bit(inputs, begin, tmp_path):
    """Driver and rank between checkpoints, the others at any moment."""
    undisturbed = begin(inputs, tmp_path / "undisturbed" / "run", *DETERMINISTIC)
    assert undisturbed.wait() == 0, undisturbed.text

    run = begin(inputs, tmp_path / "disturbed" / "run", *DETERMINISTIC)
    until_between(run, 3)
    run.process.kill()
    run.process.wait()
    run = begin(inputs, run.folder, *DETERMINISTIC)
    until_between(run, 6)
    run.kill("rank")
    moment = random.Random(1)
    for step, kind in ((9, "queue"), (11, "replica"), (13, "rollouter")):
        run.until_trained(step)
        time.sleep(moment.uniform(0, 0.3))
        run.kill(kind)
    assert run.wait() == 0, run.text
    resumed, restored = map(int, re.findall(r"back at step (\d+)", run.text))
    assert 3 <= resumed < restored

    expected = read_tensors(undisturbed.folder / "checkpoints/final/hf")
    found = read_tensors(run.folder / "checkpoints/final/hf")
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    audit(run.folder, [2] * STEPS, staleness_bound=0)
    assert restores(run.folder) == 2
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as db:
        assert db.execute("SELECT COUNT(*) FROM groups WHERE state = 'dropped'").fetchone()[0] > 0


def until_between(run: FaultyRun, saved: int) -> None:
    """Wait until the checkpoint of a step is complete and the next step is trained."""
    run.until(lambda: (run.folder / f"checkpoints/step_{saved:06d}").exists(), f"saved step {saved}")
    run.until_trained(saved + 1)


@pytest.mark.resume
def test_a_killed_run_resumes_with_other_pools_and_batches_and_again_after_an_interruption(inputs, begin, folder):
    """The spool has a torn tail, and the newest save was interrupted."""
    newest_segment = max((folder / "spool").iterdir())
    with newest_segment.open("ab") as file:
        file.write(b"the beginning of a record")
    interrupted = folder / "checkpoints/step_000009.1.partial"
    shutil.copytree(folder / "checkpoints/step_000006", interrupted)

    larger = "trainer.mini_batch_groups=4"
    run = begin(inputs, folder, "trainer.total_steps=1000", larger, "rollout.replicas=2", "ray.cpus_per_replica=0.25")
    run.until_printed("back at step 6")
    run.until_printed("cut 25 bytes of an unfinished write")
    run.until_trained(7)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(60) == 128 + signal.SIGINT, run.text
    ended = max(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*"))
    assert ended >= 7
    assert (folder / "checkpoints/final").resolve().name == f"step_{ended:06d}"
    assert not interrupted.exists()

    steps = ended + 2
    ranks = ("trainer.ranks=2", "ray.cpus_per_rank=0.25")
    resumed = begin(inputs, folder, f"trainer.total_steps={steps}", larger, *ranks)
    assert resumed.wait() == 0, resumed.text
    assert f"back at step {ended}:" in resumed.text
    audit(folder, [2] * 6 + [4] * (steps - 6), staleness_bound=2)
    assert restores(folder) >= 2


@pytest.mark.resume
def test_a_signal_while_a_checkpoint_loads_ends_the_run_at_once(inputs, begin, folder, tmp_path, monkeypatch):
    with monkeypatch.context() as stopped:
        marks = crash_at(["asyncrl.trainer.rank:TrainerRank.load:stop:1"], tmp_path, stopped)
        run = begin(inputs, folder, "trainer.total_steps=12")
        run.until(lambda: list(marks.iterdir()), "loading")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.wait(60) == 128 + signal.SIGINT, run.text
    assert "abandoned by SIGINT" in run.text
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    run = begin(inputs, folder, "trainer.total_steps=12")  # more than the killed run has issued groups for
    assert run.wait() == 0, run.text
    assert "back at step 6" in run.text
    audit(folder, [2] * 12)


@pytest.mark.resume
def test_a_journal_lost_with_its_machine_is_restored_from_the_copy_beside_the_checkpoint(inputs, begin, tmp_path):
    disk = tmp_path / "disk"
    run = begin(inputs, tmp_path / "runs" / "run", "trainer.total_steps=1000", f"journal_dir={disk}")
    journal = run_folder.journal_folder(run.folder.resolve(), str(disk))
    run.until(lambda: (run.folder / "checkpoints/step_000006").exists(), "saved step 6")
    run.process.kill()
    run.process.wait()
    run.close()
    assert not (run.folder / "ledger.sqlite").exists()
    shutil.rmtree(disk)

    run = begin(inputs, run.folder, "trainer.total_steps=15", f"journal_dir={disk}")
    assert run.wait() == 0, run.text
    audit(run.folder, [2] * 15, journal=journal)
    assert [path.name for path in (run.folder / "journal").iterdir()] == ["000002"]  # not one for each driver


@pytest.mark.resume
def test_a_damaged_spool_is_reported(inputs, begin, folder):
    """The queue verifies the whole spool when it starts, since every record in it was acknowledged as durable."""
    segment = min((folder / "spool").iterdir())
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    before = contents(folder / "spool") | contents(folder / "checkpoints")
    run = begin(inputs, folder, "trainer.total_steps=1000")
    assert run.wait(60) == 1, run.text
    assert f"SpoolError: {segment} is damaged at offset" in run.text
    assert contents(folder / "spool") | contents(folder / "checkpoints") == before


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rollout.temperature=0.5", "rollout.temperature: the run to resume has 1.0, found 0.5"),
        ("rollout.n=2", "rollout.n: the run to resume has 4, found 2"),
        ("seed=7", "seed: the run to resume has 0, found 7"),
    ],
)
def test_a_change_that_would_give_queued_groups_another_meaning_is_refused(inputs, folder, capfd, option, message):
    assert message in refused(inputs, folder, capfd, option)


def test_other_prompts_in_the_same_file_are_refused(inputs, folder, capfd):
    file = inputs / "train.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join(rows[:-1]))
    try:
        output = refused(inputs, folder, capfd)
    finally:
        file.write_text("".join(rows))
    assert "data.train_files: the run to resume has 25 prompts" in output
    assert "found 24 prompts" in output


def test_another_column_of_the_same_prompts_is_refused(inputs, folder, capfd):
    file = inputs / "train.jsonl"
    before = file.read_text()
    file.write_text("".join(json.dumps(json.loads(row) | {"level": 1}) + "\n" for row in before.splitlines()))
    try:
        output = refused(inputs, folder, capfd)
    finally:
        file.write_text(before)
    assert output.count("25 prompts") == 2


@pytest.mark.resume
def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(inputs, begin, folder):
    shard = max((folder / "checkpoints/step_000006/state").glob("*.bin"))
    damage(shard)
    damage(folder / "checkpoints/step_000006/metadata.json", at=2)
    run = begin(inputs, folder, "trainer.total_steps=9")
    assert run.wait() == 0, run.text
    assert "step_000006/metadata.json is damaged" in run.text
    assert "back at step 3:" in run.text
    audit(folder, [2] * 9)


def test_a_damaged_checkpoint_that_is_named_is_refused(inputs, folder, capfd):
    shard = max((folder / "checkpoints/step_000006/state").glob("*.bin"))
    damage(shard)
    output = refused(inputs, folder, capfd, resume=folder / "checkpoints/step_000006")
    assert f"{shard} is damaged" in output
    assert "step_000003" in output  # the other checkpoint


def test_a_resume_by_checkpoint_keeps_the_folder_of_its_run_in_its_config(inputs, folder, tmp_path, monkeypatch):
    async def open_nothing(cluster):
        raise PlacementError("no room")

    monkeypatch.setattr("asyncrl.run.cluster.Cluster.open", open_nothing)
    monkeypatch.setattr("asyncrl.observability.telemetry.log.configure_logging", lambda *_: None)
    options = overrides(inputs, tmp_path / "other", *OPTIONS)
    assert main([*options, "--resume", str(folder / "checkpoints/step_000006")]) == 1
    assert load_config(folder / "config.yaml").run_dir == str(folder)
    assert not (tmp_path / "other").exists()


@pytest.mark.resume
def test_a_resume_of_a_finished_run_starts_nothing_unless_an_option_has_changed(inputs, begin, tmp_path, monkeypatch):
    run = begin(inputs, tmp_path / "run", "trainer.total_steps=2")
    assert run.wait() == 0, run.text
    config, before = run.folder / "config.yaml", contents(run.folder)
    again = [f"run_dir={run.folder}", "--config", str(config), "--resume", "auto"]
    opened = []

    async def open_nothing(cluster):
        opened.append(cluster)
        raise PlacementError("no room")

    monkeypatch.setattr("asyncrl.run.cluster.Cluster.open", open_nothing)
    monkeypatch.setattr("asyncrl.observability.telemetry.log.configure_logging", lambda *_: None)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(again) == 0
    assert said.getvalue().startswith(f"{run.folder}: nothing is left to do after step 2; a larger trainer.total_steps")
    assert contents(run.folder) == before
    assert opened == []
    assert main([*again, "checkpoint.export_hf=final"]) == 1
    assert len(opened) == 1


def test_a_run_folder_that_cannot_be_read_is_refused_and_no_other_run_begins(inputs, tmp_path, capfd):
    (tmp_path / "run").symlink_to(tmp_path / "run")
    assert main([*overrides(inputs, tmp_path / "run", *OPTIONS), "--resume", "auto"]) == 2
    assert f"run_dir: {tmp_path / 'run'} cannot be read (Too many levels of symbolic links)" in capfd.readouterr().err


@pytest.mark.resume
def test_a_bad_byte_in_an_older_checkpoint_does_not_matter(inputs, begin, folder):
    damage(folder / "checkpoints/step_000003/metadata.json", at=2)
    run = begin(inputs, folder, "trainer.total_steps=9")
    assert run.wait() == 0, run.text
    assert "back at step 6:" in run.text
    audit(folder, [2] * 9)


def test_a_ledger_older_than_the_checkpoint_is_refused_with_the_checkpoint_that_fits(inputs, folder, capfd):
    """As on a machine where the run was before it went on elsewhere."""
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.execute("DELETE FROM versions WHERE number >= 5")
        db.execute("UPDATE groups SET state = 'queued', step = NULL WHERE step > 4")
        db.commit()
    output = refused(inputs, folder, capfd)
    assert "step_000006 was taken with another ledger than" in output
    assert "it holds 12 groups, there are 8 up to its step 6" in output
    assert f"--resume {folder / 'checkpoints/step_000003'}" in output


def test_a_ledger_with_as_many_but_other_groups_is_refused(inputs, folder, capfd):
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.execute("UPDATE groups SET uid = uid || 'x' WHERE step = 6")
        db.commit()
    assert "12 groups are trained up to its step 6 in both, but not the same" in refused(inputs, folder, capfd)


def test_a_ledger_without_the_version_of_the_checkpoint_is_refused(inputs, folder, capfd):
    lineage, number = json.loads((folder / "checkpoints/step_000006/metadata.json").read_bytes())["version"]
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        db.execute("DELETE FROM versions WHERE number = ?", (number,))
        db.commit()
    assert f"that one has no version {lineage}.{number}" in refused(inputs, folder, capfd)


@pytest.mark.resume
def test_a_driver_that_was_stopped_while_another_took_over_ends_and_changes_nothing(inputs, begin, tmp_path):
    """On a disk whose locks do not reach other machines. The second driver has another local disk for the journal."""
    folder = tmp_path / "runs" / "run"
    first = begin(inputs, folder, "trainer.total_steps=1000", f"journal_dir={tmp_path / 'disk of the first'}")
    first.until(lambda: (folder / "checkpoints/step_000006").exists(), "saved step 6")
    first.process.send_signal(signal.SIGSTOP)
    disk = tmp_path / "disk of the second"
    options = ("trainer.total_steps=15", f"journal_dir={disk}")
    second = begin(inputs, folder, *options, module="tests.support.other_machine")
    second.until_printed("back at step")
    first.process.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1, first.text
    assert "has taken over this run" in first.text
    assert second.wait() == 0, second.text
    journal = run_folder.journal_folder(folder.resolve(), str(disk))
    audit(folder, [2] * 15, journal=journal)
    third = begin(inputs, folder, "trainer.total_steps=18", f"journal_dir={disk}")
    assert third.wait() == 0, third.text
    assert "back at step 15:" in third.text
    assert asyncrl.cli.ledger.main([str(journal)]) == 0


def test_a_damaged_ledger_is_reported(inputs, folder, capfd):
    ledger = folder / "ledger.sqlite"
    with closing(sqlite3.connect(ledger)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(ledger.read_bytes())
    content[4096:8192] = os.urandom(4096)
    ledger.write_bytes(content)
    assert f"{ledger} is damaged" in refused(inputs, folder, capfd)


def test_missing_checkpoints_of_groups_that_the_ledger_no_longer_keeps_are_refused(inputs, folder, capfd):
    shutil.rmtree(folder / "checkpoints")
    assert "no checkpoint is left, but the groups trained up to step 3 are no longer kept" in refused(
        inputs, folder, capfd
    )


@pytest.mark.resume
def test_a_skipped_group_is_dropped(inputs, begin, folder):
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        (uid,) = db.execute("SELECT uid FROM groups WHERE step = 7").fetchall()[0]
    run = begin(inputs, folder, "trainer.total_steps=9", "--skip", uid)
    assert run.wait() == 0, run.text
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        assert db.execute("SELECT uid, reason FROM groups WHERE state = 'dropped'").fetchall() == [(uid, "skipped")]
    audit(folder, [2] * 9)


def test_a_group_that_cannot_be_skipped_is_refused(inputs, folder, capfd):
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db:
        (uid,) = db.execute("SELECT uid FROM groups WHERE step = 3").fetchall()[0]
    assert f"--skip: group {uid} is in the weights of the checkpoint" in refused(inputs, folder, capfd, "--skip", uid)
    assert "--skip: the run has no group e9-1" in refused(inputs, folder, capfd, "--skip", "e9-1")
    assert main(["--skip", uid, *overrides(inputs, folder, *OPTIONS)]) == 2
    assert "--skip: drops groups of a run that is resumed" in capfd.readouterr().err


def test_only_a_checkpoint_in_the_folder_of_a_run_can_be_resumed(inputs, folder, capfd, tmp_path):
    assert f"expected auto or the folder of a checkpoint, found {tmp_path}" in refused(
        inputs, folder, capfd, resume=tmp_path
    )
    copied = shutil.copytree(folder / "checkpoints/step_000006", tmp_path / "elsewhere/step_000006")
    assert f"{copied} is not in the folder of a run" in refused(inputs, folder, capfd, resume=copied)


def test_a_folder_in_use_by_a_live_run_is_refused(inputs, folder, capfd, monkeypatch):
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE_S", 0.5)
    fd = os.open(folder, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)  # as a run does
    try:
        assert f"{folder} is in use by another run" in refused(inputs, folder, capfd)
    finally:
        os.close(fd)


def test_a_folder_that_cannot_be_written_is_refused(inputs, folder, capfd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder / "ledger.sqlite")  # for root
    assert f"{folder / 'ledger.sqlite'} cannot be written" in refused(inputs, folder, capfd)


def test_a_journal_that_another_user_made_is_refused(inputs, folder, capfd, tmp_path, monkeypatch):
    config = Config(run_dir=str(tmp_path / "new"), journal_dir=str(tmp_path / "shared"))
    for run in (folder, tmp_path / "new"):
        run_folder.journal_folder(run.resolve(), config.journal_dir).mkdir(parents=True)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    message = f"belongs to user {user}, expected {user + 1}"
    assert message in refused(inputs, folder, capfd, f"journal_dir={config.journal_dir}")
    with pytest.raises(ConfigError, match=message):
        run_folder.RunFolder.create(config)


def test_a_journal_disk_that_the_run_does_not_use_is_refused(inputs, folder, capfd, tmp_path):
    message = f"{folder} has its journal in itself; resume without journal_dir"
    assert message in refused(inputs, folder, capfd, f"journal_dir={tmp_path / 'disk'}")


def refused(inputs: Path, folder: Path, capfd, *more: str, resume: str | Path = "auto") -> str:
    """Error output of a refused resume, which changes nothing in the folder."""
    before = contents(folder)
    options = overrides(inputs, folder, *OPTIONS, "trainer.total_steps=1000", *more)
    assert main(["--resume", str(resume), *options]) == 2
    output = capfd.readouterr().err
    assert all(line.startswith("config: ") for line in output.splitlines()), output
    assert contents(folder) == before
    return output


def damage(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0xFF
    file.write_bytes(content)


def contents(folder: Path) -> dict[str, str]:
    # SQLite's shared memory belongs to the processes that have the ledger open
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal"))]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
