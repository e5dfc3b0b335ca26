"""Trajectories: what was sampled is trained exactly once, whatever the tree of sequences."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan


def completion(number, length=2, version=0, finish=FinishReason.STOP):
    """Of tokens that no other completion has."""
    tokens = np.arange(length, dtype=np.int32) + 1000 * (number + 1)
    spans = [VersionSpan(0, PolicyVersion(0, version), False, "replica/0")]
    return Completion(tokens, -tokens.astype(np.float32), spans, finish)


def test_turns_alternate_between_sampled_and_observed_tokens():
    turns = TrajectoryBuilder()
    turns.append([7])
    turns.append(completion(0, 2, version=3))
    turns.append(np.array([8, 9]))
    turns.append(completion(1, 1, version=4, finish=FinishReason.LENGTH))
    assert turns.response.tolist() == [7, 1000, 1001, 8, 9, 2000]
    sample = turns.sample(5)
    (sequence,) = sample.sequences
    assert sequence.loss_mask.tolist() == [False, True, True, False, False, True]
    assert sequence.logprobs.tolist() == [0, -1000, -1001, 0, 0, -2000]
    assert [(span.start, span.version.number) for span in sequence.spans] == [(0, 3), (5, 4)]
    assert (sample.index, sample.finish, sequence.prefix) == (5, FinishReason.LENGTH, None)


def test_what_sequences_share_is_trained_by_the_first_of_them():
    turns = TrajectoryBuilder()
    turns.append(completion(0))
    other, agent = turns.branch(), turns.start(prefix=1)
    agent.append([5])
    agent.append(completion(3))
    other.append(completion(2))
    turns.append(completion(1))
    main, second, third = turns.sample(0).sequences
    assert main.loss_mask.tolist() == [True] * 4
    assert (second.tokens.tolist(), second.loss_mask.tolist()) == ([1000, 1001, 3000, 3001], [False, False, True, True])
    assert (third.tokens.tolist(), third.prefix) == ([5, 4000, 4001], 1)


def test_rewards_are_discounted_along_each_sequence_whatever_its_siblings_did():
    turns = TrajectoryBuilder()
    turns.append(completion(0))
    forks = [turns.branch(), turns.branch(), turns.start()]
    for number, fork in enumerate(reversed(forks)):
        for turn in range(2):
            fork.append(completion(2 * number + turn + 1))
            fork.reward(10.0**turn)
    turns.append(completion(7))
    again = TrajectoryBuilder.from_bytes(turns.to_bytes())
    for builder in (turns, again):
        sample = builder.sample(0, reward=4.0, discount=0.5)
        assert sample.reward == 3 * (0.5 * 1 + 0.25 * 10) + 0.5 * 4  # the last: of this sequence's second turn
        assert [q.extras["token_rewards"][q.loss_mask].sum() for q in sample.sequences] == [4, 11, 11, 11]


def test_a_sequence_without_tokens_of_its_own_is_left_out():
    turns = TrajectoryBuilder()
    turns.append(completion(0))
    turns.branch().append([3])
    assert len(turns.sample(0).sequences) == 1


def test_nothing_sampled_and_a_completion_twice_are_refused():
    turns, one = TrajectoryBuilder(), completion(0)
    with pytest.raises(ValueError, match="without a completion"):
        turns.sample(0)
    turns.append(one)
    with pytest.raises(ValueError, match="twice"):
        turns.append(one)


def grown(seed: int, moments: random.Random) -> list[TrajectoryBuilder]:
    """A random tree whose builders go on at any ``moments``. Its shape depends on the seed alone."""

    def plan(draw: random.Random, depth: int):
        steps = []
        for _ in range(draw.randint(1, 4)):
            action = draw.choice(("sample", "observe", "branch", "start") if depth < 3 else ("sample", "observe"))
            child = plan(random.Random(draw.random()), depth + 1) if action in ("branch", "start") else None
            steps.append((action, draw.randrange(10**4), child))
        return steps

    root = TrajectoryBuilder()
    active = [(root, iter(plan(random.Random(seed), 0)))]
    builders = [root]
    while active:
        at = moments.randrange(len(active))
        builder, steps = active[at]
        step = next(steps, None)
        if step is None:
            active.pop(at)
            continue
        action, number, child = step
        if action == "sample":
            builder.append(completion(number, 1 + number % 3))
        elif action == "observe":
            builder.append([1] * (number % 3))
        else:
            builders.append(builder.branch() if action == "branch" else builder.start(prefix=1))
            active.append((builders[-1], iter(child)))
    return builders


def contents(builder: TrajectoryBuilder):
    sample = builder.sample(0, FinishReason.STOP)
    return [(q.tokens.tolist(), q.logprobs.tolist(), q.loss_mask.tolist(), q.spans, q.prefix) for q in sample.sequences]


@given(st.integers(0, 10**9))
def test_every_sampled_token_is_trained_once_in_an_order_that_timing_cannot_change(seed):
    builders = grown(seed, random.Random(1))
    sampled = {id(p): p for b in builders for p in b._parts if isinstance(p, Completion)}
    if not sampled:
        return
    sequences = builders[0].sample(0, FinishReason.STOP).sequences
    trained = np.concatenate([q.tokens[q.loss_mask] for q in sequences])
    assert sorted(trained) == sorted(np.concatenate([p.tokens for p in sampled.values()]))
    assert all((q.logprobs[q.loss_mask] == -q.tokens[q.loss_mask]).all() for q in sequences)
    assert contents(grown(seed, random.Random(2))[0]) == contents(builders[0])
    for builder in builders:
        assert contents(TrajectoryBuilder.from_bytes(builder.to_bytes())) == contents(builder)
    Group.from_samples("g", "p", 0, np.ones(3, np.int32), [builders[0].sample(0, FinishReason.STOP)])
