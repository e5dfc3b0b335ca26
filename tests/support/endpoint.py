"""The endpoint in one process: real HTTP, router and rollouter's side; agents and policy as a test writes them."""

import asyncio
import json
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from asyncrl.config.schema import AgentConfig, Config, RolloutConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.agent_processes.pool import AgentFailed, AgentOutcome, AgentProcesses
from asyncrl.rollouter.endpoint.distribution import TrainedDistribution
from asyncrl.rollouter.endpoint.link import EndpointLink
from asyncrl.rollouter.endpoint.loop import EndpointLoop
from asyncrl.rollouter.endpoint.rendering.renderer import ChatRenderer
from asyncrl.rollouter.endpoint.server import EndpointServer
from asyncrl.rollouter.endpoint.service import Endpoint
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import GroupTask, SampleMaker
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from tests.support.scripted import Death, ScriptedReplica, is_death

#: tools and reasoning as in Hermes and Qwen3: reasoning is rendered only after the last message of a user
TEMPLATE = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == "tool" %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content and loop.index0 > last.user %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
PROMPT = Prompt("e0-000000", "row:0", ({"role": "user", "content": "Compute 1+2"},), "3", extra={"level": 4})


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """A checkpoint folder whose tokenizer has this chat template."""
    from asyncrl.models.make_checkpoint import make_checkpoint

    make_checkpoint(folder, warm_start_steps=0)
    (folder / "chat_template.jinja").write_text(template)
    return folder


class Policy(ScriptedReplica):
    """Answers each request with what ``writes(text of its prompt)`` returns: a text, or texts that are tokenized one by
    one. Keeps what it sampled after which tokens: the engine's own log."""

    def __init__(self, tokenizer, writes) -> None:
        super().__init__()
        self._tokenizer, self._writes = tokenizer, writes
        self.log: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.held = asyncio.Event()  # cleared: answers wait
        self.held.set()
        self._tasks: dict[asyncio.Task, None] = {}  # in order

    async def has_requests(self, count: int) -> None:
        while len(self.requests) < count:
            await asyncio.sleep(0.01)

    def answered_to_the_dead(self) -> None:
        """Calls under way are those of a rollouter that has died."""
        for task in list(self._tasks)[:-1]:
            task.cancel()

    async def submit(self, requests):
        await super().submit(requests)
        for request in requests:
            task = asyncio.create_task(self._answer(request))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _answer(self, request):
        await self.held.wait()
        hf = self._tokenizer.hf
        written = self._writes(hf.decode(request.tokens.tolist()))
        texts = [written] if isinstance(written, str) else written
        tokens = [token for text in texts for token in hf.encode(text, add_special_tokens=False)]
        if tokens[-1] not in request.sampling.stop_token_ids:
            tokens.append(hf.eos_token_id)
        finish = FinishReason.STOP
        if len(tokens) > request.max_new_tokens:
            tokens, finish = tokens[: request.max_new_tokens], FinishReason.LENGTH
        for stop in request.sampling.stop_strings:
            for count in range(1, len(tokens) + 1):
                if stop in hf.decode(tokens[:count]):
                    tokens, finish = tokens[:count], FinishReason.STOP
                    break
        self.log.append((tuple(request.tokens.tolist()), tuple(tokens)))
        self.emit(request.id, tokens, finish)


def writing(*texts):
    """What a `Policy` writes: these, one after another, and then "plain"."""
    written = iter(texts)
    return lambda prompt: next(written, "plain")


def counting():
    """What a `Policy` writes: one, two, three, …"""
    return writing("one", "two", "three", "four", "five", "six")


class InProcessAgents:
    """Runs ``agent(task, http)`` in the test's process; ``http`` is an aiohttp session."""

    def __init__(self, agent) -> None:
        self.agent, self.tasks = agent, []

    async def run(self, task):
        self.tasks.append(task)
        async with aiohttp.ClientSession() as http:
            try:
                outcome = await self.agent(task, http)
            except AgentFailed:
                raise
            except (Exception, pytest.fail.Exception) as e:  # the latter is of pytest.raises
                raise AgentFailed("agent_error", f"{type(e).__name__}: {e}", retry=False) from e
        return outcome if isinstance(outcome, AgentOutcome) else AgentOutcome(outcome, {})


