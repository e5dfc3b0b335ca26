"""The base class of in-process agents: turns, rewards, limits, and continuation from a saved state."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config.schema import Config, RolloutConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import GroupTask, SampleMaker
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason
from tests.support.scripted import ScriptedReplica, is_death

PROMPT = Prompt("e0-000000", "row:0", (), "", text="?")
TOOL = [90, 91]


class Tool(MultiTurn):
    """Answers of the policy before ``ends`` call the tool."""

    ends, delay_s = 3, 0.0

    async def observe(self, prompt, turns, answer):
        await asyncio.sleep(self.delay_s)
        return None if turns.completions == self.ends else TOOL


class Answering(ScriptedReplica):
    """Answers each request with its number, or as many tokens as it may have."""

    def __init__(self, verbose: bool = False, delay_s: float = 0.0) -> None:
        super().__init__()
        self.asked, self._verbose, self._delay_s, self._late = [], verbose, delay_s, []

    async def submit(self, requests):
        await super().submit(requests)
        for request in requests:
            self.asked.append((request.tokens.tolist(), request.max_new_tokens))
            self._late.append(asyncio.create_task(self._answer(request)))

    async def _answer(self, request):
        if self._verbose:
            self.emit(request.id, [7])
            await asyncio.sleep(self._delay_s)
        tokens = [7] * (request.max_new_tokens - 1) if self._verbose else [len(self.asked)]
        self.emit(request.id, tokens, FinishReason.LENGTH if self._verbose else FinishReason.STOP)


async def made(agent, replica=None, partial=None, **limits):
    """The sample of an agent, and what it asked for."""
    replica = replica or Answering()
    config = Config(rollout=RolloutConfig(**({"max_response_tokens": 20} | limits)))
    router = Router({"a": replica}, is_death)
    maker = SampleMaker(config, None, agent, 100, router, None, Recorder("rollouter"))
    running = asyncio.create_task(router.run())
    task = GroupTask(PROMPT, np.array([1, 2], np.int32), SamplingParams(), PROMPT.uid, PROMPT.uid, False)
    (sample,) = await maker.make(task, [partial or PartialSample()])
    running.cancel()
    await asyncio.wait([running])
    return sample, replica.asked


def trained(sample) -> list[int]:
    return [token for q in sample.sequences for token in q.tokens[q.loss_mask].tolist()]


async def test_an_agent_that_ends_itself():
    sample, asked = await made(Tool(None, 20))
    assert asked == [([1, 2], 20), ([1, 2, 1, *TOOL], 17), ([1, 2, 1, *TOOL, 2, *TOOL], 14)]
    assert trained(sample) == [1, 2, 3]
    assert (sample.index, sample.finish, sample.reward) == (0, FinishReason.STOP, None)


@pytest.mark.parametrize(
    ("limits", "verbose", "tokens", "finish"),
    [
        ({"max_turns": 2}, False, [1, 2], FinishReason.TURNS),
        ({"max_response_tokens": 6}, False, [1, 2], FinishReason.LENGTH),
        ({"max_response_tokens": 6}, True, [7] * 6, FinishReason.LENGTH),
        ({"max_sample_tokens": 2}, False, [1, 2], FinishReason.TOKENS),
        ({"max_sample_tokens": 4}, True, [7] * 4, FinishReason.TOKENS),
    ],
)
async def test_limits_end_a_sample_with_their_reason(limits, verbose, tokens, finish):
    sample, _ = await made(Tool(None, 20), Answering(verbose), **limits)
    assert (trained(sample), sample.finish) == (tokens, finish)
    assert sample.finish.truncated


async def test_the_limit_of_time_ends_a_tool_and_an_answer():
    slow = Tool(None, 20)
    slow.delay_s = 60.0
    sample, _ = await made(slow, max_sample_s=0.2)
    assert (trained(sample), sample.finish) == ([1], FinishReason.TIME)
    sample, _ = await made(Tool(None, 20), Answering(verbose=True, delay_s=60.0), max_sample_s=0.2)
    assert (trained(sample), sample.finish) == ([7], FinishReason.TIME)


async def test_a_tool_s_own_timeout_is_an_error_of_the_agent():
    class Broken(Tool):
        async def observe(self, prompt, turns, answer):
            raise TimeoutError("the tool")

    failed, _ = await made(Broken(None, 20), max_sample_s=60.0)
    assert (failed.reason, failed.message) == ("agent_error", "TimeoutError: the tool")


async def test_a_limit_before_the_first_answer_fails_the_sample():
    class Silent(Answering):
        async def _answer(self, request):
            await asyncio.sleep(60)

    failed, _ = await made(Tool(None, 20), Silent(), max_sample_s=0.1)
    assert failed.reason == "limit_reached"


async def test_calls_at_once_share_the_limit_of_the_sample():
    class Both:
        async def run(self, prompt, index, generate):
            turns = TrajectoryBuilder()
            forks = [turns.branch(), turns.branch()]
            forks[1].append([5])
            for fork, answer in zip(forks, await asyncio.gather(*(generate(f.response, 8) for f in forks))):
                fork.append(answer)
            return turns.sample(index, forks[1].finish)

    sample, asked = await made(Both(), Answering(verbose=True), max_sample_tokens=12)
    assert [limit for _, limit in asked] == [8, 4]
    assert (trained(sample), sample.finish) == ([7] * 12, FinishReason.TOKENS)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"metrics": {"reward": 1.0}}, "a metric 'reward'"),
        ({"messages": [{"content": object()}]}, "not JSON serializable"),
        ({"finish": "stop"}, "expected a FinishReason"),
        ({"column": [["a"]] * 9}, "extra column 'x': expected rows of numbers, found [['a']"),
        ({"column": [[1], [2, 3]]}, "inhomogeneous shape"),
    ],
)
async def test_what_else_a_loop_returns_is_checked(changes, problem):
    class Careless(Tool):
        async def run(self, prompt, index, generate):
            sample = await super().run(prompt, index, generate)
            (sequence,) = sample.sequences
            extras = {"x": changes["column"]} if "column" in changes else {}
            others = {name: value for name, value in changes.items() if name != "column"}
            return replace(sample, sequences=[replace(sequence, extras=extras)], **others)

    failed, _ = await made(Careless(None, 20))
    assert (failed.reason, problem in failed.message) == ("bad_sample", True)


async def test_lists_and_another_index_are_put_right():
    class Careless(Tool):
        async def run(self, prompt, index, generate):
            sample = await super().run(prompt, index, generate)
            (q,) = sample.sequences
            lists = replace(q, tokens=q.tokens.tolist(), logprobs=q.logprobs.tolist(), loss_mask=q.loss_mask.tolist())
            return replace(sample, index=7, sequences=[lists])

    sample, _ = await made(Careless(None, 20))
    assert (sample.index, trained(sample), sample.sequences[0].logprobs.dtype) == (0, [1, 2, 3], np.float32)


async def test_a_limit_that_the_loop_does_not_catch_fails_its_sample():
    class Unaware:
        async def run(self, prompt, index, generate):
            for _ in range(2):
                await generate(np.empty(0, np.int32))

    failed, _ = await made(Unaware(), max_turns=1)
    assert (failed.reason, "(turns)" in failed.message) == ("limit_reached", True)


async def test_an_agent_continues_from_its_state():
    partial = PartialSample()
    whole, asked = await made(Tool(None, 20), partial=partial)
    (again,) = unpack([pack(PROMPT.uid, [partial])])  # saved after its second turn, and the third is recorded
    same, asked_again = await made(Tool(None, 20), partial=again)
    assert (len(asked), asked_again) == (3, [])
    assert trained(same) == trained(whole)
    (limited,) = unpack([pack(PROMPT.uid, [partial])])
    limited.calls.clear()
    cut, _ = await made(Tool(None, 20), partial=limited, max_turns=2)  # turns before the state count
    assert (trained(cut), cut.finish) == ([1, 2], FinishReason.TURNS)


async def test_rewards_of_turns_are_discounted_and_stand_at_their_last_tokens():
    class Rewards(Tool):
        async def observe(self, prompt, turns, answer):
            turns.reward(float(turns.completions))
            turns.messages.append({"role": "tool", "content": "42"})
            return await super().observe(prompt, turns, answer)

        async def grade(self, prompt, turns):
            return 8.0

    partial = PartialSample()
    sample, _ = await made(Rewards(None, 20, discount=0.5), partial=partial)
    assert sample.reward == 1 + 0.5 * 2 + 0.25 * (3 + 8)
    (sequence,) = sample.sequences
    assert sequence.extras["token_rewards"].tolist() == [1, 0, 0, 2, 0, 0, 11]
    assert len(sample.messages) == 3
    (again,) = unpack([pack(PROMPT.uid, [partial])])
    same, _ = await made(Rewards(None, 20, discount=0.5), partial=again)
    assert (same.reward, len(same.messages)) == (sample.reward, 3)


async def test_grade_alone_is_the_reward():
    class Graded(Tool):
        async def grade(self, prompt, turns):
            return float(turns.completions)

    sample, _ = await made(Graded(None, 20), max_turns=2)
    assert (sample.reward, sample.sequences[0].extras) == (2.0, {})


def test_a_discount_beyond_one_is_refused():
    with pytest.raises(ValueError, match="discount of 0 to 1"):
        Tool(None, 20, discount=2.0)
