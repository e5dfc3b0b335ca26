"""Stop tokens: every token that may end a turn of the checkpoint, the same for all engines. Code in it is not run.

A run loads a tokenizer once and passes it to other processes."""

import io
import json
import pickle
import shutil
import subprocess
import sys

import pytest

from asyncrl.models.config import CheckpointError
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt


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


@pytest.mark.parametrize("text", ['{"eos_token_id": 5', "[5]", '{"eos_token_id": ["end"]}'])
def test_a_malformed_generation_config_is_refused_by_its_name(checkpoint, text):
    (checkpoint / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config.json: expected a JSON object, and in it a token or"):
        PromptTokenizer(checkpoint)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_stop_token_that_the_model_does_not_have_is_refused(checkpoint, token):
    with pytest.raises(CheckpointError, match=f"stop token {token} is not one of the model's"):
        PromptTokenizer(checkpoint, more_stop_token_ids=[token])


def test_code_in_a_checkpoint_is_never_run(checkpoint, tmp_path, monkeypatch):
    marker = tmp_path / "marker"
    (checkpoint / "malice.py").write_text(f"open({str(marker)!r}, 'w')\nclass Malice: pass\n")
    for file, more in {
        "config.json": {"model_type": "unknown", "auto_map": {"AutoConfig": "malice.Malice"}},
        "tokenizer_config.json": {"tokenizer_class": "Malice", "auto_map": {"AutoTokenizer": ["malice.Malice", None]}},
    }.items():
        before = json.loads((checkpoint / file).read_text())
        (checkpoint / file).write_text(json.dumps(before | more))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))  # transformers asks; this user agrees
    with pytest.raises(CheckpointError, match="the tokenizer does not load"):
        PromptTokenizer(checkpoint)
    assert not marker.exists()


PASSED_ON = """
import pickle, sys
import asyncrl.rollouter.actors, asyncrl.rollouter.answering, asyncrl.rollouter.endpoint.host, asyncrl.rollouter.loop
tokenizer, prompt, ids = pickle.load(sys.stdin.buffer)
assert tokenizer.encode(prompt).tolist() == ids
assert "1+2" in tokenizer.decode_batch([tokenizer.encode(prompt)])[0]
print(tokenizer.stop_token_ids, "torch" in sys.modules)
"""


def test_a_rollouter_that_gets_the_tokenizer_needs_no_torch(checkpoint):
    """Which would take two seconds and 200 MB."""
    tokenizer = PromptTokenizer(checkpoint, more_stop_token_ids=[7])
    prompt = Prompt("0/0", "p", ({"role": "user", "content": "Compute 1+2"},), "3")
    sent = pickle.dumps((tokenizer, prompt, tokenizer.encode(prompt).tolist()))
    shutil.rmtree(checkpoint)
    answer = subprocess.run([sys.executable, "-c", PASSED_ON], input=sent, capture_output=True, timeout=120)
    assert answer.stdout.decode().strip() == f"{tokenizer.stop_token_ids} False", answer.stderr


def test_a_tokenizer_of_the_checkpoint_s_own_code_is_loaded_again_elsewhere(checkpoint):
    (checkpoint / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast): pass\n"
    )
    file = checkpoint / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | own))
    tokenizer = PromptTokenizer(checkpoint, trust_remote_code=True)
    assert type(tokenizer.hf).__name__ == "Own"
    script = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer).hf).__name__)"
    answer = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(tokenizer), capture_output=True, timeout=120
    )
    assert answer.stdout.decode().strip() == "Own", answer.stderr