class Lost(RuntimeError):
    """Data of a call is lost, with the machine that had it."""


class MortalEndpoint:
    """The endpoint as the rollouter sees it. Once it has died, all calls raise Death; those under way at once, unless
    ``silent``: then only later ones do. ``held``: its events never arrive. ``loses``: the next ones are lost."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held, self.hangs, self.loses, self.dead = False, False, False, False

    def die(self, silent: bool = False) -> None:
        self.dead = True
        if not silent:
            self._death.set_result(None)

    async def attach(self, token):
        await self._call("attach", token)

    async def send(self, token, commands):
        await self._call("send", token, commands)

    async def events(self, token):
        return await self._call("events", token)

    async def _call(self, name, *args):
        if self.dead:
            raise Death
        working = asyncio.create_task(self._work(name, *args))
        try:
            await asyncio.wait([working, self._death], return_when=asyncio.FIRST_COMPLETED)
            if self._death.done():
                raise Death
            return working.result()
        finally:
            await cancelled([working])

    async def _work(self, name, *args):
        result = await getattr(self._endpoint, name)(*args)
        if self.dead or self.hangs or (self.held and name == "events"):
            await asyncio.Event().wait()
        if self.loses and name == "events" and result:
            self.loses = False
            raise Lost
        return result


class EndpointSystem:
    """``async with EndpointSystem(model, agent, writes) as system: await system.samples()``. ``agent``: a coroutine
    function, see `InProcessAgents`, or processes that have started."""

    def __init__(self, model: Path, agent, writes, n: int = 1, **options) -> None:
        agent_options = {k: options.pop(k) for k in ("untrained", "retries") if k in options}
        self.prompt = options.pop("prompt", PROMPT)
        self._orphan_s = options.pop("orphan_s", 30.0)
        served = options.pop("served", frozenset({"temperature", "top_p", "top_k", "min_p", "logit_bias", "grammar"}))
        limits = {"max_response_tokens": 2000, "agent_timeout_s": 30.0, "n": n, "min_group_size": 1} | options
        self.config = Config(rollout=RolloutConfig(**limits, agent=AgentConfig(path="in:process", **agent_options)))
        self.tokenizer = PromptTokenizer(model, True, self.config.rollout.stop_token_ids)
        self.distribution = TrainedDistribution(
            1.0, self.tokenizer.stop_token_ids, served, agent_options.get("untrained") == "mask"
        )
        self.policy = Policy(self.tokenizer, writes)
        self.recorder = Recorder("endpoint")
        self.agents = agent if isinstance(agent, AgentProcesses) else InProcessAgents(agent)
        self.renderer = ChatRenderer(self.tokenizer)
        self.rollout_recorder = Recorder("rollouter")
        self.endpoint = self._new_endpoint()
        self.partials = [PartialSample() for _ in range(n)]
        self.token = 0
        self._tasks: list[asyncio.Task] = []

    def _new_endpoint(self) -> Endpoint:
        return Endpoint(
            self.config.rollout.agent, self.renderer, self.distribution, self.agents, "tiny", self._orphan_s,
            self.recorder,
        )  # fmt: skip

    async def __aenter__(self):
        await self._listen()
        await self.attach()
        return self

    async def _listen(self) -> None:
        self.server = EndpointServer(self.endpoint, "127.0.0.1", 0, "tiny", 2000)
        await self.server.start()
        self.client = MortalEndpoint(self.endpoint)

    async def __aexit__(self, *_):
        await cancelled(self._tasks)
        await self.endpoint.close()
        await self.server.close()

    async def attach(self) -> None:
        """Another rollouter takes the place of the one before, if there was one."""
        await cancelled(self._tasks)
        self.token += 1
        self.policy.attached = 0
        self.router = Router({"a": self.policy}, is_death)
        self.link = EndpointLink(self.client, self.token, Death, Lost)
        loop = EndpointLoop(self.link, self.config.rollout.max_response_tokens)
        self.maker = SampleMaker(self.config, self.tokenizer, loop, 1000, self.router, None, self.rollout_recorder)
        self._tasks = [asyncio.create_task(self.router.run()), asyncio.create_task(self.link.run())]

    async def lose_endpoint(self, silent: bool = False) -> None:
        """The endpoint's process dies, and its agents with it."""
        self.client.die(silent)
        self.cut()
        await self.endpoint.close()
        await self.server.close()

    async def replace_endpoint(self) -> None:
        self.endpoint = self._new_endpoint()
        await self._listen()
        self.link.replace(self.client)

    async def samples(self):
        task = GroupTask(
            self.prompt, self.tokenizer.encode(self.prompt),
            SamplingParams(stop_token_ids=self.tokenizer.stop_token_ids),
            f"{self.prompt.uid}/{self.token}", self.prompt.uid, False,
        )  # fmt: skip
        making = asyncio.create_task(self.maker.make(task, self.partials))
        try:
            done, _ = await asyncio.wait([making, *self._tasks], timeout=150, return_when=asyncio.FIRST_COMPLETED)
            for failed in done - {making}:
                failed.result()
            return await asyncio.wait_for(making, 1)
        finally:
            await cancelled([making])

    def cut(self) -> None:
        """Every connection of its clients."""
        for connection in self.server._runner.server.connections:
            connection.transport.abort()

    def counted(self, prefix: str = "rollout/agent/") -> dict[str, float]:
        batch = self.recorder.drain()
        found = {k.removeprefix(prefix): v for k, v in batch.counters.items() if k.startswith(prefix)}
        found.pop("render_s", None)
        return found


