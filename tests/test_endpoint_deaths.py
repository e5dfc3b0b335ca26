"""The endpoint when processes die: its own, the rollouter's, an agent's."""

import asyncio

import aiohttp
import numpy as np
import pytest

from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.agent_processes.pool import AgentFailed
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.endpoint import link
from asyncrl.rollouter.endpoint.link import (
    EndedSession,
    FinishedCall,
    ForgottenSession,
    KnownCall,
    Session,
    StartedCall,
)
from asyncrl.rollouter.endpoint.service import LeaseLost
from asyncrl.rollouter.partial import PartialSample, pack, unpack
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.endpoint import (
    PROMPT,
    EndpointSystem,
    Refused,
    chat,
    counting,
    made,
    make_model,
    sampled_tokens,
    trained_tokens,
)
from tests.support.scripted import until

USER = [dict(m) for m in PROMPT.messages]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def said(text):
    return [{"role": "user", "content": text}]


def lost_tokens(system) -> float:
    counters = system.rollout_recorder.drain().counters
    return counters.get("rollout/agent/untrained_tokens/restarted", 0)


# the endpoint's process


async def test_a_sample_begins_again_when_the_endpoint_dies_in_the_middle_of_calls(model):
    """Of the first attempt only the answer counts that the second one asks for again."""
    ends = []

    async def agent(task, http):
        attempt = len(system.agents.tasks)
        first = await chat(task, http, task.messages)
        assert first["content"] == "one"
        if attempt == 1:
            await chat(task, http, said("only in the first attempt"))
            system.policy.held.clear()
        calls = [asyncio.create_task(chat(task, http, said(f"{attempt} {i}"))) for i in range(2)]
        try:
            await asyncio.gather(*calls)
        finally:
            ends.append([type(e) for e in await asyncio.gather(*calls, return_exceptions=True)])
        return 1.0

    async with EndpointSystem(model, agent, counting()) as system:
        making = asyncio.create_task(system.samples())
        await system.policy.has_requests(4)
        await system.lose_endpoint()
        await system.replace_endpoint()
        await system.policy.has_requests(6)
        system.policy.held.set()
        (sample,) = await making
        assert [len(e) for e in ends] == [2, 2], "no call hangs"
        log, prompt = system.policy.log, system.tokenizer.encode(PROMPT)
        texts = [system.tokenizer.hf.decode(list(tokens)) for tokens, _ in log]
        asked_again = [entry for entry, text in zip(log, texts) if "only in" not in text and "\n1 " not in text]
        assert len(asked_again) == 3
        assert sorted(trained_tokens(sample, prompt)) == sorted(sampled_tokens(asked_again))
        lost = [tokens for (_, tokens), text in zip(log, texts) if "only in" in text]
        assert lost_tokens(system) == len(lost[0]) > 0


async def test_the_endpoint_may_die_before_any_call_and_while_there_is_no_other(model):
    started = asyncio.Event()

    async def agent(task, http):
        if len(system.agents.tasks) == 1:
            started.set()
            await asyncio.Event().wait()
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting(), n=2) as system:
        making = asyncio.create_task(system.samples())
        await started.wait()
        await system.lose_endpoint()
        await asyncio.sleep(0.05)  # the samples have opened their sessions, which wait
        await system.replace_endpoint()
        assert [type(s) for s in await making] == [Sample, Sample]


async def test_an_agent_goes_on_when_events_are_lost(model, monkeypatch):
    monkeypatch.setattr(link, "REATTACH_S", 0.02)

    async def agent(task, http):
        first = await chat(task, http, task.messages)
        system.client.loses = True
        await chat(task, http, [*task.messages, first, *said("and now?")])
        system.client.loses = True  # that it has ended
        return 1.0

    async with EndpointSystem(model, agent, counting()) as system:
        sample = await made(system)
        assert (sample.reward, len(system.agents.tasks)) == (1.0, 1)
        log, prompt = system.policy.log, system.tokenizer.encode(PROMPT)
        assert len(log) == 2, "no answer is sampled again"
        assert sorted(trained_tokens(sample, prompt)) == sorted(sampled_tokens(log))


