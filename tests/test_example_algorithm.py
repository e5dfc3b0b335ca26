"""The algorithm of docs/extending.md, selected by its import path, implements its published formula."""

from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.models.checkpoint import is_draft, load_decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.trainer.algorithms.base import ALGORITHMS
from asyncrl.types.groups import Group
from tests.support.trainer import first_gradient, make_checkpoint, make_config, make_groups, relative

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")


def test_a_train_step_follows_the_formula(tmp_path, start_rank):
    checkpoint, groups = make_checkpoint(tmp_path), make_groups(sizes=(4, 3, 2))
    config = make_config(checkpoint, name="rloo:ALGORITHM", grad_clip=0.0, max_tokens_per_micro_batch=48)
    found = first_gradient(start_rank(config), groups)

    model = load_decoder(checkpoint)
    total, trained = torch.zeros(()), 0
    for group in map(Group.from_buffer, groups):
        for s in range(len(group)):
            others = [float(group.rewards[j]) for j in range(len(group)) if j != s]
            advantage = float(group.rewards[s]) - sum(others) / len(others)
            response = torch.tensor(group.tokens[group.response(s)]).long()
            tokens = torch.cat([torch.tensor(group.prompt_tokens).long(), response])
            logits = model.logits(tokens, PackedLayout.from_lengths(np.array([len(tokens)])))
            before_response = torch.log_softmax(logits, -1)[len(group.prompt_tokens) - 1 : -1]
            logprobs = before_response.gather(1, response[:, None]).squeeze(1)
            mask = torch.tensor(group.loss_mask[group.response(s)])
            total = total - advantage * (logprobs * mask).sum()
            trained += int(mask.sum())
    (total / trained).backward()
    expected = [p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None and not is_draft(name)]
    assert relative(found, torch.cat(expected)) < 1e-5


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"n": 1}, "rollout.n: rloo compares the samples of a group"),
        ({"staleness_threshold": 1.0}, "async_training.staleness_threshold: rloo does not correct for stale tokens"),
        ({"trigger_parameter_sync_step": 2}, "async_training.trigger_parameter_sync_step: rloo does not correct for"),
        ({"kl_coef": 0.1}, "algorithm.kl_coef: rloo has no KL term"),
    ],
)
def test_rloo_declares_its_limits(overrides, expected):
    config = make_config("model")
    for name, value in overrides.items():
        (owner,) = (o for o in (config.rollout, config.async_training, config.algorithm) if hasattr(o, name))
        setattr(owner, name, value)
    (found,) = ALGORITHMS.find("rloo:ALGORITHM").problems(config)
    assert found.startswith(expected)


def test_the_page_shows_the_whole_example_algorithm():
    assert (DOCS / "examples" / "rloo.py").read_text() in (DOCS / "extending.md").read_text()
