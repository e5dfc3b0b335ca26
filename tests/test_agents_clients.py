"""Unmodified clients as agents, each in an environment of its own: exactly what they sampled is trained."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncrl.rollouter.agent_processes.pool import AgentOptions, AgentProcesses
from tests.support.endpoint import (
    PROMPT,
    TEMPLATE,
    EndpointSystem,
    made,
    make_model,
    sampled_tokens,
    trained_tokens,
    writing,
)
from tests.support.faults import audit, starting
from tests.support.tiny import make_inputs
from tests.support.token_audit import audit_tokens

pytestmark = [pytest.mark.agents, pytest.mark.timeout(400)]

#: of whole runs
OPTIONS = (
    "rollout.max_response_tokens=960",
    "rollout.engine.max_context_tokens=1024",
    "reward.function=none",
    "async_training.staleness_threshold=0",
    "trainer.total_steps=3",
)

CLIENTS = ["openai", "anthropic", "openai_agents", "smolagents"]
ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def interpreter(client: str) -> str:
    """Of the environment that ``make test-agents`` creates beside this one."""
    return f"{sys.prefix}-agent-{client}/bin/python"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def serving(model: Path, agent: str, writes, args=None, **options):
    """The system that serves ``agent``, a client and a function of its agent.py."""
    client, function = agent.split(".")
    path = f"tests.agents.{client}.agent:{function}"
    agents = AgentProcesses(AgentOptions(path=path, python=interpreter(client), args=args or {}))
    await agents.start()
    try:
        limits = {"max_response_tokens": 20000, "agent_timeout_s": 120.0} | options
        async with EndpointSystem(model, agents, writes, **limits) as system:
            yield system
    finally:
        await agents.close()


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


BERN, OSLO = hermes("weather", city="Bern"), hermes("weather", city="Oslo")
LOOKS = f"Let me see.\n{BERN}\n{OSLO}"
THINKS, THINKS_AGAIN = (f"<think>\nhm\n</think>\n\n{text}" for text in (BERN, "Sunny."))
LONG = "The answer is 3. " * 20  # more than one piece of a stream
CODE = "Thought: look.\n<code>\nprint(weather('Bern'))\n</code>"
FINAL_CODE = "<code>\nfinal_answer(weather('Bern'))\n</code>"


class Case(NamedTuple):
    """What the policy writes to an agent, how the prompts of its calls are made, and the sequences that they are."""

    agent: str
    args: dict[str, Any]
    texts: tuple[Any, ...]
    counted: dict[str, int]
    sequences: int

    def __str__(self) -> str:
        return " ".join([self.agent, *(f"{name}={value}" for name, value in self.args.items())])


def case(agent: str, *texts: Any, branched: str = "", sequences: int = 0, more: Any = None, **args: Any) -> Case:
    """All calls but the first continue what the engine had, but one, if it is ``branched`` for this reason."""
    counted = {"rendered": 1}
    if continuing := len(texts) - 1 - bool(branched):
        counted["bridged"] = continuing
    if branched:
        counted |= {"branched": 1, f"branched/{branched}": 1}
    return Case(agent, args, texts, more or counted, sequences or 1 + bool(branched))


REFUSED = {"rendered": 1, "refused": 1}
CASES = [
    case("openai.chat", "3", "Yes."),
    case("openai.chat_streamed", LONG, "Yes."),
    case("openai.chat_tools", LOOKS, BERN, "Sunny."),
    case("openai.chat_tools", THINKS, THINKS_AGAIN),
    case("openai.chat_tools_streamed", LOOKS, BERN, "Sunny."),
    case("openai.responses", "3", "Yes."),
    case("openai.responses_streamed", LONG, "Yes."),
    case("openai.responses_tools", LOOKS, BERN, "Sunny."),
    case("openai.responses_tools", THINKS, THINKS_AGAIN),
    case("openai.completions", " a time", " is near", more={"given": 2}, sequences=2),
    case("openai.errors", "3", more=REFUSED),
    case("anthropic.chat", "3", "Yes."),
    case("anthropic.chat_streamed", LONG, "Yes."),
    case("anthropic.tools", LOOKS, BERN, "Sunny."),
    case("anthropic.tools", THINKS, THINKS_AGAIN),
    case("anthropic.tools", LOOKS, BERN, "Sunny.", streamed=True),
    case("anthropic.tools", THINKS, THINKS_AGAIN, streamed=True),
    case("anthropic.tool_runner", LOOKS, BERN, "Sunny."),
    case("anthropic.tool_runner", LOOKS, BERN, "Sunny.", thread=False),
    case("anthropic.errors", "3", more=REFUSED),
    case("openai_agents.tools", LOOKS, BERN, "Sunny.", api="chat"),
    case("openai_agents.tools", LOOKS, BERN, "Sunny.", api="responses"),
    case("openai_agents.tools", LOOKS, BERN, "Sunny.", api="chat", streamed=True),
    case("openai_agents.tools", LOOKS, BERN, "Sunny.", api="responses", streamed=True),
    # its model for chat completions leaves reasoning out of the history, but for those of DeepSeek
    case("openai_agents.tools", THINKS, THINKS_AGAIN, api="chat", branched="answer_rewritten"),
    case("openai_agents.tools", THINKS, THINKS_AGAIN, api="responses"),
    case("openai_agents.two_questions", BERN, "Sunny.", "Yes.", api="chat"),
    case("openai_agents.two_questions", BERN, "Sunny.", "Yes.", api="responses"),
    case("openai_agents.server_keeps_the_conversation", BERN, "Sunny.", "Yes."),
    # the second agent has other instructions and tools
    *(
        case(
            "openai_agents.handoff",
            hermes("transfer_to_forecaster"),
            BERN,
            "Sunny.",
            api=api,
            branched="new_conversation",
        )
        for api in ("chat", "responses")
    ),
    # its history is text, to which it adds what it executed: it continues what was sampled where that is what the
    # tokenizer gives, and else branches
    case("smolagents.code", CODE, FINAL_CODE),
    case("smolagents.code", CODE, FINAL_CODE, streamed=True),
    case("smolagents.code", [*CODE], FINAL_CODE, branched="new_conversation"),
    case("smolagents.two_questions", "<code>\nfinal_answer(1)\n</code>", "<code>\nfinal_answer('Yes.')\n</code>"),
    # it writes tool calls and their results as text of the assistant and the user
    case("smolagents.tools", BERN, hermes("final_answer", answer="Sunny."), branched="new_conversation"),
    case("smolagents.tools", BERN, hermes("final_answer", answer="Sunny."), branched="new_conversation", streamed=True),
    case("smolagents.forced_tools", FINAL_CODE, more=REFUSED),
]


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_exactly_what_an_agent_sampled_is_trained(model, case):
    async with serving(model, case.agent, writing(*case.texts), case.args) as system:
        sample = await made(system)
        assert sample.reward == 1.0
        assert len(system.policy.log) == len(case.texts)
        assert system.counted() == case.counted
        assert len(sample.sequences) == case.sequences


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_that_forces_tools_works_untrained_where_that_is_masked(model, streamed):
    """Each call is begun up to the name of one of its tools, which the policy chooses."""
    begun = '<tool_call>\n{"name": "'
    texts = [text.removeprefix(begun) for text in (BERN, hermes("final_answer", answer="Sunny."))]
    agent, args = "smolagents.forced_tools_then_code", {"streamed": streamed}
    async with serving(model, agent, writing(*texts, FINAL_CODE), args, untrained="mask") as system:
        (sample,) = await system.samples()
        assert sample.reward == 1.0
        *forced, trained = system.policy.log
        assert all(system.tokenizer.hf.decode(prompt).endswith(begun) for prompt, _ in forced)
        assert trained_tokens(sample, system.tokenizer.encode(PROMPT)) == sampled_tokens([trained])
        untrained = sum(len(tokens) for _, tokens in forced)
        assert system.counted()["untrained_tokens/other_distribution"] == untrained


@pytest.mark.parametrize("agent", ["openai.chat", "openai.chat_streamed", "anthropic.chat"])
async def test_a_call_that_is_cut_is_repeated_by_its_client_and_gets_what_was_sampled(model, agent):
    async with serving(model, agent, writing("3", "Yes.")) as system:
        system.policy.held.clear()
        making = asyncio.create_task(made(system))
        while not (system.policy.requests or making.done()):
            await asyncio.sleep(0.01)
        system.cut()
        system.policy.held.set()
        sample = await making
        assert sample.reward == 1.0
        assert len(system.policy.log) == 2
        assert system.counted() == {"rendered": 1, "bridged": 1, "repeated_calls": 1}


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_a_run_trains_an_agent_of_a_client_to_the_end(start, client):
    agent = (
        f"rollout.agent.path=tests.agents.{client}.agent:dialogue",
        f"rollout.agent.python={interpreter(client)}",
    )
    run = start(*agent)
    assert run.wait(360) == 0, run.text
    audit(run.folder, [2] * 3, staleness_bound=0)
    assert len(kl := run.column("mismatch/fresh_kl")) == 3
    assert max(kl) < 1e-4  # what is trained is what was sampled
    assert run.column("rollout/turns") == [2 if client == "smolagents" else 3] * 3


ENGINES = {
    "native": ("rollout.engine.name=tests.support.logged_engine:NATIVE",),
    "vllm": (
        "rollout.engine.name=tests.support.logged_engine:VLLM",
        f"rollout.engine.python={sys.prefix}-vllm/bin/python",
        "ray.placement_timeout_s=120",
        "supervision.answer_s=300",
    ),
}


@pytest.fixture(scope="module")
def fluent_inputs(tmp_path_factory):
    """Inputs of a tiny run whose policy ends its answers, half of which call a tool."""
    demonstrations = "tests.support.random_agent:demonstrations"
    folder = make_inputs(tmp_path_factory.mktemp("fluent"), warm_start_steps=60, demonstrations=demonstrations)
    (folder / "checkpoint/chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.mark.timeout(700)
@pytest.mark.parametrize("engine", ["native", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_run_trains_exactly_what_its_engine_sampled_for_agents_of_all_clients(fluent_inputs, tmp_path, engine):
    """A group has two samples of each client, of which one streams, one of an agent that uses all parameters of a call,
    and one that also cuts its connections."""
    agents = [[interpreter(client), f"tests.agents.{client}.agent:dialogue"] for client in CLIENTS for _ in range(2)]
    agents += [[interpreter("openai"), "tests.agents.openai.agent:options"], ["", "tests.support.random_agent:solve"]]
    more = (
        "rollout.agent.path=tests.support.client_agents:solve",
        f"rollout.agent.args={json.dumps({'agents': agents})}",
        "rollout.agent.untrained=mask",
        "rollout.max_turns=24",
        f"rollout.n={len(agents)}",
        f"rollout.min_group_size={len(agents)}",
        "rollout.max_consecutive_drops=3",
        "reward.function=tests.support.tiny:length_reward",  # for agents that a limit ends
        "async_training.staleness_threshold=1",
        "checkpoint.every_steps=0",  # the queue's records are kept for the audit
        "trainer.max_tokens_per_micro_batch=4096",
        "trainer.optimizer.lr=1e-5",  # the policy does not forget how to end an answer
    )
    with starting(fluent_inputs, tmp_path / "run", *OPTIONS, *ENGINES[engine], *more) as start:
        run = start()
        assert run.wait(600) == 0, run.text
    audit(run.folder, [2] * 3)
    assert max(run.column("mismatch/fresh_kl")) < 1e-4
    assert run.column("rollout/agent/bridged")[-1] > 0
    found = audit_tokens(run.folder)
    assert found.samples == 3 * 2 * len(agents)
    assert found.exact == found.trained > 0
    reasons = ("never_delivered", "other_distribution", "interrupted")
    untrained = sum(max(run.column(f"rollout/agent/untrained_tokens/{reason}"), default=0) for reason in reasons)
    assert found.unexplained + found.why["of several equal calls"] <= untrained


EXAMPLES = {
    "openai_agent": ("openai", [hermes("add", a=1, b=2), "It is 3"]),
    "anthropic_agent": ("anthropic", ["It is 4", "It is 3"]),
    "cli_agent": ("openai", ["It is 3"]),
}


@pytest.mark.parametrize("name", EXAMPLES)
async def test_the_examples_of_the_docs(model, monkeypatch, name):
    client, texts = EXAMPLES[name]
    file = DOCS / f"examples/{name}.py"
    assert file.read_text() in (DOCS / "agents.md").read_text()
    monkeypatch.chdir(DOCS / "examples")
    how = {"command": ("python", str(file))} if name == "cli_agent" else {"path": f"{name}:solve"}
    agents = AgentProcesses(AgentOptions(**how, python=interpreter(client)))
    await agents.start()
    try:
        async with EndpointSystem(model, agents, writing(*texts)) as system:
            sample = await made(system)
            assert sample.reward == 1.0
            assert len(sample.sequences) == 1
            assert system.counted().get("bridged", 0) == len(texts) - 1
    finally:
        await agents.close()
