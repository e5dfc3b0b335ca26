"""model.overrides: a changed config.json with the same weights."""

import json

import pytest

from asyncrl.models.checkpoint import check_checkpoint, read_tensors
from asyncrl.models.config import CheckpointError
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.models.overridden import overridden


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), warm_start_steps=0)


def test_only_the_config_differs(checkpoint, tmp_path):
    before = (checkpoint / "config.json").read_text()
    made = overridden(checkpoint, {"max_position_embeddings": 77, "rope_theta": 5e5}, tmp_path / "model")
    assert overridden(checkpoint, {"max_position_embeddings": 78}, tmp_path / "model") == made
    assert check_checkpoint(made).max_position_embeddings == 78
    assert (checkpoint / "config.json").read_text() == before
    assert read_tensors(made).keys() == read_tensors(checkpoint).keys()
    assert (made / "model.safetensors").is_symlink()


def test_a_nested_key_is_set_in_place(tmp_path):
    (tmp_path / "source").mkdir()
    config = {"text_config": {"hidden_size": 4}, "dtype": "float32"}
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    made = overridden(tmp_path / "source", {"hidden_size": 8, "dtype": "bfloat16"}, tmp_path / "model")
    assert json.loads((made / "config.json").read_text()) == {"text_config": {"hidden_size": 8}, "dtype": "bfloat16"}


def test_a_misspelt_key_is_refused(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.overrides\.max_positon_embeddings"):
        overridden(checkpoint, {"max_positon_embeddings": 8}, tmp_path / "model")