async def test_the_endpoint_dies_while_a_sample_ends(model):
    """Its agent has ended, but the rollouter does not know: it runs again, and its answers are repeated."""

    async def agent(task, http):
        await chat(task, http, task.messages)
        system.client.held = len(system.agents.tasks) == 1
        return float(len(system.agents.tasks))

    async with EndpointSystem(model, agent, counting()) as system:
        making = asyncio.create_task(made(system))
        await until(lambda: any(s.ended is not None for s in system.endpoint._sessions.values()))
        await asyncio.sleep(0.02)  # the event is under way
        await system.lose_endpoint()
        await system.replace_endpoint()
        assert (await making).reward == 2.0
        assert len(system.policy.log) == 1


async def test_a_sample_that_has_ended_stays_when_the_endpoint_dies(model):
    async def agent(task, http):
        await chat(task, http, said(f"sample {task.index} {len(system.agents.tasks)}"))
        if task.index == 1 and len(system.agents.tasks) == 2:
            await asyncio.Event().wait()
        return 1.0

    async with EndpointSystem(model, agent, counting(), n=2) as system:
        making = asyncio.create_task(system.samples())
        sessions = system.endpoint._sessions
        await until(lambda: len(system.agents.tasks) == 2 and len(sessions) == 1)
        await system.lose_endpoint()
        await system.replace_endpoint()
        assert [type(s) for s in await making] == [Sample, Sample]
        assert [task.index for task in system.agents.tasks] == [0, 1, 1]


async def test_the_endpoint_dies_while_the_rollouter_attaches(model):
    async def agent(task, http):
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting()) as system:
        await system.lose_endpoint()
        await system.replace_endpoint()
        system.client.hangs = True
        making = asyncio.create_task(made(system))
        await asyncio.sleep(0.05)
        await system.lose_endpoint()
        await system.replace_endpoint()
        await making


async def test_nothing_goes_to_a_new_endpoint_before_the_rollouter_has_attached(model):
    """The rollouter hears of the new endpoint before it notices the old one's death."""

    async def agent(task, http):
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting()) as system:
        await asyncio.sleep(0.02)
        await system.lose_endpoint(silent=True)
        await system.replace_endpoint()
        await made(system)


# the rollouter's process


async def test_a_rollouter_that_is_reset_runs_agents_again_on_the_recorded_answers(model):
    async def agent(task, http):
        attempt = len(system.agents.tasks)
        messages = [*task.messages, await chat(task, http, task.messages)]
        if attempt == 1:
            system.policy.held.clear()
        await chat(task, http, [*messages, USER[0]])

    async with EndpointSystem(model, agent, counting()) as system:
        first = asyncio.create_task(system.samples())
        await system.policy.has_requests(2)
        await cancelled([first])
        system.policy.answered_to_the_dead()
        making = asyncio.create_task(made(system))
        await until(lambda: len(system.agents.tasks) == 2)
        with pytest.raises(Refused, match="409"):
            async with aiohttp.ClientSession() as http:
                await chat(system.agents.tasks[0], http, USER)
        await system.policy.has_requests(3)
        system.policy.answered_to_the_dead()
        system.policy.held.set()
        await making
        assert len(system.policy.log) == 2
        assert system.counted()["cancelled"] == 1


