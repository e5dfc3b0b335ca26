"""What answers prompts, in training and in evaluation: agents, rewards and sandboxes around a router of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from asyncrl.config.schema import Config
from asyncrl.config.secrets import revealed
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import AgentLoop, find_agent_loop
from asyncrl.rollouter.endpoint.link import EndpointLink
from asyncrl.rollouter.endpoint.loop import EndpointLoop
from asyncrl.rollouter.rewards.pool import RewardPool
from asyncrl.rollouter.router import ReplicaClient, Router
from asyncrl.rollouter.samples import SampleMaker
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sandbox.service import SandboxService


class Answering:
    """``start()``, then ``run()`` as a task while ``maker`` makes and scores samples, then ``close()``.

    ``link``: to the agents' endpoint, with `rollout.agent`; ``is_death``: see `Router`."""

    def __init__(
        self,
        config: Config,
        tokenizer: PromptTokenizer,
        max_prompt_tokens: int,
        replicas: Mapping[str, ReplicaClient],
        is_death: Callable[[BaseException], bool],
        link: EndpointLink | None,
        recorder: Recorder,
    ) -> None:
        self.router = Router(replicas, is_death, recorder)
        self._link, self._sandboxes = link, SandboxService(config.sandbox)
        self._rewards = RewardPool(config.reward, self._sandboxes.address)
        rollout = config.rollout
        agent_loop: AgentLoop
        if link is not None:
            agent_loop = EndpointLoop(link, rollout.max_response_tokens)
        else:
            arguments = revealed("rollout.agent_loop_args", rollout.agent_loop_args)
            agent_loop = find_agent_loop(rollout.agent_loop)(tokenizer, rollout.max_response_tokens, **arguments)
        self.maker = SampleMaker(config, tokenizer, agent_loop, max_prompt_tokens, self.router, self._rewards, recorder)

    async def start(self) -> None:
        """Start the reward workers, and sandboxes if they use some."""
        await self._rewards.start()
        if self._needs_sandboxes:
            await self._sandboxes.start()

    async def run(self) -> None:
        """Serve until cancelled. Raises the errors of the router, of the endpoint and of the sandboxes' host."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.router.run())
            if self._needs_sandboxes:
                tasks.create_task(self._sandboxes.run())
            if self._link is not None:
                tasks.create_task(self._link.run())

    async def close(self) -> None:
        await self._rewards.close()
        await self._sandboxes.close()

    @property
    def _needs_sandboxes(self) -> bool:
        return "sandboxes" in self._rewards.taken
