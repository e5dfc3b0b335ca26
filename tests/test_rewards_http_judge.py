"""The reward of a judge or classifier behind an HTTP endpoint, against a real server on this machine."""

import asyncio
import contextlib
from dataclasses import replace

import pytest
from aiohttp import web

from asyncrl.config.schema import RewardConfig
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardPool
from tests.support.rewards import PROMPT, import_problem

CHAT = {"model": "judge", "template": "{prompt} | {answer} | {response}", "pattern": r"Score: (\d+)", "range": [0, 10]}


@contextlib.asynccontextmanager
async def judging(answer, timeout_s=20.0, **args):
    """A pool whose judge is ``answer(request, body)``: what it returns is sent as JSON, a response as it is."""

    async def serve(request):
        returned = answer(request, await request.json())
        found = await returned if asyncio.iscoroutine(returned) else returned
        return found if isinstance(found, web.Response) else web.json_response(found)

    app = web.Application()
    app.router.add_post("/judge", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/judge"
    pool = RewardPool(RewardConfig(function="http_judge", args={"url": url, **args}, timeout_s=timeout_s))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        await runner.cleanup()


def says(text):
    return {"choices": [{"message": {"content": text}}]}


def answers(*responses):
    return [Answer(replace(PROMPT, answer="A"), response) for response in responses]


async def test_a_chat_model_is_asked_with_the_template_and_its_score_is_scaled(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    asked = []

    def judge(request, body):
        asked.append((request.headers["Authorization"], body))
        return says("A first Score: 1, on reflection Score: 7")

    async with judging(judge, api_key="${secret:JUDGE_KEY}", parameters={"temperature": 0}, **CHAT) as pool:
        (result,) = await pool.score(answers("I say {answer}"))
    assert (result.error, result.reward) == (None, 0.7)
    messages = [{"role": "user", "content": "? | A | I say {answer}"}]
    assert asked == [("Bearer s3cret", {"model": "judge", "messages": messages, "temperature": 0})]


async def test_a_classifier_gets_the_three_texts_and_its_score_is_the_reward():
    def classify(request, body):
        assert "Authorization" not in request.headers
        assert body | {"response": ""} == {"prompt": "?", "response": "", "answer": "A"}
        return {"score": -len(body["response"])}

    async with judging(classify) as pool:
        assert [r.reward for r in await pool.score(answers("a", "bcd"))] == [-1.0, -3.0]


async def test_the_answers_of_a_group_are_judged_at_once():
    together = asyncio.Barrier(4)

    async def judge(request, body):
        await together.wait()  # until all four have asked
        return {"score": 1}

    async with judging(judge) as pool:
        assert [r.error for r in await pool.score(answers(*"abcd"))] == [None] * 4


async def test_a_call_that_fails_in_passing_is_repeated():
    statuses = iter([503, 429, 500])

    def judge(request, body):
        status = next(statuses, 200)
        return {"score": 1} if status == 200 else web.Response(status=status, headers={"Retry-After": "0"})

    async with judging(judge) as pool:
        (result,) = await pool.score(answers("a"))
    assert (result.error, result.reward) == (None, 1.0)


@pytest.mark.parametrize(
    ("reply", "args", "message"),
    [
        (
            says("I cannot grade this"),
            CHAT,
            r"expected a number where 'Score: (\\d+)' matches, found None in 'I",
        ),
        (says("Score: 11"), CHAT, "expected a score from 0 to 10, found 11"),
        ({"error": "busy"}, CHAT, "expected choices[0].message.content, found {'error': 'busy'}"),
        ({"label": "good"}, {}, "expected {\"score\": number}, found {'label': 'good'}"),
        (web.Response(status=401, text="no such key"), {}, "expected status 200, found 401: no such key"),
        (web.Response(text="<html>"), {}, "expected JSON, found '<html>'"),
    ],
)
async def test_an_answer_without_a_score_fails_the_sample_without_further_calls(reply, args, message):
    calls = []

    def judge(request, body):
        calls.append(1)
        return web.Response(status=reply.status, text=reply.text) if isinstance(reply, web.Response) else reply

    async with judging(judge, **args) as pool:
        (result,) = await pool.score(answers("a"))
    assert result.error == "reward_error"
    assert message in result.message
    assert len(calls) == 2  # the pool's own retry of a sample is the second


async def test_an_endpoint_that_stays_away_fails_the_sample_before_the_worker_is_killed():
    async with judging(lambda request, body: web.Response(status=503, text="full"), timeout_s=2.0) as pool:
        (result,) = await pool.score(answers("a"))
    assert result.error == "reward_error"  # not a timeout
    assert "status 503: full; given up within 1.6 s, a part of reward.timeout_s" in result.message


async def test_judges_are_parts_of_a_weighted_sum_each_with_its_own_arguments():
    def judge(request, body):
        return says("Score: 5") if "messages" in body else {"score": 0.25}

    async with judging(judge) as other:
        url = other._config.args["url"]
        functions = {
            "judge": {"function": "http_judge", "args": {"url": url, **CHAT}},
            "classifier": {"function": "http_judge", "weight": 2.0, "args": {"url": url}},
            "exact": {"function": "exact_match"},
        }
        pool = RewardPool(RewardConfig(function="weighted", args={"functions": functions}))
        await pool.start()
        try:
            (result,) = await pool.score(answers("a"))
        finally:
            await pool.close()
    assert (result.error, result.reward) == (None, 0.5 + 2 * 0.25 + 1.0)
    assert result.metrics["reward_judge"] == 0.5


URL = {"url": "http://127.0.0.1:1/"}


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "reward.args.url: expected the address of an HTTP endpoint, found ''"),
        (URL | {"urll": 1}, "reward.args.urll: expected url, api_key, model,"),
        (URL | {"template": "{response}"}, "reward.args.template: expected model and pattern beside it"),
        (URL | CHAT | {"template": "Good?"}, "reward.args.template: expected {response} in it, found none"),
        (URL | {"model": "judge"}, "reward.args.template: expected the judge's question"),
        (URL | CHAT | {"pattern": "("}, "reward.args.pattern: expected a regular expression, found '('"),
        (URL | CHAT | {"range": [10, 0]}, "reward.args.range: expected the lowest and the highest score"),
        (URL | {"parameters": 3}, "reward.args.parameters: expected a mapping, found 3"),
        ({"url": "${secret:ABSENT}"}, None),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(args, problem):
    found = import_problem(RewardConfig(function="http_judge", args=args))
    assert (found is None) == (problem is None)
    assert problem is None or problem in found
