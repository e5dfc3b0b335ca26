"""The endpoint: what agents sample is trained token by token as the engine sampled it, or not at all."""

import asyncio
import json
from types import SimpleNamespace

import aiohttp
import pytest

from asyncrl.observability.telemetry.clock import now_s
from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.agent_processes.pool import AgentError, AgentFailed, AgentOutcome
from asyncrl.rollouter.partial import PartialSample
from asyncrl.rollouter.samples import FailedSample
from asyncrl.types.samples import FinishReason, Sample
from tests.support.endpoint import (
    PROMPT,
    TEMPLATE,
    WEATHER,
    EndpointSystem,
    Refused,
    chat,
    counting,
    made,
    make_model,
    post,
    sampled_tokens,
    trained_tokens,
)

USER = [dict(m) for m in PROMPT.messages]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


async def test_a_single_turn_trains_the_tokens_of_the_engine(model):
    async def agent(task, http):
        answer = await chat(task, http, task.messages)
        assert answer["content"] == "one"
        return 0.5

    async with EndpointSystem(model, agent, counting()) as system:
        sample = await made(system)
        assert (sample.reward, sample.finish) == (0.5, FinishReason.STOP)
        assert [q.prefix for q in sample.sequences] == [len(system.tokenizer.encode(PROMPT))]
        assert sample.messages == [*USER, {"role": "assistant", "content": "one"}]
        assert system.counted() == {"rendered": 1}


async def test_equal_calls_are_new_samples_unless_they_repeat_another(model):
    async def agent(task, http):
        body = {"model": "m", "messages": task.messages}

        async def content(**headers):
            found = await post(task, http, "/v1/chat/completions", body, headers)
            return found["choices"][0]["message"]["content"]

        assert await content() == "one"
        assert await content(**{"x-stainless-retry-count": "1"}) == "one"
        assert await content() == "two"  # best of n
        assert await content(**{"Idempotency-Key": "a"}) == "three"
        assert await content(**{"Idempotency-Key": "a"}) == "three"
        assert await content(**{"x-stainless-retry-count": "1"}) == "four"  # all others have reached the client
        with pytest.raises(Refused, match="Idempotency-Key"):
            await post(task, http, "/v1/chat/completions", {**body, "max_tokens": 1}, {"Idempotency-Key": "a"})

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)
        assert system.counted()["repeated_calls"] == 2


async def test_a_retry_gets_the_answer_of_the_call_that_was_cut(model):
    async def agent(task, http):
        body = {"model": "m", "messages": task.messages}
        system.policy.held.clear()
        cut = asyncio.create_task(post(task, http, "/v1/chat/completions", body))
        await system.policy.has_requests(1)
        cut.cancel()
        await asyncio.wait([cut])
        retry = asyncio.create_task(
            post(task, http, "/v1/chat/completions", body, {"x-stainless-retry-count": "1"})
        )  # fmt: skip
        await asyncio.sleep(0.1)
        system.policy.held.set()
        assert (await retry)["choices"][0]["message"]["content"] == "one"

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)
        assert len(system.policy.log) == 1


async def test_an_answer_that_was_never_delivered_and_sampled_again_is_not_trained(model):
    async def agent(task, http):
        body = {"model": "m", "messages": task.messages}
        system.policy.held.clear()
        cut = asyncio.create_task(post(task, http, "/v1/chat/completions", body))
        await system.policy.has_requests(1)
        cut.cancel()
        await asyncio.wait([cut])
        again = asyncio.create_task(post(task, http, "/v1/chat/completions", body))
        await asyncio.sleep(0.1)
        system.policy.held.set()
        await again

    async with EndpointSystem(model, agent, counting()) as system:
        (sample,) = await system.samples()
        first, second = system.policy.log
        assert sum(int(q.loss_mask.sum()) for q in sample.sequences) == len(second[1])
        assert system.counted()["untrained_tokens/never_delivered"] == len(first[1])