async def chat(task, http, messages, headers=None, **body):
    """The message that answers a chat completion. Raises Refused for an error."""
    found = await post(task, http, "/v1/chat/completions", {"model": "m", "messages": messages, **body}, headers)
    return found["choices"][0]["message"]


class Refused(Exception):
    def __init__(self, status: int, body: dict) -> None:
        super().__init__(f"{status} {body}")
        self.status, self.body = status, body


async def post(task, http, path, body, headers=None):
    base = task.anthropic_base_url
    headers = {"Authorization": f"Bearer {task.api_key}"} | (headers or {})
    async with http.post(base + path, json=body, headers=headers) as response:
        found = json.loads(await response.text())
        if response.status != 200:
            raise Refused(response.status, found)
        return found


async def made(system: EndpointSystem) -> Sample:
    """The system's only sample, which trains exactly what the policy sampled."""
    (sample,) = await system.samples()
    assert isinstance(sample, Sample), sample
    prompt = system.tokenizer.encode(system.prompt)
    assert sorted(trained_tokens(sample, prompt)) == sorted(sampled_tokens(system.policy.log))
    return sample


def sequence_texts(system: EndpointSystem, sample: Sample) -> list[str]:
    return [system.tokenizer.hf.decode(q.tokens.tolist()) for q in sample.sequences]


def trained_tokens(sample, prompt: np.ndarray) -> list[tuple[tuple[int, ...], int]]:
    """Each trained token, after all tokens before it. ``prompt``: int32 [P], the group's."""
    found = []
    for q in sample.sequences:
        tokens = [*prompt[: q.prefix].tolist(), *q.tokens.tolist()]
        start = len(tokens) - len(q.tokens)
        found += [(tuple(tokens[: start + i]), tokens[start + i]) for i in np.flatnonzero(q.loss_mask)]
    return found


def sampled_tokens(log) -> list[tuple[tuple[int, ...], int]]:
    """The same of what the engine sampled."""
    return [((*prompt, *tokens[:i]), tokens[i]) for prompt, tokens in log for i in range(len(tokens))]
