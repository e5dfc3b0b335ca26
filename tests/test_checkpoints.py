"""Checkpoints as folders: whole or not there whatever dies when, damage is named, the newest and the best are kept."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import sys

import pytest

from asyncrl.config.schema import CheckpointConfig
from asyncrl.models.config import CheckpointError
from asyncrl.sample import PolicyVersion
from asyncrl.trainer.checkpoints import PARTIAL, CheckpointStore, Cut


def cut_of(step, lineage=0, **metrics):
    return Cut(step, PolicyVersion(lineage, step // 2), 8 * step, 8 * step - 4, metrics)


def save(store, step, lineage=0, content=b"weights", **metrics):
    partial = store.begin(step)
    (partial / "state").mkdir()
    (partial / "state" / "shard").write_bytes(content)
    (partial / "state" / ".metadata").write_bytes(b"names")
    return store.complete(partial, cut_of(step, lineage, **metrics))


def store_in(tmp_path, **options):
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**{"keep_last": 0, **options}))


def steps(store):
    return [checkpoint.cut.step for checkpoint in store.all()]


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_comes_back_as_it_was_cut(tmp_path):
    store = store_in(tmp_path)
    assert (store.all(), store.newest()) == ([], None)
    written = [save(store, step, reward=step / 3) for step in (3, 12, 7)]
    assert steps(store) == [3, 7, 12]
    assert store.newest() == written[1] == store.open(store.folder / "step_000012")
    assert written[1].cut == cut_of(12, reward=4.0)
    assert isinstance(store.newest().cut.version, PolicyVersion)


def test_an_interrupted_save_is_never_chosen(tmp_path):
    store = store_in(tmp_path)
    save(store, 3)
    partial = store.begin(6)
    (partial / "shard").write_bytes(b"half")
    for whole in ("cut.json", "checksums.json"):  # even one that lacks nothing but its name
        shutil.copy(store.folder / "step_000003" / whole, partial)
    assert steps(store) == [3]
    with pytest.raises(CheckpointError, match=r"step_000006.partial.*interrupted.*step_000003"):
        store.open(partial)
    assert not any(store.begin(6).iterdir())  # what was in it is gone
    store.sweep()
    assert names(store) == ["step_000003"]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-2])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("state/shard", cut_short, r"state/shard is damaged: expected 7 bytes .* found 5 bytes"),
        ("state/shard", flip_a_bit, r"state/shard is damaged: expected .*xxh3_64 \w{16}, found .*xxh3_64 \w{16}"),
        ("state/shard", os.unlink, r"state/shard is missing, expected 7 bytes"),
        ("cut.json", lambda path: path.write_text(path.read_text().replace("24", "25")), r"cut.json is damaged"),
        ("cut.json", cut_short, r"cut.json is damaged"),
        ("cut.json", lambda path: path.write_text('{"step": 6}'), r"cut.json is damaged.*TypeError"),
        ("cut.json", os.unlink, r"no whole checkpoint there \(cut.json is missing\)"),
        ("checksums.json", cut_short, r"checksums.json is damaged"),
        ("checksums.json", lambda path: path.write_text("[]"), r"checksums.json is damaged"),
        ("checksums.json", os.unlink, r"no whole checkpoint there \(checksums.json is missing\)"),
    ],
)
def test_damage_is_named_with_what_else_there_is(tmp_path, file, damage, message):
    store = store_in(tmp_path)
    save(store, 3, other=24.0)
    path = save(store, 6, other=24.0).path
    store.open(path)
    damage(path / file)
    with pytest.raises(CheckpointError, match=message) as error:
        store.open(path)
    assert "restore it from a copy" in str(error.value)
    assert "\n" not in str(error.value)
    store.open(store.folder / "step_000003")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    store = store_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere: no whole checkpoint there.*there is none"):
        store.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"begin\(4\)"):
        store.complete(store.begin(3), cut_of(4))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1}, [6]),
        ({"keep_last": 3}, [4, 5, 6]),
        ({"keep_last": 9}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_best": 1}, [4, 6]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 2, "best_is": "lowest"}, [5, 6]),
        ({"keep_last": 1, "keep_best": 1, "best_metric": "never logged"}, [6]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, options, kept):
    """Equal best values at steps 2 and 4, none at step 1, one that is not finite at step 3."""
    store = store_in(tmp_path, **{"best_metric": "reward", **options})
    rewards = {2: 0.9, 3: math.nan, 4: 0.9, 5: 0.1, 6: 0.2}
    for step in range(1, 7):
        save(store, step, **({"reward": rewards[step]} if step in rewards else {}))
        assert store.newest().cut.step == step
    assert steps(store) == kept
    assert names(store) == [f"step_{step:06d}" for step in kept]


def test_a_step_that_is_saved_again_replaces_the_old_checkpoint(tmp_path):
    store = store_in(tmp_path, keep_last=2)
    save(store, 3)
    save(store, 6, content=b"old")
    again = save(store, 6, lineage=1, content=b"new")
    assert store.open(again.path).cut == cut_of(6, lineage=1)
    assert (again.path / "state" / "shard").read_bytes() == b"new"
    assert names(store) == ["step_000003", "step_000006"]


def test_a_run_that_went_back_is_newer_than_where_it_had_been(tmp_path):
    """Restored at step 3, the run saves step 6 again; the step 9 of the lineage that was left is not the newest."""
    store = store_in(tmp_path, keep_last=2)
    save(store, 6)
    save(store, 9)
    save(store, 6, lineage=1)
    assert [(c.cut.version.lineage, c.cut.step) for c in store.all()] == [(0, 9), (1, 6)]
    assert store.newest().cut.step == 6
    save(store, 7, lineage=1)
    assert steps(store) == [6, 7]


def test_final_is_a_link_that_moves_at_once_and_goes_with_its_checkpoint(tmp_path):
    store = store_in(tmp_path, keep_last=1)
    store.mark_final(save(store, 3))
    link = store.folder / "final"
    assert os.readlink(link) == "step_000003"
    assert store.open(link).path.name == "step_000003"
    save(store, 6)
    assert names(store) == ["step_000006"]  # no link to nowhere is left
    for _ in range(2):
        store.mark_final(store.newest())
        assert os.readlink(link) == "step_000006"
    assert steps(store) == [6]


# -- kill -9 between any two changes of the file system ---------------------------------------------------------------

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree"}


def die_at(change, work):
    """Runs ``work`` in a process that kills itself just before the ``change``-th change (or reading) of a file."""
    made = 0

    def count(event, args):
        nonlocal made
        if event in CHANGES:
            made += 1
            if made > change:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    work()
    os._exit(0)


@pytest.mark.parametrize("step", [6, 9], ids=["same step again", "next step"])
def test_killed_anywhere_the_newest_checkpoint_is_whole(tmp_path, step):
    """Keeping one: every save also deletes. Whatever is found then is what was before or what was being saved."""
    seen = set()
    for change in range(1000):
        store = store_in(tmp_path / f"{change}", keep_last=1)
        store.mark_final(save(store, 6, content=b"old"))

        def work(store=store):
            store.mark_final(save(store, step, lineage=1, content=b"new"))

        process = multiprocessing.get_context("fork").Process(target=die_at, args=(change, work))
        process.start()
        process.join()
        listed = [store.open(found.path) for found in store.all()]  # none is half there
        seen.add((listed[-1].path / "state" / "shard").read_bytes() if listed else "replacing")
        store.sweep()
        found = store.open(store.newest().path)
        content = (found.path / "state" / "shard").read_bytes()
        assert (found.cut.step, content) in ((6, b"old"), (step, b"new"))
        assert not [name for name in names(store) if "." in name]
        if (link := store.folder / "final").is_symlink():
            store.open(link)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert change > 15
    assert steps(store) == [step]
    assert os.readlink(link) == f"step_{step:06d}"
    # where a checkpoint is replaced by one of its step there is a moment with neither, which sweep mends
    assert seen == {b"old", b"new", *(["replacing"] if step == 6 else [])}


def test_checksums_are_read_by_people_too(tmp_path):
    path = save(store_in(tmp_path), 3).path
    listed = json.loads((path / "checksums.json").read_text())["files"]
    assert sorted(listed) == ["cut.json", "state/.metadata", "state/shard"]
    assert listed["state/shard"]["bytes"] == 7
    assert path.suffix != PARTIAL
