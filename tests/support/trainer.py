"""Trainer ranks on small random checkpoints, and groups to train on."""

import re

import numpy as np
import pytest
import torch

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.device_memory import DeviceMemoryError
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

VOCAB = 64


def make_checkpoint(folder, **overrides):
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        **overrides,
    }
    model = Decoder(DecoderConfig.from_dict(raw))
    model.init_weights(seed=0, std=0.1)
    save_checkpoint(folder, model.named_parameters(), model.config)
    return str(folder)


def make_config(checkpoint, **options):
    """Config with ``options``, each named by the last part of its key, from the sections that concern the trainer."""
    config = Config()
    config.model.path = checkpoint
    config.trainer.device = "cpu"
    config.trainer.optimizer.lr = 1e-3
    config.trainer.mini_batch_groups = 64
    for name, value in options.items():
        parts = (config.model, config.trainer, config.trainer.optimizer, config.algorithm, config.rollout, config.mtp)
        owners = [o for o in parts if hasattr(o, name)]
        assert len(owners) == 1, name
        setattr(owners[0], name, value)
    return config


def make_groups(sizes=(4, 3, 4), seed=0, rewards=None):
    rng = np.random.default_rng(seed)
    buffers = []
    for g, size in enumerate(sizes):
        samples = []
        for index in range(size):
            length = int(rng.integers(1, 24))
            samples.append(
                Sample.single(
                    index=index,
                    tokens=rng.integers(0, VOCAB, length),
                    logprobs=rng.uniform(-6, -1, length),
                    loss_mask=rng.random(length) > 0.1,
                    spans=[VersionSpan(0, PolicyVersion(0, 0))],
                    finish=FinishReason.LENGTH if length > 20 else FinishReason.STOP,
                    reward=float(rng.integers(0, 3)) if rewards is None else float(np.resize(rewards, size)[index]),
                )
            )
        prompt = rng.integers(0, VOCAB, int(rng.integers(1, 9)))
        buffers.append(Group.from_samples(f"g{g}", f"p{g}", 0, prompt, samples).to_bytes())
    return buffers


def started_ranks():
    """Fixture body: builds trainer ranks of world size 1, one at a time, because a process can hold only one process
    group."""
    alive: list[TrainerRank] = []

    def build(config, recorder=None):
        while alive:
            alive.pop().close()
        alive.append(TrainerRank(config, 0, 1, None, recorder or Recorder("trainer/0")))
        return alive[-1]

    yield build
    while alive:
        alive.pop().close()


def train_in_parts(rank, step, groups, *sizes):
    """Metrics of a step whose groups come in parts of these sizes."""
    parts = np.split(np.array(groups, dtype=object), np.cumsum(sizes[:-1]))
    assert [len(part) for part in parts] == list(sizes)
    found = [rank.train(step, part.tolist(), part=k, parts=len(parts)) for k, part in enumerate(parts)]
    assert not any(found[:-1])
    return found[-1]


def weights(rank):
    return {name: tensor.clone() for name, tensor in rank.export()}


def first_gradient(rank, groups):
    """The first step's gradient, flat, in float32. AdamW's first moment after one step is (1 − beta1) · gradient."""
    rank.train(0, groups)
    moments = rank._backend.state()["optimizer"]["exp_avg"]
    return torch.cat([m.full_tensor().flatten() for m in moments.values()]) * 10


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def plain_loss(groups, logprobs_of):
    """Mean of −advantage · logprob over the trained tokens, with GRPO's advantages. ``logprobs_of(prompt, response)``:
    float32 [R], of the response's tokens, for int64 token ids."""
    total, trained = torch.zeros(()), 0
    for group in map(Group.from_buffer, groups):
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        prompt = torch.tensor(group.prompt_tokens).long()
        for s in range(len(group)):
            response = torch.tensor(group.tokens[group.response(s)]).long()
            mask = torch.tensor(group.loss_mask[group.response(s)])
            total = total - (advantages[s] * logprobs_of(prompt, response) * mask).sum()
            trained += int(mask.sum())
    return total / trained


def expect_memory_named(rank, monkeypatch, held):
    """Check that a train step which runs out of memory names in one line what was ``held``, and what to lower."""

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(rank._backend, "_accumulate_gradients", exhausted)
    said = rf"cpu ran out of memory in a train step.*{re.escape(held)}.*trainer\.max_tokens_per_micro_batch"
    with pytest.raises(DeviceMemoryError, match=said):
        rank.train(0, make_groups())