async def test_another_distribution_is_refused_or_served_untrained(model):
    async def agent(task, http):
        await chat(task, http, task.messages, temperature=1.0, top_p=1, frequency_penalty=0)
        for asked in ({"temperature": 0.3}, {"top_p": 0.9}, {"logit_bias": {"5": 1}}, {"tool_choice": "required"}):
            with pytest.raises(Refused, match=f"400.*{next(iter(asked))}") as refused:
                await chat(task, http, task.messages, tools=[WEATHER], **asked)
            assert "the distribution that is trained" in str(refused.value)
        assert "tool_choice: expected 'auto', " in str(refused.value)

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)
        assert system.counted() == {"rendered": 1, "refused": 4}

    async def masked(task, http):
        greedy = await chat(task, http, task.messages, temperature=0, top_k=4)
        await chat(task, http, [*task.messages, greedy, {"role": "user", "content": "go"}])
        with pytest.raises(Refused, match=r"min_tokens.*never served"):
            await chat(task, http, task.messages, min_tokens=5)

    async with EndpointSystem(model, masked, counting(), untrained="mask") as system:
        (sample,) = await system.samples()
        first, second = system.policy.log
        prompt = system.tokenizer.encode(PROMPT)
        assert trained_tokens(sample, prompt) == sampled_tokens([second])
        assert system.counted()["untrained_tokens/other_distribution"] == len(first[1])
        sampling = next(iter(system.policy.requests.values())).sampling
        assert (sampling.temperature, repr(sampling.top_k)) == (0.0, "4")  # vLLM takes no 4.0


async def test_keys(model):
    async def agent(task, http):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer sk-asyncrl-x"}, {"x-api-key": "y"}):
            with pytest.raises(Refused, match=r"401.*API key") as refused:
                await post(task, http, "/v1/chat/completions", {"model": "m", "messages": []}, headers)
            assert refused.value.body["error"]["type"] == "authentication_error"
        keys.append(task)
        path = f"/sessions/{task.api_key}/v1/chat/completions"
        await post(task, http, path, {"model": "m", "messages": task.messages}, {"Authorization": ""})

    keys = []
    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)

        async def late(task, http):
            with pytest.raises(Refused, match=r"409.*has ended"):
                await chat(keys[0], http, task.messages)
            return await chat(task, http, task.messages) and None

        system.agents.agent = late
        (sample,) = await system.samples()
        assert isinstance(sample, Sample)


BAD_BODIES = {
    "not JSON": ("[", "body: expected JSON"),
    "a list": ("[]", "body: expected a JSON object"),
    "no messages": ('{"model": "m"}', "messages: expected"),
    "half of a surrogate pair": (
        '{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "expected texts of valid Unicode",
    ),
    "too deep": ("[" * 100_000, "body: expected JSON"),
    "a bad role": ('{"model": "m", "messages": [{"role": "x", "content": "y"}]}', "role"),
}


@pytest.mark.parametrize(("body", "message"), BAD_BODIES.values(), ids=BAD_BODIES)
async def test_malformed_bodies_are_refused_and_the_sample_goes_on(model, body, message):
    async def agent(task, http):
        headers = {"Authorization": f"Bearer {task.api_key}"}
        async with http.post(f"{task.base_url}/chat/completions", data=body, headers=headers) as response:
            found = await response.json()
            assert response.status == 400
            assert message in found["error"]["message"]
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)


async def test_a_prompt_beyond_the_context_is_refused_with_both_figures(model):
    async def agent(task, http):
        with pytest.raises(
            Refused, match=r"400.*prompt is too long: \d+ tokens > \d+ maximum.*max_response"
        ) as refused:
            await chat(task, http, [{"role": "user", "content": "long " * 100}])
        assert refused.value.body["error"]["code"] == "context_length_exceeded"
        await chat(task, http, task.messages)  # an agent that compacts its history goes on

    async with EndpointSystem(model, agent, counting(), max_response_tokens=50) as system:
        await made(system)