class Rollouter:
    """A rollouter's calls of the endpoint, made by a test."""

    def __init__(self, system, token) -> None:
        self._system, self.token = system, token
        self._endpoint = system.endpoint
        self.session = Session("s", f"{token}-0", PROMPT, 0, None)

    async def attach(self):
        await self._endpoint.attach(self.token)
        return self

    async def open(self):
        await self._endpoint.send(self.token, [self.session])

    async def events(self, count):
        found = []
        async with asyncio.timeout(5):
            while len(found) < count:
                found += await self._endpoint.events(self.token)
        return found

    async def answer(self, number, text, address=None):
        hf = self._system.tokenizer.hf
        tokens = np.array([*hf.encode(text, add_special_tokens=False), hf.eos_token_id], np.int32)
        span = VersionSpan(0, PolicyVersion(0, 0), False, "a")
        completion = Completion(tokens, np.zeros(len(tokens), np.float32), [span], FinishReason.STOP)
        finished = FinishedCall(address or self.session.address, number, completion)
        await self._endpoint.send(self.token, [finished])
        return completion

    async def end(self):
        await self._endpoint.send(self.token, [ForgottenSession(self.session.address)])


async def test_a_new_rollouter_learns_all_calls_and_the_old_one_has_no_say(model):
    answers = []

    async def agent(task, http):
        for word, limits in (("first", {"max_tokens": 7, "stop": ["x"]}), ("more", {}), ("again", {})):
            answer = await chat(task, http, said(word), **limits)
            answers.append(answer["content"])
        return 1.0

    async with EndpointSystem(model, agent, counting()) as system:
        old = await Rollouter(system, 5).attach()
        await old.open()
        (first,) = await old.events(1)
        completion = await old.answer(first.number, "one")
        (second,) = await old.events(1)
        waiting = asyncio.create_task(old.events(1))
        await asyncio.sleep(0.01)

        new = await Rollouter(system, 6).attach()
        for call in (old.attach, old.open, lambda: old.answer(second.number, "two"), old.end, lambda: old.events(1)):
            with pytest.raises(LeaseLost):
                await call()
        await new.open()
        with pytest.raises(LeaseLost):
            await waiting
        known, started = await new.events(2)
        address = new.session.address
        assert isinstance(known, KnownCall)
        assert known.call == first._replace(session=address, tokens=known.call.tokens)
        assert known.completion is completion
        assert np.array_equal(known.call.tokens, first.tokens)
        assert isinstance(started, StartedCall)
        assert (started.session, started.number) == (address, second.number)

        await new.answer(second.number, "late", old.session.address)
        await asyncio.sleep(0.02)
        assert answers == ["one"]
        await new.answer(second.number, "two")
        (third,) = await new.events(1)
        await new.answer(second.number, "twice")
        await new.answer(third.number, "three")
        (ended,) = await new.events(1)
        assert isinstance(ended, EndedSession)
        assert (ended.session, ended.reward, answers) == (address, 1.0, ["one", "two", "three"])
        assert len(system.agents.tasks) == 1
        third_one = await Rollouter(system, 7).attach()  # an end is told again as well
        await third_one.open()
        *_, again = await third_one.events(4)
        assert (again.session, again.reward) == (third_one.session.address, 1.0)


async def test_a_new_rollouter_learns_of_equal_calls_in_the_order_in_which_they_began(model):
    """Its record has them in that order, and each continues with its own tokens."""

    async def agent(task, http):
        await asyncio.gather(*(chat(task, http, said("again")) for _ in range(2)))

    async with EndpointSystem(model, agent, counting()) as system:
        old = await Rollouter(system, 5).attach()
        await old.open()
        first, second = await old.events(2)
        await old.answer(second.number, "second")
        new = await Rollouter(system, 6).attach()
        await new.open()
        started, known = await new.events(2)
        assert isinstance(started, StartedCall)
        assert isinstance(known, KnownCall)
        assert (started.number, known.call.number) == (first.number, second.number)
        await new.answer(first.number, "first")
        (ended,) = await new.events(1)
        assert isinstance(ended, EndedSession)


