"""Model families that transformers builds, scored and trained as it computes them with eager attention."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.models.checkpoint import read_tensors
from tests.support.families import FAMILIES, difference, model_of, plain_logprobs, sequences, without, write
from tests.support.trainer import make_config, make_groups, plain_loss, started_ranks

GRADIENT = 5e-5  # of a gradient's elements, over the largest

start_rank = pytest.fixture(started_ranks)


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_logprobs_equal_those_of_each_sequence_alone(family):
    assert difference(family)[1] <= family.exact


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.without])
def test_what_a_family_is_here_for_matters(name):
    tokens = sequences(1)[0]
    changed = plain_logprobs(without(FAMILIES[name]), tokens) - plain_logprobs(model_of(FAMILIES[name]), tokens)
    assert changed.abs().max() > 100 * FAMILIES[name].exact


def test_a_training_step_has_the_plain_gradient_and_exports_the_files_names(family, tmp_path, start_rank):
    reference = write(family, tmp_path / "model")
    reference.get_input_embeddings().padding_idx = None  # the token is one of the batch's
    config = make_config(str(tmp_path / "model"), grad_clip=0.0, anchor="proximal", implementation="transformers")
    rank, groups = start_rank(config), make_groups()
    files = read_tensors(tmp_path / "model")
    assert {name: t.shape for name, t in rank.export()} == {name: t.shape for name, t in files.items()}
    assert all(torch.equal(tensor, files[name]) for name, tensor in rank.export())

    rank.train(0, groups)

    def logprobs_of(prompt, response):
        return plain_logprobs(reference, torch.cat([prompt, response]))[-len(response) :]

    plain_loss(groups, logprobs_of).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in expected.values())
    moments = rank._backend.state()["optimizer"]["exp_avg"]
    for name, gradient in expected.items():  # AdamW's first moment after a step is a tenth of the gradient
        assert (10 * moments[name].full_tensor() - gradient).abs().max() <= GRADIENT * largest, name

    rank.export_hf(tmp_path / "out")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    tokens = sequences(1)[0]
    with torch.no_grad():
        assert not torch.equal(plain_logprobs(written, tokens), plain_logprobs(reference, tokens))
    sent = dict(rank.export())
    assert all(torch.equal(tensor, sent[name]) for name, tensor in read_tensors(tmp_path / "out").items())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "model" / "config.json").read_text())
