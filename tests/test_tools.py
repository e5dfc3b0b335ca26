"""The built-in agent with tools: what the model is told, and that exactly what it wrote is trained."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from asyncrl.config.schema import SandboxConfig
from asyncrl.rollouter.agent_processes.pool import AgentError, AgentOptions, AgentProcesses
from asyncrl.sandbox.base import SandboxFailed
from asyncrl.sandbox.service import SandboxService
from asyncrl.tools.base import ToolError, text_argument
from asyncrl.tools.calculator import compute
from asyncrl.tools.sandboxed import SampleSandbox
from tests.support.endpoint import TEMPLATE, EndpointSystem, made, make_model, writing
from tests.support.faults import audit, starting
from tests.support.tiny import make_inputs

AGENT = "asyncrl.tools.agent:AGENT"


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("0.1 + 0.2", "0.3"),
        ("2 ** 100", str(2**100)),
        ("(1/3) * 3", "1"),
        ("7 // 2 - 7 % 2", "2"),
        ("-sqrt(16) + abs(-2)", "-2"),
        ("123456789 * 987654321", "121932631112635269"),
        ("2^10", "1024"),
    ],
)
def test_the_calculator_is_exact(expression, value):
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 +", "1/0", "x", "__import__('os')", "9**9**9", "'a' * 3", "1 if 1 else 2", "(1).real", "1" * 501]
    + ["(-8)^(1/3)", "10**400/3", "1e-308**4096", "floor(9)**9**9", "round(7)**5000", "2**4000 * floor(2**4000)"],
)
def test_what_it_cannot_compute_it_says(expression):
    with pytest.raises(ToolError):
        compute(expression)


def test_half_of_a_surrogate_pair_is_the_model_s_mistake():
    with pytest.raises(ToolError, match="code: expected text"):
        text_argument(json.loads(r'{"code": "\ud83d"}'), "code")


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def serving(model, writes, sandbox=True, **args):
    service = SandboxService(SandboxConfig(memory_mb=128))
    if sandbox:
        await service.start()
    agents = AgentProcesses(AgentOptions(path=AGENT, args=args, variables=service.address.variables if sandbox else {}))
    try:
        await agents.start()
        async with EndpointSystem(model, agents, writes, max_response_tokens=20000) as system:
            yield system
    finally:
        await agents.close()
        await service.close()


def told(system):
    """What the model reads at its last call."""
    tokens, _ = system.policy.log[-1]
    return system.tokenizer.hf.decode(tokens)


async def test_a_calculator_needs_no_sandbox(model):
    answers = writing(call("calculator", expression="12 * 12"), "It is 144.")
    async with serving(model, answers, sandbox=False, tools=["calculator"]) as system:
        sample = await made(system)
        assert "<tool_response>\n144\n</tool_response>" in told(system)
        assert sample.metrics == {"turns": 2, "tool_calls": 1, "tool_errors": 0}
        assert system.counted() == {"rendered": 1, "bridged": 1}


@pytest.mark.agents
async def test_tools_share_the_sandbox_of_a_sample(model):
    turns = [
        call("edit", path="a.py", old="", new="print(6 * 6)\n"),
        call("edit", path="a.py", old="6 * 6", new="6 * 7"),
        call("shell", command="python3 a.py; exit 3"),
        call("python", code="print(open('a.py').read().strip())"),
        "Done.",
    ]
    async with serving(model, writing(*turns), tools=["python", "shell", "edit"]) as system:
        sample = await made(system)
        text = told(system)
        for expected in ("a.py: 1 lines", "42\n[exit code 3]", "\nprint(6 * 7)\n"):
            assert expected in text, text
        assert sample.metrics == {"turns": 5, "tool_calls": 4, "tool_errors": 0}
        assert len(sample.sequences) == 1


@pytest.mark.agents
async def test_several_calls_of_a_turn_run_at_once(model):
    both = "\n".join(call("shell", command=f"date +%s%N > {n}; sleep 1") for n in "ab")
    apart = call("shell", command="echo $((($(cat a) - $(cat b)) / 1000000000))")  # seconds
    async with serving(model, writing(both, apart, "Yes."), tools=["shell"]) as system:
        sample = await made(system)
        assert sample.metrics["tool_calls"] == 3
        assert "<tool_response>\n0\n</tool_response>" in told(system)


async def test_a_late_failure_does_not_close_the_sandbox_that_replaced_the_broken_one():
    class Made:
        closed = False

        async def close(self):
            self.closed = True

    made: list[Made] = []

    async def create():
        made.append(Made())
        return made[-1]

    sample = SampleSandbox(SimpleNamespace(create=create), 1.0)
    broken = await sample.get()
    await sample.failed(broken, SandboxFailed("model", "it ended its sandbox"))
    fresh = await sample.get()
    await sample.failed(broken, SandboxFailed("model", "it ended its sandbox"))
    assert (broken.closed, fresh.closed, await sample.get()) == (True, False, fresh)


@pytest.mark.agents
async def test_the_model_is_told_of_its_mistakes_and_they_are_counted(model):
    turns = [
        call("nothing", a=1),
        call("python", program="1"),
        call("edit", path="none", old="a", new="b"),
        call("python", code="raise SystemExit('bad')"),
        call("shell", command="sleep 60"),
        call("python", code="held = ['x' * (1 << 20) for _ in range(1000)]"),
        "Sorry.",
    ]
    async with serving(model, writing(*turns), tools=["python", "edit", "shell"], timeout_s=1.0) as system:
        sample = await made(system)
        text = told(system)
        for expected in (
            "error: there is no tool 'nothing'; there is python, edit, shell",
            "error: code: expected a string, found None",
            "error: No such file or directory: /sandbox/none",
            "bad\n[exit code 1]",
            "[ended after 1 s, its time limit]",
        ):
            assert expected in text, text
        assert "memory" in text or "MemoryError" in text
        assert sample.metrics["tool_errors"] >= 3
        assert sample.metrics["turns"] == 7


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"tools": ["hammer"]}, "tools: expected a list of python, shell, edit, calculator; found ['hammer']"),
        ({}, "tools: expected some of"),
        ({"tools": ["python"]}, "set rollout.agent.sandbox=true"),
        ({"tools": ["calculator"], "turns": 0}, "turns: expected at least 1"),
        ({"mcp": {"a": {"command": "one"}}}, "mcp.a: expected command (a list)"),
    ],
)
async def test_what_it_cannot_serve_is_refused_when_it_starts(args, problem):
    agents = AgentProcesses(AgentOptions(path=AGENT, args=args))
    with pytest.raises(AgentError) as refused:
        await agents.start()
    await agents.close()
    assert problem in str(refused.value)


@pytest.mark.agents
@pytest.mark.slow  # tests/test_rewards_unit_tests.py has a run with sandboxes in the short form
@pytest.mark.timeout(400)
def test_a_run_trains_an_agent_with_sandboxed_tools(tmp_path):
    demonstrations = "tests.support.tool_demonstrations:shell"
    inputs = make_inputs(tmp_path / "inputs", warm_start_steps=60, demonstrations=demonstrations)
    (inputs / "checkpoint/chat_template.jinja").write_text(TEMPLATE)
    options = (
        f"rollout.agent.path={AGENT}",
        "rollout.agent.sandbox=true",
        "rollout.agent.args={tools: [shell], turns: 3}",
        "reward.function=tests.support.tiny:length_reward",
        "rollout.max_response_tokens=960",
        "rollout.engine.max_context_tokens=1024",
        "trainer.total_steps=2",
        "async_training.staleness_threshold=0",
    )
    with starting(inputs, tmp_path / "run", *options) as start:
        run = start()
        assert run.wait(360) == 0, run.text
    audit(run.folder, [2] * 2, staleness_bound=0)
    assert max(run.column("mismatch/fresh_kl")) < 1e-4
    assert run.column("rollout/tool_calls")[0] > 0
