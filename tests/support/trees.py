"""Groups whose samples are trees of token sequences, the same tokens written out, and gradients of any backend."""

import numpy as np
import torch

from asyncrl.config.schema import MegatronConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample, TokenSequence
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.trainer import VOCAB, make_config, weights

#: an epsilon far above all gradients makes AdamW's first step −`STEP` · gradient, far above the weights' rounding
STEP = 1e3
LINEAR = {"lr": 1e12, "eps": 1e9, "weight_decay": 0.0, "grad_clip": 0.0}
#: algorithms of items that look at tokens, and at whole sequences and train steps
OF_TOKENS = {**LINEAR, "kl_coef": 0.05, "kl_unbiased": True, "entropy_coef": 0.01, "anchor": "proximal"}
OF_SEQUENCES = {
    **LINEAR,
    "advantage": "reinforce_pp",
    "surrogate": "gspo",
    "clip_low": 0.5,
    "clip_high": 9.0,
    "anchor": "loglinear",
    "corrections": ["mis", "reject", "docs.examples.m2po:CORRECTION"],
    "args": {"m2_threshold": 2.0},
    "mis_level": "sequence",
    "mis_high": 1e6,
    "reject_low": 1e-3,
    "reject_high": 1e3,
    "loss_aggregation": "sample_mean",
    "kl_reward_coef": 0.05,
}


def make_trees(sizes=(3, 2, 2), seed=0) -> list[bytes]:
    """Groups of these numbers of samples: turns with a tool between, branches, and sub-agents with a context of their
    own."""
    rng = np.random.default_rng(seed)

    def answer() -> Completion:
        length = int(rng.integers(1, 7))
        logprobs = rng.uniform(-6, -1, length).astype(np.float32)
        return Completion(tokens(length), logprobs, [VersionSpan(0, PolicyVersion(0, 0))], FinishReason.STOP)

    def tokens(length: int) -> np.ndarray:
        return rng.integers(0, VOCAB, length).astype(np.int32)

    def sample(index: int, prompt_tokens: int) -> Sample:
        builders = [TrajectoryBuilder()]
        for turn in range(6):
            builder = builders[int(rng.integers(len(builders)))]
            builder.append(answer())
            builder.append(tokens(2))
            if turn % 2:
                builders.append(builder.branch() if turn == 1 else builder.start(int(rng.integers(prompt_tokens + 1))))
                builders[-1].append(tokens(1))
        return builders[0].sample(index, FinishReason.STOP, reward=float(rng.integers(0, 3)))

    groups = []
    for g, size in enumerate(sizes):
        prompt = tokens(int(rng.integers(2, 9)))
        samples = [sample(index, len(prompt)) for index in range(size)]
        groups.append(Group.from_samples(f"g{g}", f"p{g}", 0, prompt, samples).to_bytes())
    return groups


def written_out(groups: list[bytes]) -> list[bytes]:
    """The same groups with a sequence for each uninterrupted run of trained tokens, so that none is shared."""
    found = []
    for group in map(Group.from_buffer, groups):
        samples = []
        for s in range(len(group)):
            sequences = [run for q in group.sequences(s) for run in _runs(group, q)]
            finish, reward = FinishReason(int(group.finish[s])), float(group.rewards[s])
            samples.append(Sample(int(group.sample_index[s]), sequences, finish, reward))
        found.append(Group.from_samples(group.uid, group.prompt_id, 0, group.prompt_tokens, samples).to_bytes())
    return found


def _runs(group: Group, q: int) -> list[TokenSequence]:
    rows, prefix = group.response(q), int(group.prefix[q])
    mask = group.loss_mask[rows]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    first = group.spans(q)[:1]
    return [
        TokenSequence(
            group.tokens[rows][:end],
            group.logprobs[rows][:end],
            mask[:end] & (np.arange(end) >= start),
            first,
            prefix,
        )
        for start, end in edges
    ]


def gradient(rank: TrainerRank, groups: list[bytes]) -> dict[str, torch.Tensor]:
    """By name, of a rank with the options `LINEAR`; empty on ranks other than 0."""
    before = weights(rank)
    rank.train(0, groups)
    return {name: (before[name] - after) / STEP for name, after in weights(rank).items()}


def save_gradient(rank: int, ranks: int, cuts, checkpoint, options, folder, groups) -> None:
    """Train on ``groups`` once for each of ``cuts`` (MegatronConfig's, by name; None: the torch backend), and save the
    gradient to ``folder``."""
    torch.set_num_threads(1)
    for cut, megatron in cuts.items():
        config = make_config(str(checkpoint), backend="torch" if megatron is None else "megatron", **options)
        config.trainer.megatron = MegatronConfig(**(megatron or {}))
        meet = f"file://{folder}/rendezvous_{cut}" if ranks > 1 else None
        trainer = TrainerRank(config, rank, ranks, meet, Recorder(f"trainer/{rank}"))
        torch.save(gradient(trainer, groups), folder / f"{cut}_{rank}.pt")
        trainer.close()


def largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of any tensor, relative to its norm, or to a tenth of the whole gradient's: most terms of small ones cancel, so
    that rounding is a larger part."""
    assert found.keys() == expected.keys()
    least = 0.1 * torch.stack([e.norm() for e in expected.values()]).norm()
    return max(float((found[n] - e).norm() / torch.maximum(e.norm(), least)) for n, e in expected.items())