async def test_an_agent_that_ends_at_a_prompt_beyond_the_context_ends_by_length(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        await chat(task, http, [{"role": "user", "content": "long " * 100}])

    async with EndpointSystem(model, agent, counting(), max_response_tokens=50) as system:
        sample = await made(system)
        assert (sample.finish, sample.reward, len(system.policy.log)) == (FinishReason.LENGTH, None, 1)


async def test_an_agent_whose_process_is_lost_after_a_refusal_begins_again(model):
    """Only its own end after a refusal is a good one."""

    async def agent(task, http):
        with pytest.raises(Refused):
            await chat(task, http, [{"role": "user", "content": "long " * 100}])
        await chat(task, http, task.messages)
        if len(system.agents.tasks) == 1:
            raise AgentFailed("agent_blocked", "another sample blocked its process", retry=True)
        return 1.0

    async with EndpointSystem(model, agent, counting(), max_response_tokens=50, retries=1) as system:
        assert (await made(system)).reward == 1.0
        assert len(system.agents.tasks) == 2


async def test_a_limit_of_turns_ends_the_sample_with_what_it_has(model):
    async def agent(task, http):
        while True:
            await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting(), max_turns=3) as system:
        sample = await made(system)
        assert (sample.finish, len(system.policy.log)) == (FinishReason.TURNS, 3)


async def failing(task, http):
    raise ValueError("no idea")


async def silent(task, http):
    return 1.0


FAILURES = {"agent_error": (failing, "ValueError: no idea"), "no_calls": (silent, "without any answer")}


@pytest.mark.parametrize("reason", FAILURES)
async def test_an_agent_that_fails_costs_its_sample_alone(model, reason):
    bad, message = FAILURES[reason]

    async def agent(task, http):
        if task.index == 1:
            return await bad(task, http)
        await chat(task, http, task.messages)
        return 1.0

    async with EndpointSystem(model, agent, counting(), n=3) as system:
        made = await system.samples()
        assert [type(s) for s in made] == [Sample, FailedSample, Sample]
        assert made[1].reason == reason
        assert message in made[1].message


async def test_a_process_that_died_costs_a_retry_which_repeats_nothing(model):
    async def agent(task, http):
        messages = [*task.messages, await chat(task, http, task.messages)]
        if len(system.agents.tasks) == 1:
            raise AgentFailed("agent_exited", "its process ended", retry=True)
        with pytest.raises(Refused, match="409"):  # the key of the first attempt
            await chat(system.agents.tasks[0], http, task.messages)
        await chat(task, http, [*messages, {"role": "user", "content": "go"}])
        return AgentOutcome(1.0, {"tries": 2.0})

    async with EndpointSystem(model, agent, counting()) as system:
        sample = await made(system)
        assert len(system.policy.log) == 2
        assert sample.metrics == {"tries": 2.0}
        assert system.counted()["restarted"] == 1


async def test_a_call_that_arrives_after_its_attempt_failed_is_no_part_of_the_next_one(model):
    rest, late = asyncio.Event(), []

    async def slowly(body: bytes):
        yield body[:10]
        await rest.wait()
        yield body[10:]

    async def call_late(task):
        body = json.dumps({"model": task.model, "messages": [{"role": "user", "content": "late"}]}).encode()
        headers = {"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"}
        url = f"{task.base_url}/chat/completions"
        async with aiohttp.ClientSession() as own, own.post(url, data=slowly(body), headers=headers) as response:
            return response.status

    async def agent(task, http):
        if len(system.agents.tasks) == 1:
            await chat(task, http, task.messages)
            late.append(asyncio.ensure_future(call_late(task)))
            await asyncio.sleep(0.3)  # the server waits for its body
            raise AgentFailed("infra", "a server has failed", retry=True, traceback="Traceback of the agent")
        rest.set()
        assert await late[0] == 409
        await chat(task, http, task.messages)
        return AgentOutcome(1.0)

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)


