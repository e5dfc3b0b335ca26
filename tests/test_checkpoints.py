"""Checkpoint folders: saves are atomic, damage is reported, the newest and best are kept."""

import asyncio
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys

import pytest

from asyncrl.config.checks import derive
from asyncrl.config.schema import CheckpointConfig, Config
from asyncrl.models.config import CheckpointError
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.sample_queue.group_state import QueueError
from asyncrl.sample_queue.messages import Lease, LeasedGroup
from asyncrl.trainer.checkpoints import PARTIAL, CheckpointMetadata, CheckpointStore
from asyncrl.trainer.loop import NoNewStep, TrainLoop
from asyncrl.trainer.progress import Progress
from asyncrl.trainer.validation import ValidationSchedule
from asyncrl.types.versions import PolicyVersion


def metadata_of(step, lineage=0):
    return CheckpointMetadata(step, PolicyVersion(lineage, step // 2), 8 * step, 8 * step - 4)


def save(store, step, lineage=0, content=b"weights", **metrics):
    partial = store.begin(step)
    (partial / "state").mkdir()
    (partial / "state" / "shard").write_bytes(content)
    (partial / "state" / "index.json").write_bytes(b"names")
    store.rate((lineage, step), metrics)
    return store.complete(partial, metadata_of(step, lineage))


def save_unrated(store, step, lineage=0):
    return store.complete(store.begin(step), metadata_of(step, lineage))


def store_in(tmp_path, **options):
    return CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(**{"keep_last": 0, **options}))


def steps(store):
    return [checkpoint.metadata.step for checkpoint in store.all()]


class Run:
    """Fake ranks, sync, queue, rollouter and observer. The policy is its step's number; validating it gives
    ``rewards[step]``."""

    def __init__(self, config, rewards):
        self.rewards, self.step, self.served, self.seq, self.lineage = rewards, 0, None, 0, 0
        self.config, self.died, self.poison, self.final_step = config, False, None, None

    # ranks
    async def train(self, step, payload, mask_before, version, part, parts):
        if step == self.poison or (step == 4 and not self.died):
            self.died = True
            raise RuntimeError("a rank died")
        self.step = step
        return {}, []

    async def stage(self):
        self.staged = self.step

    async def write(self, path):
        path.mkdir()
        (path / "step").write_text(str(self.staged))

    async def load(self, path):
        self.step = int((path / "step").read_text())

    async def lost(self, error):
        return "a rank died" if str(error) == "a rank died" else None

    async def restart(self, why):
        self.step = 0

    # sync
    async def __call__(self, version, on_sent):
        self.served = (version, self.step)
        return {}

    async def someone_to_join(self):
        await asyncio.Event().wait()

    def stranded(self):
        return False

    # queue
    async def lease(self, step, count, having=()):
        await asyncio.sleep(0.01)
        return Lease((LeasedGroup("g", self.served[0], 0.0, 0.0),)), None

    async def trained(self, step): ...
    async def release(self, step): ...

    async def covered(self, step):
        self.final_step = step

    async def announce(self, version): ...
    async def publish(self, version, trained=None, rolling=False, starved_s=0.0): ...

    async def rollback(self, step, total_groups):
        self.lineage += 1
        return PolicyVersion(self.lineage - 2, 0) if self.lineage > 1 else None

    async def finish(self):
        return {}

    # observer
    async def on_version(self, progress): ...
    async def on_end(self, progress, queue): ...

    async def on_step(self, progress, metrics):
        return metrics

    # rollouter
    async def reset(self): ...

    async def set_validation_first(self, first): ...

    async def validate(self):
        version, step = self.served
        await asyncio.sleep(0.1)
        assert self.served == (version, step), "a validation is of one version"
        return {"validation/reward": self.rewards[step], **served_version(version)}


def served_version(version):
    return {"validation/lineage": version.lineage, "validation/version": version.number}


async def test_each_checkpoint_is_rated_by_the_validation_of_its_own_weights(tmp_path):
    """Validation runs during training, so it ends after the checkpoint of its weights was taken; the last validation
    follows the final checkpoint. A rank dies before step 4, so earlier validations belong to an abandoned lineage."""
    rewards = {0: 1.0, 1: 0.2, 2: 0.9, 3: 0.4, 4: 0.3, 5: 0.1}
    config = Config()
    config.trainer.total_steps, config.trainer.mini_batch_groups = 5, 1
    config.validation.every_versions = 1
    config.data.validation_files = ["some"]
    config.checkpoint = CheckpointConfig(every_steps=1, keep_last=1, keep_best=1, export_hf="none")
    results: list[tuple] = []
    run, store = Run(config, rewards), CheckpointStore(tmp_path / "checkpoints", config.checkpoint)
    recorder = Recorder("driver")
    validation = ValidationSchedule(config, run, store, recorder, lambda *result: results.append(result))
    loop = TrainLoop(config, derive(config), run, run, run, run, validation, run, recorder, store)
    await loop.begin(None)
    progress = await asyncio.wait_for(loop.run(), 60)
    assert (progress.step, progress.version.lineage) == (5, 1)
    assert [(c.metadata.step, c.rating) for c in store.all()] == [
        (step, {"validation/reward": rewards[step]}) for step in (2, 5)
    ]
    assert [(progress.step, when) for progress, _, when in results if when] == [(0, "before"), (5, "after")]


async def test_a_checkpoint_that_could_not_be_read_is_never_restored_later(tmp_path, monkeypatch):
    """Its weights are of groups that have been trained again since."""
    config = Config()
    config.trainer.total_steps, config.trainer.mini_batch_groups = 5, 1
    config.checkpoint = CheckpointConfig(every_steps=1, keep_last=0, export_hf="none")
    run, store = Run(config, {}), CheckpointStore(tmp_path / "checkpoints", config.checkpoint)
    restored: list[int] = []
    opened, load = store.open, run.load

    def open_(path):
        if path.name == "step_000003" and not restored:
            raise CheckpointError("the network disk did not answer")
        return opened(path)

    async def load_(path):
        restored.append(int(path.parent.name.removeprefix("step_")))
        await load(path)

    monkeypatch.setattr(store, "open", open_)
    monkeypatch.setattr(run, "load", load_)
    validation = ValidationSchedule(config, run, store, Recorder("driver"), lambda *result: None)
    loop = TrainLoop(config, derive(config), run, run, run, run, validation, run, Recorder("driver"), store)
    await loop.begin(None)
    await asyncio.wait_for(loop.run(), 60)
    assert restored == [2]
    assert [c.taken for c in store.all()] == [(0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert len(list(store.folder.glob("abandoned_step_000003_*"))) == 1


async def test_a_run_that_cannot_go_back_so_far_leaves_its_checkpoints_for_a_resume(tmp_path, monkeypatch):
    config = Config()
    config.trainer.total_steps, config.trainer.mini_batch_groups = 5, 1
    config.checkpoint = CheckpointConfig(every_steps=1, keep_last=0, export_hf="none")
    run, store = Run(config, {}), CheckpointStore(tmp_path / "checkpoints", config.checkpoint)

    def unreadable(path):
        raise CheckpointError("the network disk does not answer")

    async def refuses(step, total_groups):
        if run.died:
            raise QueueError(f"cannot go back to step {step}")

    monkeypatch.setattr(store, "open", unreadable)
    monkeypatch.setattr(run, "rollback", refuses)
    validation = ValidationSchedule(config, run, store, Recorder("driver"), lambda *result: None)
    loop = TrainLoop(config, derive(config), run, run, run, run, validation, run, Recorder("driver"), store)
    await loop.begin(None)
    with pytest.raises(QueueError, match="cannot go back to step 0"):
        await asyncio.wait_for(loop.run(), 60)
    assert [c.metadata.step for c in store.all()] == [1, 2, 3]


def test_what_a_run_does_not_go_on_from_is_set_aside(tmp_path):
    store = CheckpointStore(tmp_path, CheckpointConfig(keep_last=0), counts=lambda found: found.metadata.step != 1)
    for lineage, step in ((0, 1), (0, 2), (0, 3), (1, 3), (1, 4)):
        store.complete(store.begin(step), CheckpointMetadata(step, PolicyVersion(lineage, step), step, step))
    store.mark_final(store.newest())
    (tmp_path / "step_000004/metadata.json").write_text("{")
    store.abandon_after(store.newest_intact())
    assert not (tmp_path / "final").is_symlink()  # it would dangle, or point to the next checkpoint of that step
    assert [c.taken for c in store.all()] == [(0, 2), (1, 3)]
    aside = sorted(path.name.rpartition("_")[0] for path in tmp_path.glob("abandoned_*"))
    assert aside == ["abandoned_step_000001", "abandoned_step_000004"]
    store.abandon_after(None)
    assert store.all() == []


async def test_a_run_that_ended_and_goes_on_has_the_versions_of_one_that_never_ended(tmp_path):
    """First it is stopped: then it can go back to two checkpoints. Groups of one that has finished are all final."""
    config = Config()
    config.trainer.mini_batch_groups = 1
    config.checkpoint = CheckpointConfig(every_steps=1, export_hf="none")
    run, store = Run(config, {}), CheckpointStore(tmp_path / "checkpoints", config.checkpoint)
    run.died = True

    async def on_step(progress, metrics):
        if progress.step == 2:
            loop.stop("enough")
        return metrics

    run.on_step = on_step
    for total, number in ((2, 1), (3, 3), (5, 5)):  # no version begins after a stop
        config.trainer.total_steps = max(total, 3)
        validation = ValidationSchedule(config, run, store, Recorder("driver"), lambda *result: None)
        loop = TrainLoop(config, derive(config), run, run, run, run, validation, run, Recorder("driver"), store)
        await loop.begin(store.newest_intact())
        progress = await asyncio.wait_for(loop.run(), 60)
        assert (progress.step, progress.version.number) == (total, number)
        assert run.final_step == (1 if total == 2 else total)


async def test_ranks_that_die_again_and_again_in_one_step_end_the_run_with_its_groups(tmp_path):
    """However far apart their deaths are. A new step in between starts the count again."""
    config = Config()
    config.trainer.total_steps, config.trainer.mini_batch_groups = 9, 1
    config.supervision.max_restarts = 2
    config.checkpoint = CheckpointConfig(every_steps=1, export_hf="none")
    run, store = Run(config, {}), CheckpointStore(tmp_path / "checkpoints", config.checkpoint)
    run.poison = 6
    validation = ValidationSchedule(config, run, store, Recorder("driver"), lambda *result: None)
    loop = TrainLoop(config, derive(config), run, run, run, run, validation, run, Recorder("driver"), store)
    await loop.begin(None)
    count = r"death 3 without a new step, in step 6 \(supervision\.max_restarts is 2\)"
    with pytest.raises(NoNewStep, match=rf"{count}; .* groups g: .*--skip UID"):
        await asyncio.wait_for(loop.run(), 60)


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_a_checkpoint_is_read_back_as_written(tmp_path):
    store = store_in(tmp_path, best_metric="reward")
    assert (store.all(), store.newest()) == ([], None)
    written = [save(store, step, reward=step / 3) for step in (3, 12, 7)]
    assert steps(store) == [3, 7, 12]
    assert store.newest() == written[1] == store.open(store.folder / "step_000012")
    assert (written[1].metadata, written[1].rating) == (metadata_of(12), {"reward": 4.0})
    assert isinstance(store.newest().metadata.version, PolicyVersion)


def test_an_interrupted_save_is_never_chosen(tmp_path):
    store = store_in(tmp_path)
    save(store, 3)
    partial = store.begin(6)
    (partial / "shard").write_bytes(b"half")
    for whole in ("metadata.json", "checksums.json"):  # even one that is complete except for its name
        shutil.copy(store.folder / "step_000003" / whole, partial)
    assert steps(store) == [3]
    with pytest.raises(CheckpointError, match=r"step_000006.0.partial.*interrupted.*step_000003"):
        store.open(partial)
    assert not any(store.begin(6).iterdir())  # its old contents are deleted
    store.sweep()
    assert names(store) == ["step_000003"]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-2])


def on_a_bad_disk(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")  # each read of it is an I/O error


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
        ("state/shard", on_a_bad_disk, r"state/shard cannot be read \(Input/output error\)"),
        (
            "metadata.json",
            lambda path: path.write_text(path.read_text().replace("48", "49")),
            r"metadata.json is damaged",
        ),
        ("metadata.json", cut_short, r"metadata.json is damaged"),
        ("metadata.json", on_a_bad_disk, r"metadata.json is damaged \(OSError: .*Input/output error"),
        ("metadata.json", lambda path: path.write_text('{"step": 6}'), r"metadata.json is damaged.*TypeError"),
        ("metadata.json", os.unlink, r"no whole checkpoint there \(metadata.json is missing\)"),
        ("checksums.json", cut_short, r"checksums.json is damaged"),
        ("checksums.json", lambda path: path.write_text("[]"), r"checksums.json is damaged"),
        ("checksums.json", os.unlink, r"no whole checkpoint there \(checksums.json is missing\)"),
    ],
)
def test_damage_is_reported_with_the_other_checkpoints(tmp_path, file, damage, message):
    store = store_in(tmp_path)
    save(store, 3)
    path = save(store, 6).path
    store.open(path)
    damage(path / file)
    with pytest.raises(CheckpointError, match=message) as error:
        store.open(path)
    assert "restore it from a copy" in str(error.value)
    assert "\n" not in str(error.value)
    store.open(store.folder / "step_000003")


