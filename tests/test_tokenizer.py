"""Stop tokens: every token that may end a turn of the checkpoint, the same for all engines."""

import json
import shutil

import pytest

from asyncrl.models.config import CheckpointError
from asyncrl.rollouter.tokenizer import PromptTokenizer


@pytest.fixture
def checkpoint(inputs, tmp_path):
    return shutil.copytree(inputs / "checkpoint", tmp_path / "checkpoint")


def generation_config(checkpoint, eos) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))


def test_a_response_ends_at_the_eos_of_tokenizer_and_generation_config(checkpoint):
    own = PromptTokenizer(checkpoint).hf.eos_token_id
    generation_config(checkpoint, [own, 7, 5])
    assert PromptTokenizer(checkpoint).stop_token_ids == tuple(sorted({own, 5, 7}))
    generation_config(checkpoint, 9)
    assert PromptTokenizer(checkpoint).stop_token_ids == tuple(sorted({own, 9}))
    assert PromptTokenizer(checkpoint, more_stop_token_ids=[11]).stop_token_ids == tuple(sorted({own, 9, 11}))


def test_config_json_gives_the_eos_if_generation_config_does_not(checkpoint):
    own = PromptTokenizer(checkpoint).hf.eos_token_id
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"eos_token_id": 6}))
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    assert PromptTokenizer(checkpoint).stop_token_ids == tuple(sorted({own, 6}))


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_stop_token_that_the_model_does_not_have_is_refused(checkpoint, token):
    with pytest.raises(CheckpointError, match=f"stop token {token} is not one of the model's"):
        PromptTokenizer(checkpoint, more_stop_token_ids=[token])
