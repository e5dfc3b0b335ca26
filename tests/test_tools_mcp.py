"""The built-in agent with tools of real MCP servers."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from asyncrl.rollouter.agent_processes.pool import AgentFailed, AgentOptions, AgentProcesses, AgentTask
from tests.support.endpoint import EndpointSystem, made, make_model, writing

pytestmark = pytest.mark.gym

PROGRAM = [sys.executable, "-m", "tests.support.mcp_server"]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@contextlib.asynccontextmanager
async def serving(model, writes, **servers):
    agents = AgentProcesses(AgentOptions(path="asyncrl.tools.agent:AGENT", args={"mcp": servers}))
    await agents.start()
    try:
        async with EndpointSystem(model, agents, writes, max_response_tokens=20000, agent_timeout_s=120.0) as system:
            yield system
    finally:
        await agents.close()


@contextlib.contextmanager
def http_server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([*PROGRAM, str(port)]) as server:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.terminate()


def told(system):
    return system.tokenizer.hf.decode(system.policy.log[-1][0])


TURNS = [call("add", a=2, b=40), call("count") + "\n" + call("count"), call("add", a="x"), call("fail"), "Done."]


@pytest.mark.parametrize("over", ["standard input", "HTTP"])
async def test_tools_of_a_server_are_called_and_their_failures_told(model, over):
    with http_server() if over == "HTTP" else contextlib.nullcontext() as url:
        server = {"url": url} if url else {"command": PROGRAM, "env": {"PYTHONPATH": os.getcwd()}}
        async with serving(model, writing(*TURNS), numbers=server) as system:
            sample = await made(system)
            text = told(system)
    assert "<tool_response>\n42\n</tool_response>" in text, text
    assert "it is broken" in text or "fail" in text
    assert sample.metrics == {"turns": 5, "tool_calls": 5, "tool_errors": 2}
    assert len(sample.sequences) == 1


async def test_each_sample_has_a_process_of_its_own(model):
    server = {"command": PROGRAM, "env": {"PYTHONPATH": os.getcwd()}}
    async with serving(
        model, lambda prompt: call("count") if "tool_response" not in prompt else "Done.", n=server
    ) as system:
        for _ in range(2):
            await made(system)
            assert "<tool_response>\n1\n</tool_response>" in told(system)


async def test_a_server_that_does_not_start_fails_the_sample_with_its_name(model):
    async with serving(model, writing("never"), broken={"command": ["/bin/false"]}) as system:
        (failed,) = await system.samples()
    assert "mcp.broken: the server does not serve" in failed.message


@pytest.mark.parametrize("over", ["standard input", "HTTP"])
async def test_a_server_that_dies_fails_the_sample_as_its_environment(model, over):
    with http_server() if over == "HTTP" else contextlib.nullcontext() as url:
        server = {"url": url} if url else {"command": PROGRAM, "env": {"PYTHONPATH": os.getcwd()}}
        async with serving(model, writing(call("add", a=1, b=2), call("die"), "Done."), numbers=server) as system:
            (failed,) = await system.samples()
    assert failed.reason == "infra", failed
    assert "mcp" in failed.message


@pytest.mark.parametrize("over", ["standard input", "HTTP"])
async def test_a_sample_that_fails_beside_a_server_fails_for_its_own_reason(over):
    with http_server() if over == "HTTP" else contextlib.nullcontext() as url:
        server = {"url": url} if url else {"command": PROGRAM, "env": {"PYTHONPATH": os.getcwd()}}
        agents = AgentProcesses(AgentOptions(path="asyncrl.tools.agent:AGENT", args={"mcp": {"numbers": server}}))
        urls = {"base_url": "http://127.0.0.1:9/v1", "anthropic_base_url": "http://127.0.0.1:9"}
        unanswered = AgentTask("e0-000007", 0, [], "2 + 2?", "4", "m", **urls, api_key="key")
        await agents.start()
        try:
            with pytest.raises(AgentFailed, match="Cannot connect to host") as failed:
                await agents.run(unanswered)
        finally:
            await agents.close()
    assert (failed.value.reason, failed.value.retry) == ("agent_error", False)