def test_other_folders_are_refused(tmp_path):
    store = store_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere: no whole checkpoint there.*there is none"):
        store.open(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"begin\(4\)"):
        store.complete(store.begin(3), metadata_of(4))


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
    """Equal best values at steps 2 and 4, none at step 1, a non-finite one at step 3."""
    store = store_in(tmp_path, **{"best_metric": "reward", **options})
    rewards = {2: 0.9, 3: math.nan, 4: 0.9, 5: 0.1, 6: 0.2}
    for step in range(1, 7):
        save(store, step, **({"reward": rewards[step]} if step in rewards else {}))
        assert store.newest().metadata.step == step
    assert steps(store) == kept
    assert names(store) == [f"step_{step:06d}" for step in kept]


def test_a_checkpoint_is_kept_until_its_weights_are_rated(tmp_path):
    store = store_in(tmp_path, keep_last=1, keep_best=1, best_metric="reward")
    for step in (1, 2, 3):
        store.await_rating((0, step))
        save_unrated(store, step)
    assert steps(store) == [1, 2, 3], "any may still be the best"
    store.rate((0, 1), {"reward": 0.5})
    store.rate((0, 2), {"reward": 0.9})
    assert steps(store) == [2, 3]
    store.rate((0, 3), {"reward": 0.1, "other": 7.0})
    assert [(c.metadata.step, c.rating) for c in store.all()] == [(2, {"reward": 0.9}), (3, {"reward": 0.1})]
    store.rate((1, 3), {"reward": 0.95})  # rates step 3 of another lineage, which was not saved
    save_unrated(store, 4, lineage=1)
    assert [(c.metadata.step, c.rating) for c in store.all()] == [(2, {"reward": 0.9}), (4, {})]
    assert store.open(store.newest().path) == store.newest()


