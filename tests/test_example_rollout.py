"""The reward and the agent loop of docs/extending.md, selected by import path, in a rollout with a real engine."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import RewardConfig
from asyncrl.rollouter.agents.base import Completion, find_agent_loop
from asyncrl.rollouter.rewards.pool import RewardPool
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.rollout import System, fine

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")


@pytest.mark.parametrize("name", ["length_reward", "two_tries", "calculator"])
def test_the_page_shows_the_whole_example(name):
    source = (DOCS / "examples" / f"{name}.py").read_text()
    page = (DOCS / "extending.md").read_text()
    assert f"```python\n{source}```" in page
    assert f"(examples/{name}.py)" in page


async def test_the_reward_scores_what_the_agent_loop_makes(inputs):
    pool = RewardPool(RewardConfig(function="length_reward:length", args={"target": 10}))
    await pool.start()
    try:
        async with System(
            inputs, lambda prompt, i: fine(0.0), agent_loop=find_agent_loop("two_tries:TwoTries"), rewards=pool
        ) as system:
            hint = system.tokenizer.hf.encode(" Check: ", add_special_tokens=False)
            for group in await system.groups(2):
                for i in range(len(group)):
                    at = group.response(i)
                    distance = abs(len(system.tokenizer.decode(group.tokens[at])) - 10)
                    assert group.rewards[i] == pytest.approx(-distance / 10)
                    assert group.metrics["close"][i] == (distance < 3)
                    added = ~group.loss_mask[at]
                    assert group.tokens[at][added].tolist() == hint
                    assert (group.logprobs[at][added] == 0).all()
                    assert (group.logprobs[at][~added] < 0).all()
    finally:
        await pool.close()


async def test_the_agent_loop_shifts_the_versions_of_its_second_turn():
    class Tokenizer:
        class hf:
            @staticmethod
            def encode(text, add_special_tokens):
                return [7, 8]

    calls = []

    async def generate(response, limit):
        calls.append((response.tolist(), limit))
        spans = [VersionSpan(0, PolicyVersion(0, len(calls)))]
        return Completion(np.array([1, 2, 3], np.int32), np.full(3, -0.5, np.float32), spans, FinishReason.STOP)

    sample = await find_agent_loop("two_tries:TwoTries")(Tokenizer(), 24).run(None, 0, generate)
    assert calls == [([], 11), ([1, 2, 3, 7, 8], 11)]
    (sequence,) = sample.sequences
    assert sequence.tokens.tolist() == [1, 2, 3, 7, 8, 1, 2, 3]
    assert sequence.loss_mask.tolist() == [True] * 3 + [False] * 2 + [True] * 3
    assert [(span.start, span.version.number) for span in sequence.spans] == [(0, 1), (5, 2)]


async def test_the_calculator_computes_sums_and_rewards_its_samples(inputs):
    system = System(
        inputs, None, "reward.function=none", agent_loop=find_agent_loop("calculator:Calculator"),
    )  # fmt: skip
    async with system:
        for group in await system.groups(2):
            assert set(group.rewards.tolist()) <= {0.0, 1.0}
    agent = find_agent_loop("calculator:Calculator")(system.tokenizer, 100)
    said = iter(["first [2+3]", "so 5"])

    class Generate:
        state, seconds_left = None, float("inf")

        def save(self, state):
            self.state = state

        async def __call__(self, response):
            tokens = np.array(system.tokenizer.hf.encode(next(said), add_special_tokens=False), np.int32)
            spans = [VersionSpan(0, PolicyVersion(0, 0))]
            return Completion(tokens, np.full(len(tokens), -0.5, np.float32), spans, FinishReason.STOP)

    sample = await agent.run(replace(system.prompts[0], answer="5"), 0, Generate())
    assert system.tokenizer.decode(sample.sequences[0].tokens) == "first [2+3] = 5\nso 5"
    assert sample.reward == pytest.approx(0.99)
