"""The base class of in-process agents: turns, limits, and continuation from a saved state."""

import asyncio

import numpy as np
import pytest

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan

TOOL = [90, 91]


class Answers:
    """A ``generate`` that answers with one token, the number of its call."""

    def __init__(self, state=None, finish=FinishReason.STOP) -> None:
        self.state, self.finish, self.calls = state, finish, []

    def save(self, state):
        self.state = state

    async def __call__(self, response, max_new_tokens, prefix=None):
        self.calls.append((response.tolist(), max_new_tokens))
        tokens = np.array([len(self.calls)], np.int32)
        spans = [VersionSpan(0, PolicyVersion(0, 0))]
        return Completion(tokens, np.zeros(1, np.float32), spans, self.finish)


class Tool(MultiTurn):
    """Answers of the policy before ``ends`` call the tool."""

    ends, delay_s = 3, 0.0

    async def observe(self, prompt, turns, answer):
        await asyncio.sleep(self.delay_s)
        return None if turns.completions == self.ends else TOOL


async def test_an_agent_that_ends_itself():
    generate = Answers()
    sample = await Tool(None, 20).run(None, 1, generate)
    assert generate.calls == [([], 20), ([1, *TOOL], 17), ([1, *TOOL, 2, *TOOL], 14)]
    (sequence,) = sample.sequences
    assert sequence.tokens[sequence.loss_mask].tolist() == [1, 2, 3]
    assert (sample.index, sample.finish) == (1, FinishReason.STOP)


@pytest.mark.parametrize(
    ("limits", "answered", "finish"),
    [
        ({"max_turns": 2}, 2, FinishReason.TURNS),
        ({"max_response_tokens": 6}, 2, FinishReason.LENGTH),
        ({"max_seconds": 0.05}, 1, FinishReason.TIME),
    ],
)
async def test_limits_end_a_sample_with_their_reason(limits, answered, finish):
    agent = Tool(None, **({"max_response_tokens": 20} | limits))
    agent.delay_s = 0.03 if "max_seconds" not in limits else 30.0
    sample = await agent.run(None, 0, Answers())
    (sequence,) = sample.sequences
    assert (int(sequence.loss_mask.sum()), sample.finish) == (answered, finish)
    assert sample.finish.truncated


async def test_a_truncated_answer_ends_the_sample():
    sample = await Tool(None, 20).run(None, 0, Answers(finish=FinishReason.LENGTH))
    assert (sample.sequences[0].tokens.tolist(), sample.finish) == ([1], FinishReason.LENGTH)


async def test_an_agent_continues_from_its_state():
    whole = Answers()
    expected = await Tool(None, 20).run(None, 0, whole)
    again = await Tool(None, 20).run(None, 0, Answers(whole.state))  # saved after its second turn
    assert again.sequences[0].tokens[:6].tolist() == expected.sequences[0].tokens[:6].tolist()
    assert again.finish is FinishReason.STOP


def test_limits_that_allow_nothing_are_refused():
    with pytest.raises(ValueError, match="max_turns ≥ 1"):
        Tool(None, 20, max_turns=0)