async def test_an_answer_that_the_agent_had_given_up_is_not_its_last(model):
    async def agent(task, http):
        await chat(task, http, said("wanted"))
        given_up = asyncio.create_task(chat(task, http, said("not wanted")))
        await until(lambda: len(asked) == 2)
        await cancelled([given_up])
        await asyncio.sleep(0.05)  # the server learns that the connection is closed
        ends.set()

    asked, ends = [], asyncio.Event()
    async with EndpointSystem(model, agent, counting()) as system:
        rollouter = await Rollouter(system, 5).attach()
        await rollouter.open()
        for text in ("wanted", "late"):
            asked += await rollouter.events(1)
            if text == "late":
                await ends.wait()
            await rollouter.answer(asked[-1].number, text)
        (ended,) = await rollouter.events(1)
        assert [message["content"] for message in ended.messages] == ["wanted", "wanted"]
        assert [plan[1] for plan in ended.plan] == [asked[1].number, asked[0].number]


async def test_an_opening_ends_only_by_its_own_address(model):
    async def agent(task, http):
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting()) as system:
        rollouter = await Rollouter(system, 5).attach()
        await rollouter.open()
        await rollouter.events(1)
        earlier = rollouter.session
        rollouter.session = Session("s", "5-1", PROMPT, 0, None)
        await rollouter.open()
        await until(lambda: len(system.agents.tasks) == 2)
        await system.endpoint.send(5, [ForgottenSession(earlier.address)])
        assert list(system.endpoint._sessions) == ["s"]
        await rollouter.end()
        assert not system.endpoint._sessions
        assert system.counted()["cancelled"] == 2


async def test_agents_that_no_rollouter_takes_over_are_cancelled_in_time(model):
    ended = []

    async def agent(task, http):
        try:
            await chat(task, http, task.messages)
            await asyncio.Event().wait()
        except BaseException as e:
            ended.append(e)
            raise

    async with EndpointSystem(model, agent, counting(), orphan_s=0.5) as system:
        old = await Rollouter(system, 5).attach()
        await old.open()
        (call,) = await old.events(1)
        await old.answer(call.number, "one")
        await Rollouter(system, 6).attach()
        (task,) = system.agents.tasks
        async with aiohttp.ClientSession() as http:
            call = asyncio.create_task(chat(task, http, said("held by the endpoint")))
            await asyncio.sleep(0.05)
            assert not call.done()
            assert not ended
            with pytest.raises(Refused, match="409"):
                await call
            with pytest.raises(Refused, match=r"409.*has ended"):
                await chat(task, http, said("later"))
        assert [type(e) for e in ended] == [asyncio.CancelledError]
        assert not system.endpoint._sessions
        counted = system.counted()
        assert (counted["cancelled"], "continued" in counted) == (1, False)


async def test_an_agent_that_is_taken_over_in_time_goes_on(model):
    async def agent(task, http):
        return float((await chat(task, http, task.messages))["content"] == "one")

    async with EndpointSystem(model, agent, counting(), orphan_s=0.1) as system:
        await (await Rollouter(system, 5).attach()).open()
        await until(lambda: system.agents.tasks)
        new = await Rollouter(system, 6).attach()
        await new.open()
        await asyncio.sleep(0.2)
        (call,) = await new.events(1)
        await new.answer(call.number, "one")
        (ended,) = await new.events(1)
        counted = system.counted()
        assert (ended.reward, counted["continued"], "cancelled" in counted) == (1.0, 1, False)


# an agent's process

LIMITS = {
    "shorter": ({}, {"max_tokens": 2}),
    "longer": ({"max_tokens": 2}, {}),
    "with a stop string": ({}, {"stop": ["three"]}),
    "without it": ({"stop": ["three"]}, {}),
    "with another": ({"stop": ["three"]}, {"stop": ["two"]}),
}


@pytest.mark.parametrize(("before", "after"), LIMITS.values(), ids=LIMITS)
async def test_an_agent_that_begins_again_gets_no_answer_that_has_other_limits(model, before, after):
    text = "one two three four"

    async def agent(task, http):
        repeated = await chat(task, http, said("as before"), **before)
        if len(system.agents.tasks) == 1:
            await chat(task, http, task.messages, **before)
            raise AgentFailed("agent_exited", "its process ended", retry=True)
        fresh = await chat(task, http, said("alone"), **after)
        again = await chat(task, http, task.messages, **after)
        return float(fresh == again and fresh != repeated)

    async with EndpointSystem(model, agent, lambda prompt: text) as system:
        (sample,) = await system.samples()
        assert sample.reward == 1.0
        repeated, first, *rest = system.policy.log
        assert len(rest) == 2, "the call that is the same is answered from the record"
        prompt = system.tokenizer.encode(PROMPT)
        assert sorted(trained_tokens(sample, prompt)) == sorted(sampled_tokens([repeated, *rest]))
        assert lost_tokens(system) == len(first[1])