async def test_a_failing_agent_s_traceback_is_logged_once(model, caplog):
    trace = 'Traceback (most recent call last):\n  File "agent.py", line 3, in solve\nKeyError: {}'

    async def agent(task, http):
        raise AgentFailed(
            "agent_error", f"solve: KeyError: {task.index}", retry=False, traceback=trace.format(task.index)
        )

    async with EndpointSystem(model, agent, counting(), n=3) as system:
        await system.samples()
    assert caplog.text.count('File "agent.py", line 3, in solve') == 1


async def test_agents_that_cannot_run_at_all_end_the_run(model):
    async with EndpointSystem(model, None, counting()) as system:
        system.agents.run = unable
        with pytest.raises(ExceptionGroup) as raised:
            await system.samples()
        assert raised.group_contains(AgentError, match="does not start")


async def unable(task):
    raise AgentError("rollout.agent.path: it does not start")


async def test_a_sample_goes_on_with_another_rollouter(model):
    """The first one dies while a call is under way, before any snapshot: the endpoint knows the calls before."""

    async def agent(task, http):
        messages = [*task.messages, await chat(task, http, task.messages)]
        system.policy.held.clear()
        messages += [USER[0], await chat(task, http, [*messages, USER[0]])]
        await chat(task, http, [*messages, USER[0]])

    async with EndpointSystem(model, agent, counting()) as system:
        await died(system, system.policy.has_requests(2))
        await system.attach()
        making = asyncio.create_task(made(system))
        await system.policy.has_requests(3)  # the call under way is served again
        system.policy.answered_to_the_dead()
        system.policy.held.set()
        sample = await making
        assert len(sample.sequences) == 1
        assert len(system.agents.tasks) == 1
        assert system.counted()["continued"] == 1


async def died(system, moment):
    """A rollouter dies at that moment, and with it all that it knew."""
    first = asyncio.create_task(system.samples())
    await moment
    await cancelled(system._tasks)  # it says nothing more to the endpoint
    await cancelled([first])
    system.partials = [PartialSample()]


async def test_what_happens_before_a_sample_is_opened_again_happens_once(model):
    """A call, an answer's retry and the agent's end, after the death of the rollouter."""
    attached, turn = asyncio.Event(), asyncio.Event()

    async def agent(task, http):
        messages = [*task.messages, await chat(task, http, task.messages)]
        turn.set()
        await attached.wait()
        second = await chat(task, http, [*messages, USER[0]])
        return float(second["content"] == "two")

    async with EndpointSystem(model, agent, counting()) as system:
        await died(system, turn.wait())
        await system.attach()
        attached.set()
        (session,) = system.endpoint._sessions.values()
        while not session._pending:
            await asyncio.sleep(0.01)
        sample = await made(system)
        assert sample.reward == 1.0
        assert len(system.policy.log) == 2


async def test_a_degenerate_answer_is_content(model):
    async def agent(task, http):
        answer = await chat(task, http, task.messages, tools=[WEATHER])
        return float(answer["content"] == deep)

    deep = "<tool_call>" + "[" * 3000 + "</tool_call>"
    async with EndpointSystem(model, agent, lambda prompt: deep, max_response_tokens=20_000) as system:
        assert (await made(system)).reward == 1.0


async def test_an_answer_that_breaks_the_parser_costs_its_sample_alone(model, monkeypatch):
    async def agent(task, http):
        if task.index == 1:
            with pytest.raises(Refused, match="500"):
                await chat(task, http, [{"role": "user", "content": "bad"}])
        else:
            await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, lambda prompt: "bad" if "bad" in prompt else "good", n=2) as system:
        parse = system.renderer.parse

        def breaking(text, opened, tools):
            return 1 / 0 if text == "bad" else parse(text, opened, tools)

        monkeypatch.setattr(system.renderer, "parse", breaking)
        good, bad = await system.samples()
        assert isinstance(good, Sample)
        assert (bad.reason, "ZeroDivisionError" in bad.message) == ("endpoint_error", True)


