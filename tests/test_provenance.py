"""What an agent loop returns is checked: tokens that no engine sampled there, or trained twice, fail its sample."""

import dataclasses

import numpy as np
import pytest

from asyncrl.rollouter.agents import provenance
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.provenance import SampledCall, result_digest, tokens_digest
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

PROMPT = np.array([1, 2, 3], np.int32)
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)


def sample_problem(sample, prompt, calls, most=100):
    return provenance.sample_problem(sample, prompt, calls, most)


class Calls(list):
    """Scripted calls of ``generate``."""

    def answer(self, builder: TrajectoryBuilder, tokens, version=V0) -> Completion:
        context = np.concatenate([PROMPT[: builder.prefix], builder.response])
        logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / (len(self) + 1)
        result = Completion(np.array(tokens, np.int32), logprobs, [VersionSpan(0, version)], FinishReason.STOP)
        self.append(SampledCall(len(context), tokens_digest(context), len(tokens), result))
        builder.append(result)
        return result


def conversation() -> tuple[Sample, Calls]:
    """Two turns with a tool between, and a branch of the first."""
    calls, turns = Calls(), TrajectoryBuilder()
    calls.answer(turns, [10, 11])
    turns.append([90])
    fork = turns.branch()
    calls.answer(turns, [12, 13], V1)
    calls.answer(fork, [14])
    return turns.sample(0), calls


def saved(call: SampledCall) -> SampledCall:
    """As a process knows it that did not make it."""
    return call._replace(result=result_digest(call.result.tokens, call.result.logprobs, call.result.spans))


def changed(sample: Sample, q: int, **columns) -> Sample:
    sequences = list(sample.sequences)
    sequences[q] = dataclasses.replace(sequences[q], **columns)
    return dataclasses.replace(sample, sequences=sequences)


def at(column: np.ndarray, index: int, value) -> np.ndarray:
    column = column.copy()
    column[index] = value
    return column


def test_what_a_builder_makes_passes_also_after_a_restart():
    sample, calls = conversation()
    assert sample_problem(sample, PROMPT, calls) is None
    forgotten = [saved(call) for call in calls]
    assert sample_problem(sample, PROMPT, forgotten) is None


def test_after_a_restart_a_saved_call_s_logprobs_and_versions_are_known():
    sample, calls = conversation()
    forgotten, first = [saved(call) for call in calls], sample.sequences[0]
    for columns in (
        {"logprobs": np.zeros_like(first.logprobs)},
        {"tokens": at(first.tokens, 4, 15)},
        {"spans": [VersionSpan(0, V1)]},
    ):
        assert "is trained, but no call" in sample_problem(changed(sample, 0, **columns), PROMPT, forgotten)


def test_equal_calls_may_each_be_trained_once():
    calls, turns = Calls(), TrajectoryBuilder()
    forks = [turns.branch(), turns.branch()]
    for fork in forks:
        calls.answer(fork, [10, 11])
    same = [call._replace(result=calls[0].result) for call in calls]  # down to the logprobs
    sequences = [fork.sample(0).sequences[i] for i, fork in enumerate(forks)]
    sequences[1] = dataclasses.replace(sequences[1], logprobs=sequences[0].logprobs)
    sample = Sample(0, sequences, FinishReason.STOP)
    assert sample_problem(sample, PROMPT, same) is None
    assert "trained twice" in sample_problem(sample, PROMPT, same[:1])


def test_after_a_restart_a_saved_call_does_not_take_another_one_s_tokens():
    calls, turns = Calls(), TrajectoryBuilder()
    forks = [turns.branch(), turns.branch()]
    calls.answer(forks[0], [10, 11])
    calls.answer(forks[1], [12, 13, 14])
    sample = turns.sample(0, FinishReason.STOP)
    assert sample_problem(sample, PROMPT, [saved(calls[1]), calls[0]]) is None


def test_a_loop_may_drop_the_end_of_an_answer():
    calls, turns = Calls(), TrajectoryBuilder()
    answer = calls.answer(turns, [10, 11, 12])
    cut = Sample.single(0, answer.tokens[:2], answer.logprobs[:2], np.ones(2, bool), answer.spans, answer.finish)
    assert sample_problem(cut, PROMPT, calls) is None
    assert sample_problem(cut, PROMPT, [saved(calls[0])]) is None


SAMPLE, CALLS = conversation()
FIRST, SECOND = SAMPLE.sequences


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (None, "expected a Sample, found NoneType"),
        (dataclasses.replace(SAMPLE, sequences=[]), "at least one sequence"),
        (changed(SAMPLE, 1, loss_mask=at(SECOND.loss_mask, 0, True)), "sequence 1: token 0 is trained twice"),
        (changed(SAMPLE, 0, loss_mask=at(FIRST.loss_mask, 2, True)), "token 2 is trained, but no call"),  # the tool's
        (changed(SAMPLE, 0, tokens=at(FIRST.tokens, 1, 15)), "token 1 is trained, but no call"),
        (
            changed(SAMPLE, 0, tokens=at(FIRST.tokens, 2, 91)),
            "token 3 is trained, but no call",
        ),  # sampled after another
        (changed(SAMPLE, 0, prefix=2), "token 0 is trained, but no call"),
        (changed(SAMPLE, 0, logprobs=at(FIRST.logprobs, 0, 0.0)), "token 0 is trained, but no call"),
        (changed(SAMPLE, 0, spans=[VersionSpan(0, V1)]), "token 0 is trained, but no call"),
        (changed(SAMPLE, 0, logprobs=FIRST.logprobs[1:]), "expected equal lengths"),
        (changed(SAMPLE, 0, spans=FIRST.spans[::-1]), "expected version spans that start at token 0"),
        (changed(SAMPLE, 0, prefix=4), "expected a prefix of 0 to 3"),
        (dataclasses.replace(SAMPLE, finish="stop"), "expected a FinishReason, found 'stop'"),
        (changed(SAMPLE, 0, prefix=0, loss_mask=[True] * 5), "nothing precedes its first token"),
        (changed(SAMPLE, 0, extras={"token_rewards": np.zeros(2)}), "expected 5 finite token_rewards"),
    ],
)
def test_other_samples_are_refused(sample, problem):
    assert problem in sample_problem(sample, PROMPT, CALLS)


def test_a_sequence_beyond_its_limit_is_refused():
    assert "5 response tokens; expected at most" in sample_problem(SAMPLE, PROMPT, CALLS, most=4)


def test_random_trees_pass_and_train_each_token_once():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        calls, builders = Calls(), [TrajectoryBuilder()]
        for _ in range(rng.integers(1, 12)):
            builder = builders[rng.integers(len(builders))]
            action = rng.integers(4)
            if action == 0:
                builders.append(builder.branch())
            elif action == 1:
                builder.append(rng.integers(0, 9, rng.integers(1, 4)))
            elif action == 2:
                builders.append(builder.start(int(rng.integers(0, 4))))
                builders[-1].append([5])
            else:
                calls.answer(builder, rng.integers(0, 3, rng.integers(0, 4)), [V0, V1][rng.integers(2)])
        if not any(call.tokens for call in calls):
            continue
        sample = builders[0].sample(0, FinishReason.STOP)
        assert sample_problem(sample, PROMPT, calls) is None
        assert sum(int(q.loss_mask.sum()) for q in sample.sequences) == sum(call.tokens for call in calls)
