"""The rollouter's pool in one process: a real queue, real engines, rewards that a test decides."""

import asyncio
from collections import Counter
from fractions import Fraction

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from asyncrl.rollouter.agent_loops.single_turn import SingleTurn
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.fence import Fence, Owned
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.rewards.pool import RewardResult
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import SampleMaker
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.rollouter.validation import Validation
from asyncrl.sample import Group, PolicyVersion
from asyncrl.sample_queue.admission import Admission
from asyncrl.sample_queue.core import SampleQueue
from asyncrl.telemetry.recorder import Recorder
from tests.support.in_memory import InMemoryRecords
from tests.support.scripted import is_death
from tests.support.tiny import MAX_RESPONSE, overrides


class ScriptedRewards:
    """Rewards by a function of (prompt, number of the sample in its group), in place of worker processes."""

    def __init__(self, judge) -> None:
        self._judge = judge
        self.calls: list[list[str]] = []  # prompts of each call

    async def score(self, items):
        self.calls.append([prompt.uid for prompt, _ in items])
        return [self._judge(prompt, i) for i, (prompt, _) in enumerate(items)]


def fine(reward: float) -> RewardResult:
    return RewardResult(reward=reward, metrics={"accuracy": reward}, error=None, message="")


def broken(kind: str) -> RewardResult:
    return RewardResult(reward=float("nan"), metrics={}, error=kind, message="why")


class CountingTokenizer(PromptTokenizer):
    """The real one, with a tally of the prompts it has encoded."""

    def __init__(self, checkpoint) -> None:
        super().__init__(checkpoint)
        self.encoded: Counter[str] = Counter()

    def encode(self, prompt):
        self.encoded[prompt.uid] += 1
        return super().encode(prompt)


class System:
    """Everything of the rollouter's pool in one process."""

    def __init__(
        self, inputs, judge, *more, max_prompt_tokens=40, total=100, agent_loop=SingleTurn, replicas=None, records=None
    ) -> None:
        """``replicas``: clients of engines that live on without it; None: an engine of its own. ``records``: of a queue
        before this one."""
        self.config = load_config(None, [*overrides(inputs, inputs / "run"), *more])
        self.engine = None if replicas else NativeEngine(self.config.model.path, self.config.rollout.engine)
        derived = derive(self.config)
        threshold = Fraction(str(self.config.async_training.staleness_threshold))
        self.queue = SampleQueue(Admission(derived.groups_per_version, threshold, total), records or InMemoryRecords())
        self.tokenizer = tokenizer = CountingTokenizer(self.config.model.path)
        self.rewards = ScriptedRewards(judge)
        self.recorder = Recorder("rollouter")
        self.prompts = load_prompts(self.config.data.train_files, self.config.data)
        self.router = Router(replicas or {"replica": Owned(Fence(self.engine), "test")}, is_death)
        order = PromptOrder(self.prompts, seed=0, epochs=self.config.data.epochs)
        maker = SampleMaker(
            self.config, tokenizer, agent_loop(tokenizer, MAX_RESPONSE), max_prompt_tokens, self.router, self.rewards,
            self.recorder,
        )  # fmt: skip
        self.validation = Validation(self.config, maker, self.recorder)
        self.loop = RolloutLoop(self.config, derived, order, maker, self.queue, self.recorder)

    async def __aenter__(self):
        if self.engine is not None:
            await self.engine.resume(PolicyVersion(0, 0))
        recovery = await self.queue.recover()
        self.tasks = [asyncio.create_task(self.router.run()), asyncio.create_task(self.loop.run(recovery))]
        await self.queue.publish(PolicyVersion(0, 0))
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)
        if self.engine is not None:
            await self.engine.close()

    async def groups(self, count: int) -> list[Group]:
        _, buffers = await asyncio.wait_for(self.queue.lease(1, count, 0.0), 60)
        return [Group.from_buffer(b) for b in buffers]