async def test_a_stop_text_in_a_tool_s_result_does_not_cut_it(model):
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    texts = iter([call + "<|endoftext|>", "Sunny."])

    async def agent(task, http):
        answer = await chat(task, http, task.messages, tools=[WEATHER])
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "sun <|endoftext|> rain"}
        await chat(task, http, [*task.messages, answer, result], tools=[WEATHER])

    async with EndpointSystem(model, agent, lambda prompt: next(texts), stop_token_ids=[0]) as system:
        await made(system)
        assert system.counted()["branched/no_bridge"] == 1
        assert "sun <|endoftext|> rain" in system.tokenizer.hf.decode(list(system.policy.log[1][0]))


async def test_limits_count_the_calls_of_the_attempt_alone(model):
    async def agent(task, http):
        attempt = len(system.agents.tasks)
        for i in range(2):
            await chat(task, http, [{"role": "user", "content": f"{attempt} {i}"}])
        if attempt == 1:
            raise AgentFailed("agent_exited", "its process ended", retry=True)

    async with EndpointSystem(model, agent, counting(), max_turns=3) as system:
        (sample,) = await system.samples()
        assert (len(sample.sequences), sample.finish) == (2, FinishReason.STOP)
        lost = sum(len(tokens) for _, tokens in system.policy.log[:2])
        rollout = system.rollout_recorder.drain().counters
        assert rollout["rollout/agent/untrained_tokens/restarted"] == lost


async def test_an_agent_that_leaves_tasks_running_ends_all_the_same(model):
    async def agent(task, http):
        async def chatter():
            async with aiohttp.ClientSession() as own:
                while True:
                    await chat(task, own, task.messages)

        await chat(task, http, task.messages)
        left.append(asyncio.create_task(chatter()))
        await asyncio.sleep(0.05)

    left = []
    async with EndpointSystem(model, agent, lambda prompt: "one") as system:
        await made(system)
        with pytest.raises(Refused, match="409"):
            await left[0]


async def test_calls_under_way_at_a_limit_are_finished_and_trained(model):
    async def agent(task, http):
        slow = asyncio.create_task(chat(task, http, task.messages))
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().call_later(0.3, system.policy.held.set)
        with pytest.raises(Refused, match="409"):
            await chat(task, http, [{"role": "user", "content": "one more"}])
        await slow

    async with EndpointSystem(model, agent, counting(), max_turns=1) as system:
        system.policy.held.clear()
        assert (await made(system)).finish is FinishReason.TURNS


async def test_a_retry_beside_an_equal_call_gets_the_answer_of_the_one_that_was_cut(model):
    async def agent(task, http):
        system.policy.held.clear()
        body = {"model": "m", "messages": task.messages}
        path = "/v1/chat/completions"
        cut = asyncio.create_task(post(task, http, path, body))
        await asyncio.sleep(0.1)
        other = asyncio.create_task(post(task, http, path, body))
        await asyncio.sleep(0.1)
        cut.cancel()
        await asyncio.sleep(0.1)
        retry = asyncio.create_task(post(task, http, path, body, {"x-stainless-retry-count": "1"}))
        await asyncio.sleep(0.1)
        system.policy.held.set()
        found = [(await task)["choices"][0]["message"]["content"] for task in (other, retry)]
        return float(set(found) == {"one", "two"})

    async with EndpointSystem(model, agent, counting()) as system:
        assert (await made(system)).reward == 1.0
        assert len(system.policy.log) == 2