async def test_a_checkpoint_is_not_rated_by_a_validation_that_was_repeated_under_another_version(tmp_path):
    store = store_in(tmp_path, keep_last=1, keep_best=1, best_metric="reward")
    config = Config()
    config.data.validation_files, config.validation.every_versions = ["some"], 1

    class Rollouter:
        served = PolicyVersion(0, 1)

        async def validate(self):
            return {"reward": 0.9, **served_version(self.served)}

    schedule = ValidationSchedule(config, Rollouter(), store, Recorder("driver"), lambda *result: None)
    await schedule.validate(Progress(0, PolicyVersion(0, 0), 0, 0))
    for step in (1, 2):
        await schedule.validate(Progress(step, PolicyVersion(0, step), step, step))
        save_unrated(store, step)
        await schedule._concurrent
    assert [(c.metadata.step, c.rating) for c in store.all()] == [(1, {"reward": 0.9}), (2, {})]


def test_a_damaged_rating_costs_the_rating_and_not_the_checkpoint(tmp_path):
    store = store_in(tmp_path, best_metric="reward")
    save(store, 1, reward=0.5)
    (store.newest().path / "rating.json").write_text("")
    assert store.open(store.newest().path).rating == {}


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    store = store_in(tmp_path, keep_last=2)
    save(store, 3)
    save(store, 6, content=b"old")
    again = save(store, 6, lineage=1, content=b"new")
    assert store.open(again.path).metadata == metadata_of(6, lineage=1)
    assert (again.path / "state" / "shard").read_bytes() == b"new"
    assert names(store) == ["step_000003", "step_000006"]


