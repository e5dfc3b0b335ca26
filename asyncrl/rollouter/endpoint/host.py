"""The agents' endpoint with everything that serves it: sandboxes, agent processes, HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.secrets import revealed
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agent_processes.pool import AgentOptions, AgentProcesses
from asyncrl.rollouter.endpoint.distribution import TrainedDistribution
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer
from asyncrl.rollouter.endpoint.server import EndpointServer
from asyncrl.rollouter.endpoint.service import Endpoint
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sandbox.service import SandboxService

log = logging.getLogger(__name__)


class EndpointHost:
    """``start()``, then calls as of `asyncrl.rollouter.endpoint.link.EndpointClient`, then ``close()``."""

    def __init__(self, config: Config, tokenizer: PromptTokenizer, recorder: Recorder) -> None:
        self._config, self._tokenizer, self._recorder = config, tokenizer, recorder
        self._sandboxes: SandboxService | None = None
        self.keeping_sandboxes: asyncio.Task[None] | None = None  #: raises if the sandboxes' host dies again and again
        self._opened: list[Endpoint | EndpointServer | AgentProcesses] = []

    async def start(self) -> None:
        """Start the agents' processes, and listen."""
        config, agent = self._config, self._config.rollout.agent
        tokenizer = self._tokenizer
        variables: Mapping[str, str] = {}
        if agent.sandbox:
            self._sandboxes = SandboxService(config.sandbox)
            await self._sandboxes.start()
            self.keeping_sandboxes = asyncio.create_task(self._sandboxes.run())
            variables = self._sandboxes.address.variables
        agents = AgentProcesses(AgentOptions.of(agent, revealed("rollout.agent.args", agent.args), variables))
        model = os.path.basename(os.path.normpath(config.model.path))
        rollout = config.rollout
        served = ENGINES.find(rollout.engine.name).served_sampling(config)
        distribution = TrainedDistribution(
            rollout.temperature, tokenizer.stop_token_ids, served, agent.untrained == "mask"
        )
        renderer = ChatRenderer(tokenizer)
        self._endpoint = Endpoint(agent, renderer, distribution, agents, model, rollout.agent_timeout_s, self._recorder)
        server = EndpointServer(self._endpoint, agent.host, agent.port, model, rollout.max_response_tokens)
        self._opened = [self._endpoint, server, agents]
        await server.start()
        await agents.start()
        log.info("agents call %s", self._endpoint.address)

    async def attach(self, token: int) -> None:
        await self._endpoint.attach(token)

    async def send(self, token: int, commands: Sequence[Any]) -> None:
        await self._endpoint.send(token, commands)

    async def events(self, token: int) -> Sequence[Any]:
        return await self._endpoint.events(token)

    async def close(self) -> None:
        """Also after a failed start."""
        for part in self._opened:
            await part.close()
        if self.keeping_sandboxes is not None and self._sandboxes is not None:
            self.keeping_sandboxes.cancel()
            await self._sandboxes.close()