async def test_the_slower_of_two_equal_calls_is_trained_though_nobody_waits_for_it(model):
    async def agent(task, http):
        system.policy.held.clear()
        calls = [asyncio.create_task(chat(task, http, task.messages)) for _ in range(2)]
        await asyncio.sleep(0.1)
        calls[1].cancel()
        system.policy.held.set()
        await calls[0]

    async with EndpointSystem(model, agent, counting()) as system:
        await made(system)
        assert len(system.policy.log) == 2


async def test_a_sample_without_trained_answers_fails_by_name(model, caplog):
    async def agent(task, http):
        await chat(task, http, task.messages, temperature=0.2)

    async with EndpointSystem(model, agent, counting(), untrained="mask") as system:
        (failed,) = await system.samples()
        assert failed.reason == "nothing_trained"
        assert "a sample of prompt row:0 failed (nothing_trained): no answer of the policy is trained" in caplog.text


async def test_ids_of_tool_calls_suit_all_templates_and_do_not_depend_on_the_attempt(model):
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    ids = []

    async def agent(task, http):
        answer = await chat(task, http, task.messages, tools=[WEATHER])
        ids.append(answer["tool_calls"][0]["id"])
        if len(ids) == 1:
            raise AgentFailed("agent_exited", "its process ended", retry=True)

    async with EndpointSystem(model, agent, lambda prompt: call) as system:
        await made(system)
    assert ids[0] == ids[1]
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


async def test_a_limit_of_time_ends_an_agent_that_does_not_call(model):
    async def agent(task, http):
        await chat(task, http, task.messages)
        await asyncio.sleep(60)

    async with EndpointSystem(model, agent, counting(), max_sample_s=1.0) as system:
        assert (await made(system)).finish is FinishReason.TIME


async def test_a_limit_of_time_counts_over_all_attempts_of_an_agent(model):
    left = []

    async def agent(task, http):
        left.append(task.seconds)
        await chat(task, http, task.messages)
        await asyncio.sleep(1.5 if len(left) == 1 else 60)
        raise AgentFailed("agent_died", "its first process is lost", retry=True)

    async with EndpointSystem(model, agent, counting(), max_sample_s=4.0, retries=1) as system:
        began_s = now_s()
        assert (await made(system)).finish is FinishReason.TIME
        assert now_s() - began_s < 5.3
        assert len(left) == 2
        assert left[1] <= left[0] - 1.5


async def test_events_of_a_call_that_was_given_up_go_to_the_next_one(model):
    async def agent(task, http):
        await asyncio.sleep(60)

    async with EndpointSystem(model, agent, counting()) as system:
        await cancelled(system._tasks)
        await system.endpoint.attach(7)
        given_up = asyncio.create_task(system.endpoint.events(7))  # its caller has lost the answer
        await asyncio.sleep(0.01)
        await system.endpoint.attach(7)
        system.endpoint._events.append(SimpleNamespace(nbytes=1))
        system.endpoint._filled.set()
        assert (await given_up, len(await system.endpoint.events(7))) == ([], 1)


async def test_without_a_format_of_tool_calls_tools_are_refused(tmp_path):
    plain = TEMPLATE.replace("tool_call>", "strange>")

    async def agent(task, http):
        with pytest.raises(Refused, match=r"400.*tools: nothing parses the tool calls"):
            await chat(task, http, task.messages, tools=[WEATHER])
        await chat(task, http, task.messages)

    async with EndpointSystem(make_model(tmp_path, plain), agent, counting()) as system:
        await made(system)


@pytest.mark.parametrize("prompt", ["", [], [10**6], [-1]])
async def test_prompts_without_tokens_of_the_vocabulary_are_refused(model, prompt):
    async def agent(task, http):
        with pytest.raises(Refused, match=r"400.*prompt: expected"):
            await post(task, http, "/v1/completions", {"model": "m", "prompt": prompt})
        found = await post(task, http, "/v1/completions", {"model": "m", "prompt": "Compute"})
        return float(found["choices"][0]["text"] == "one")

    async with EndpointSystem(model, agent, counting()) as system:
        assert (await made(system)).reward == 1.0
