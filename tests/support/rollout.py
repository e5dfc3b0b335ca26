"""The rollout pool in one process: a real queue, real engines, scripted rewards."""

import asyncio
from collections import Counter
from fractions import Fraction

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import SampleMaker
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.rollouter.validation import Validation
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion
from tests.support.scripted import is_death
from tests.support.tiny import MAX_RESPONSE, overrides


class ScriptedRewards:
    """Rewards from a function of (prompt, index of the sample in its group), without worker processes."""

    def __init__(self, judge) -> None:
        self._judge = judge
        self.takes_trajectories = False
        self.calls: list[list[str]] = []  # prompts of each call

    async def score(self, answers):
        self.calls.append([answer.prompt.uid for answer in answers])
        return [self._judge(answer.prompt, i) for i, answer in enumerate(answers)]


FIRST = PolicyVersion(0, 0)


def fine(reward: float) -> RewardResult:
    return RewardResult(reward=reward, metrics={"accuracy": reward}, error=None, message="")


def broken(kind: str) -> RewardResult:
    return RewardResult(reward=float("nan"), metrics={}, error=kind, message="why")


class CountingTokenizer(PromptTokenizer):
    """Counts how often each prompt is encoded."""

    def __init__(self, checkpoint) -> None:
        super().__init__(checkpoint)
        self.encoded: Counter[str] = Counter()

    def encode(self, prompt):
        self.encoded[prompt.uid] += 1
        return super().encode(prompt)


class System:
    """The whole rollout pool in one process."""

    def __init__(
        self,
        inputs,
        judge,
        *more,
        max_prompt_tokens=40,
        total=100,
        agent_loop=SingleTurn,
        rewards=None,
        replicas=None,
        records=None,
        version=FIRST,
    ) -> None:
        """``judge`` computes the rewards unless ``rewards`` is given. ``replicas`` are clients of engines that
        outlive the system; None creates one engine. ``records``: those of an earlier queue, which had published
        ``version``."""
        self.version = version
        self.config = load_config(None, [*overrides(inputs, inputs / "run"), *more])
        self.engine = None if replicas else NativeEngine(self.config.model.path, self.config.rollout.engine)
        derived = derive(self.config)
        threshold = Fraction(str(self.config.async_training.staleness_threshold))
        self.queue = SampleQueue(
            Admission(derived.groups_per_version, threshold, total),
            records or InMemoryRecords(),
            vocab_size=ModelConfig.load(self.config.model.path).vocab_size,
            max_attempts=self.config.rollout.max_attempts,
        )
        self.tokenizer = tokenizer = CountingTokenizer(self.config.model.path)
        self.rewards = rewards or ScriptedRewards(judge)
        self.recorder = Recorder("rollouter")
        self.prompts = load_prompts(self.config.data.train_files, self.config.data)
        self.router = Router(replicas or {"replica": LeasedEngine(EngineLease(self.engine), 1)}, is_death)
        data = self.config.data
        order = PromptOrder(self.prompts, seed=0, epochs=data.epochs, curriculum=data.curriculum)
        maker = SampleMaker(
            self.config, tokenizer, agent_loop(tokenizer, MAX_RESPONSE), max_prompt_tokens, self.router, self.rewards,
            self.recorder,
        )  # fmt: skip
        self.validation = Validation(self.config, derived.slots, maker, self.recorder)
        self.loop = RolloutLoop(self.config, derived.slots, order, maker, self.queue, self.recorder)

    async def __aenter__(self):
        if self.engine is not None:
            await self.engine.resume(self.version)
        recovery = await self.queue.recover(history=True)
        self.tasks = [asyncio.create_task(self.router.run()), asyncio.create_task(self.loop.run(recovery))]
        await self.queue.publish(self.version)
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        if self.engine is not None:
            await self.engine.close()

    async def groups(self, count: int) -> list[Group]:
        _, buffers = await asyncio.wait_for(self.queue.lease(1, count), 60)
        return [Group.from_buffer(b) for b in buffers]
