"""model.overrides: a changed config.json with the same weights."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from asyncrl.models.checkpoint import check_checkpoint, read_tensors
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import rope_inverse_frequencies
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.models.overridden import overridden


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), warm_start_steps=0)


def test_only_the_config_differs(checkpoint, tmp_path):
    before = (checkpoint / "config.json").read_text()
    made = overridden(checkpoint, {"max_position_embeddings": 77, "rope_theta": 5e5}, tmp_path / "model")
    assert overridden(checkpoint, {"max_position_embeddings": 78}, tmp_path / "model") == made
    assert overridden(made, {"max_position_embeddings": 78}, made) == made
    assert check_checkpoint(made).max_position_embeddings == 78
    assert (checkpoint / "config.json").read_text() == before
    assert read_tensors(made).keys() == read_tensors(checkpoint).keys()
    assert (made / "model.safetensors").is_symlink()


def changed(folder, config, overrides):
    """Path of the overridden config.json."""
    (folder / "source").mkdir()
    (folder / "source" / "config.json").write_text(json.dumps(config))
    return overridden(folder / "source", overrides, folder / "model") / "config.json"


def test_a_nested_key_is_set_in_place_and_a_new_one_is_nested(tmp_path):
    config = {"text_config": {"hidden_size": 4}, "dtype": "float32"}
    made = changed(tmp_path, config, {"hidden_size": 8, "dtype": "bfloat16", "head_dim": 2})
    assert json.loads(made.read_text()) == {"text_config": {"hidden_size": 8, "head_dim": 2}, "dtype": "bfloat16"}


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 1e6, "rope_scaling": LLAMA3},
        {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ],
    ids=["transformers-4", "transformers-5", "both"],
)
@pytest.mark.parametrize(
    ("overrides", "theta", "factor"),
    [
        ({}, 1e6, 8.0),
        ({"rope_theta": 5e5}, 5e5, 8.0),
        ({"rope_scaling": LINEAR}, 1e6, 2.0),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}, 5e5, 4.0),
        ({"rope_scaling": None}, 1e6, None),
        ({"rope_theta": 5e5, "rope_parameters": LINEAR}, 5e5, 2.0),
        ({"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, 5e5, 2.0),
    ],
)
def test_decoder_and_transformers_read_the_same_rope(tmp_path, written, overrides, theta, factor):
    made = changed(tmp_path, LLAMA | written, overrides).parent
    ours = DecoderConfig.load(made)
    assert (ours.rope_theta, (ours.rope_scaling or {}).get("factor")) == (theta, factor)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(made)).inv_freq
    torch.testing.assert_close(rope_inverse_frequencies(ours), theirs)


def test_old_rope_keys_merge_into_a_nested_rope_parameters(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    overrides = {"rope_scaling": LINEAR, "rope_theta": 5e5}
    made = changed(tmp_path, {"text_config": {"rope_parameters": rope}}, overrides)
    assert json.loads(made.read_text()) == {"text_config": {"rope_parameters": {**rope, **LINEAR, "rope_theta": 5e5}}}


@pytest.mark.parametrize("overrides", [{"rope_theta": 5e5}, {"rope_scaling": LINEAR}])
def test_old_rope_keys_are_refused_where_layer_types_differ(tmp_path, overrides):
    """Gemma 3's: an old key could mean either type's."""
    rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    (key,) = overrides
    with pytest.raises(CheckpointError, match=rf"overrides\.{key}: rope_parameters differ .*full_attention, sliding"):
        changed(tmp_path, {"rope_parameters": rope}, overrides)


def test_a_rope_that_is_no_mapping_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"rope_scaling is 'linear', expected a mapping"):
        changed(tmp_path, {"rope_parameters": LINEAR}, {"rope_scaling": "linear"})


def test_a_misspelt_key_is_refused(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.overrides\.max_positon_embeddings"):
        overridden(checkpoint, {"max_positon_embeddings": 8}, tmp_path / "model")
