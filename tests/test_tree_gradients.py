"""Training on trees of sequences is training on their tokens: each sampled token once, in its own context."""

import numpy as np
import pytest
import torch
from torch import multiprocessing as mp

from asyncrl.models.checkpoint import load_decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.types.groups import Group
from tests.support.trainer import make_config
from tests.support.trees import (
    LINEAR,
    OF_SEQUENCES,
    OF_TOKENS,
    gradient,
    largest_difference,
    make_trees,
    save_gradient,
    written_out,
)


def test_the_gradient_of_trees_equals_the_plain_formula(checkpoint, start_rank):
    config = make_config(checkpoint, anchor="proximal", **LINEAR)
    found = gradient(start_rank(config), make_trees())
    model = load_decoder(checkpoint)
    total, trained = torch.zeros(()), 0
    for group in map(Group.from_buffer, make_trees()):
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for q, s in enumerate(group.sequence_sample):
            response, prefix = torch.tensor(group.tokens[group.response(q)]).long(), int(group.prefix[q])
            tokens = torch.cat([torch.tensor(group.prompt_tokens[:prefix]).long(), response])
            logprobs = torch.log_softmax(model.logits(tokens, PackedLayout.from_lengths(np.array([len(tokens)]))), -1)
            for r in np.flatnonzero(group.loss_mask[group.response(q)]):
                total = total - advantages[s] * logprobs[prefix + r - 1, response[r]]
                trained += 1
    (total / trained).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference({name: found[name] for name in expected}, expected) < 1e-5


@pytest.mark.parametrize(
    "options",
    [pytest.param(OF_TOKENS, id="tokens"), pytest.param(OF_SEQUENCES, id="sequences", marks=pytest.mark.slow)],
)
def test_training_on_trees_equals_training_on_their_tokens_written_out_at_every_cut(
    options, checkpoint, start_rank, tmp_path
):
    config = make_config(checkpoint, **options)
    # an item of whole sequences sees others when each run of tokens is written out: only the cuts are compared
    plain = written_out(make_trees()) if options is OF_TOKENS else make_trees()
    expected = gradient(start_rank(config), plain)
    for other in ({}, {"max_tokens_per_micro_batch": 1}, {"max_tokens_per_micro_batch": 60}):
        found = gradient(start_rank(make_config(checkpoint, **options, **other)), make_trees())
        assert largest_difference(found, expected) < 1e-6, other
    two = {**options, "ranks": 2}
    mp.spawn(save_gradient, args=(2, {"torch": None}, checkpoint, two, tmp_path, make_trees()), nprocs=2)
    assert largest_difference(torch.load(tmp_path / "torch_0.pt"), expected) < 1e-6