@pytest.mark.parametrize("stored", [False, True], ids=["no snapshot", "a snapshot of all"])
async def test_equal_prompts_with_different_limits_go_on_with_another_rollouter(model, stored):
    """Each gets its own answer back, whether the endpoint alone knows it or a snapshot as well."""
    waits, attached = asyncio.Event(), asyncio.Event()

    async def agent(task, http):
        for limits in ({"max_tokens": 2}, {}, {"stop": ["two"]}):
            await chat(task, http, task.messages, **limits)
        waits.set()
        await attached.wait()
        await chat(task, http, task.messages, max_tokens=3)

    async with EndpointSystem(model, agent, lambda prompt: "one two three four") as system:
        first = asyncio.create_task(system.samples())
        await waits.wait()
        await cancelled(system._tasks)  # it says nothing more to the endpoint
        parts = [pack(PROMPT.uid, system.partials)]
        await cancelled([first])
        system.partials = unpack(parts) if stored else [PartialSample()]
        await system.attach()
        attached.set()
        await made(system)
        assert (len(system.policy.log), len(system.partials[0].calls)) == (4, 4)
        assert [call.ordinal for call in system.partials[0].calls] == [0, 1, 2, 3]


async def test_an_agent_that_exits_again_and_again_costs_its_sample_alone(model):
    async def agent(task, http):
        await chat(task, http, said(f"{task.index}"))
        if task.index == 1:
            raise AgentFailed("agent_exited", "its process ended", retry=True)
        return 1.0

    async with EndpointSystem(model, agent, counting(), n=3, retries=2) as system:
        group = await system.samples()
        assert [getattr(one, "reason", "made") for one in group] == ["made", "agent_exited", "made"]
        assert sorted(task.index for task in system.agents.tasks) == [0, 1, 1, 1, 2]
        assert len({task.api_key for task in system.agents.tasks}) == 5
        assert len(system.policy.log) == 3
        assert system.counted()["restarted"] == 2


async def test_untrained_calls_count_against_limits_also_with_another_rollouter(model):
    waits, attached = asyncio.Event(), asyncio.Event()

    async def agent(task, http):
        await chat(task, http, task.messages, temperature=0)
        waits.set()
        await attached.wait()
        await chat(task, http, task.messages)
        with pytest.raises(Refused, match="409"):
            await chat(task, http, said("one too many"))

    async with EndpointSystem(model, agent, counting(), untrained="mask", max_turns=2) as system:
        first = asyncio.create_task(system.samples())
        await waits.wait()
        await cancelled(system._tasks)
        await cancelled([first])
        system.partials = [PartialSample()]
        await system.attach()
        attached.set()
        (sample,) = await system.samples()
        assert sample.finish is FinishReason.TURNS
        prompt = system.tokenizer.encode(PROMPT)
        assert trained_tokens(sample, prompt) == sampled_tokens(system.policy.log[1:])


async def test_agents_wait_for_a_rollouter_as_long_after_each_that_attached(model):
    """One that dies before it has opened anything takes no time from the next."""

    async def agent(task, http):
        await chat(task, http, task.messages)

    async with EndpointSystem(model, agent, counting(), orphan_s=1.0) as system:
        await (await Rollouter(system, 5).attach()).open()
        await until(lambda: system.agents.tasks)
        for token in (6, 7):
            last = await Rollouter(system, token).attach()
            await asyncio.sleep(0.6)
        await last.open()
        assert len(system.agents.tasks) == 1
        assert system.counted()["continued"] == 1
