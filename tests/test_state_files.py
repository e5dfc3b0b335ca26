"""Files of a training state: every tensor returns as written, and nothing in a stranger's checkpoint runs."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from asyncrl.config.schema import CheckpointConfig
from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.state_files import StateReader, StateWriter
from asyncrl.trainer.checkpoints import CheckpointMetadata, CheckpointStore
from asyncrl.types.versions import PolicyVersion
from tests.support.trainer import make_checkpoint, make_config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # a single process


class Attack:
    """Pickled data that creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self):
        return Path.touch, (self._marker,)


@pytest.fixture
def attack(tmp_path):
    """A pickle, and the file that exists once somebody has loaded it."""
    marker = tmp_path / "marker"
    malice = pickle.dumps(Attack(marker))
    pickle.loads(malice)
    assert marker.exists()
    marker.unlink()
    return malice, marker


def save(folder, state):
    dcp.save(state, storage_writer=StateWriter(folder), no_dist=True)


def load(folder, state):
    dcp.load(state, storage_reader=StateReader(folder), no_dist=True)
    return state


def test_tensors_of_every_kind_return_as_written(tmp_path):
    state = {
        "model": {"matrix": torch.arange(12.0).view(3, 4), "half": torch.randn(5).to(torch.bfloat16)},
        "view": torch.arange(12.0).view(3, 4).t()[1:],
        "empty": torch.zeros(0, 3),
        "number": torch.tensor(7),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    }
    save(tmp_path / "state", state)
    assert StateReader(tmp_path / "state").names == {
        *("model.matrix", "model.half", "view", "empty", "number", "bytes")
    }
    empty = {"model": {name: torch.zeros_like(t) for name, t in state["model"].items()}}
    empty |= {name: torch.zeros_like(state[name]) for name in ("view", "empty", "number", "bytes")}
    load(tmp_path / "state", empty)
    for name, tensor in state.pop("model").items():
        assert torch.equal(empty["model"][name], tensor)
    assert all(torch.equal(empty[name], tensor) for name, tensor in state.items())


def in_the_index_of_torch(folder, malice):
    (folder / "index.json").unlink()
    for name in (".metadata", "__0.metadata"):
        (folder / name).write_bytes(malice)


def in_the_index(folder, malice):
    (folder / "index.json").write_bytes(malice)


def in_the_tensors(folder, malice):
    (folder / "rank_0.bin").write_bytes(malice)


@pytest.mark.parametrize(
    ("hide", "message"),
    [
        (in_the_index_of_torch, r"state: no complete training state \(index.json, written last, is missing"),
        (in_the_index, r"index.json: expected dtype, shape and shards of each tensor; the file is damaged"),
        (in_the_tensors, r"rank_0.bin: expected \d+ bytes at \d+, found \d+"),
    ],
)
def test_code_in_a_checkpoint_never_runs(tmp_path, start_rank, attack, hide, message):
    """The attacker also makes the checksums match."""
    malice, marker = attack
    rank = start_rank(make_config(make_checkpoint(tmp_path / "model")))
    store = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig())
    partial = store.begin(1)
    rank.save(partial / "state")
    hide(partial / "state", malice)
    store.complete(partial, CheckpointMetadata(1, PolicyVersion(0, 1), 1, 1))

    whole = store.open(store.newest().path)
    with pytest.raises(CheckpointError, match=message) as refusal:
        rank.load(whole.path / "state")
    assert "\n" not in str(refusal.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda index: [],
        lambda index: {"w": None},
        lambda index: index["w"].pop("dtype"),
        lambda index: index["w"].update(dtype="load"),
        lambda index: index["w"].update(dtype="no_such_dtype"),
        lambda index: index["w"].update(shape=[8]),
        lambda index: index["w"].update(shape=[10**30, 4]),
        lambda index: index["w"].update(shards=[]),
        lambda index: index["w"]["shards"][0].update(offsets=[1, 0]),
        lambda index: index["w"]["shards"][0].update(offsets=[-1, 0]),
        lambda index: index["w"]["shards"][0].update(start=-1),
        lambda index: index["w"]["shards"][0].update(file="../rank_0.bin"),
        lambda index: index["w"]["shards"][0].update(file="/etc/passwd"),
        lambda index: index["w"]["shards"][0].update(file=None),
    ],
)
def test_a_damaged_index_is_refused(tmp_path, change):
    save(tmp_path, {"w": torch.zeros(3, 4)})
    index = json.loads((tmp_path / "index.json").read_text())
    changed = change(index)
    (tmp_path / "index.json").write_text(json.dumps(changed if isinstance(changed, (list, dict)) else index))
    with pytest.raises(CheckpointError, match=r"index.json: expected dtype, shape and shards of each tensor"):
        StateReader(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"w": ' + "9" * 5000 + "}"])
def test_an_index_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(CheckpointError, match="the file is damaged"):
        StateReader(tmp_path)


def test_a_rewrite_that_fails_leaves_nothing_that_looks_complete(tmp_path, start_rank):
    rank = start_rank(make_config(make_checkpoint(tmp_path / "model")))
    rank.save(tmp_path / "state")
    (tmp_path / "state" / "rank_0.bin").unlink()
    (tmp_path / "state" / "rank_0.bin").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        rank.save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="did not finish"):
        rank.load(tmp_path / "state")