def test_a_rolled_back_run_is_newer_than_its_old_lineage(tmp_path):
    """Restored at step 3, the run saves step 6 again; step 9 of the abandoned lineage is not the newest."""
    store = store_in(tmp_path, keep_last=2)
    save(store, 6)
    save(store, 9)
    save(store, 6, lineage=1)
    assert [(c.metadata.version.lineage, c.metadata.step) for c in store.all()] == [(0, 9), (1, 6)]
    assert store.newest().metadata.step == 6
    save(store, 7, lineage=1)
    assert steps(store) == [6, 7]


def test_final_is_a_link_that_moves_atomically_and_disappears_with_its_checkpoint(tmp_path):
    store = store_in(tmp_path, keep_last=1)
    store.mark_final(save(store, 3))
    link = store.folder / "final"
    assert os.readlink(link) == "step_000003"
    assert store.open(link).path.name == "step_000003"
    save(store, 6)
    assert names(store) == ["step_000006"]  # no dangling link
    for _ in range(2):
        store.mark_final(store.newest())
        assert os.readlink(link) == "step_000006"
    assert steps(store) == [6]


# -- SIGKILL between any two file system changes ----------------------------------------------------------------------

CHANGES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.symlink", "shutil.rmtree"}


def die_at(change, work):
    """Run ``work``; kill this process just after ``change`` file system operations (opening to read counts too)."""
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
def test_after_a_kill_at_any_point_the_newest_checkpoint_is_complete(tmp_path, step):
    """With keep_last=1 every save also deletes. The newest checkpoint is either the old or the new one."""
    seen = set()
    for change in range(1000):
        store = store_in(tmp_path / f"{change}", keep_last=1)
        store.mark_final(save(store, 6, content=b"old"))

        def work(store=store):
            store.mark_final(save(store, step, lineage=1, content=b"new"))

        process = multiprocessing.get_context("fork").Process(target=die_at, args=(change, work))
        process.start()
        process.join()
        listed = [store.open(found.path) for found in store.all()]  # none is incomplete
        seen.add((listed[-1].path / "state" / "shard").read_bytes() if listed else "replacing")
        store.sweep()
        found = store.open(store.newest().path)
        content = (found.path / "state" / "shard").read_bytes()
        assert (found.metadata.step, content) in ((6, b"old"), (step, b"new"))
        assert not [name for name in names(store) if "." in name]
        if (link := store.folder / "final").is_symlink():
            store.open(link)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert change > 15
    assert steps(store) == [step]
    assert os.readlink(link) == f"step_{step:06d}"
    # while a checkpoint is replaced by another of the same step, neither is listed; sweep repairs that
    assert seen == {b"old", b"new", *(["replacing"] if step == 6 else [])}


def test_checksums_are_human_readable(tmp_path):
    path = save(store_in(tmp_path), 3).path
    listed = json.loads((path / "checksums.json").read_text())["files"]
    assert sorted(listed) == ["metadata.json", "state/index.json", "state/shard"]
    assert listed["state/shard"]["bytes"] == 7
    assert path.suffix != PARTIAL
