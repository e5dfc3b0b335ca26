"""The router with scripted replicas: balance, groups kept together, samples that survive syncs and deaths."""

import asyncio

import numpy as np
import pytest

from asyncrl.rollouter.agents.base import Completion, GenerationFailed
from asyncrl.rollouter.engines.base import Grammar, Request, SamplingParams, Scheduling
from asyncrl.rollouter.partial import GeneratedTokens
from asyncrl.rollouter.router import CannotContinue, Router, VersionChanged
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.scripted import Death, ScriptedReplica, is_death, settle

EOS = 50


def request(id: str, group: str = "g", max_new: int = 10) -> Request:
    return Request(id, group, np.array([1, 2], np.int32), 2, 7, 0, max_new, SamplingParams(stop_token_ids=(EOS,)))


async def complete(
    router: Router, request: Request, output: GeneratedTokens | None = None, one_version: bool = False
) -> Completion:
    output = output or GeneratedTokens()
    return output.completion(await router.generate(request, output, one_version))


@pytest.fixture
async def two():
    replicas = {"a": ScriptedReplica(), "b": ScriptedReplica()}
    router = Router(replicas, is_death)
    running = asyncio.create_task(router.run())
    yield router, replicas["a"], replicas["b"], running
    running.cancel()
    await asyncio.wait([running])


async def test_a_group_stays_on_one_replica_and_goes_out_in_one_call(two):
    router, a, b, _ = two
    tasks = [asyncio.create_task(complete(router, request(f"g/{i}"))) for i in range(4)]
    await settle()
    assert (a.submits, b.submits) == ([4], [])
    for i in range(4):
        a.emit(f"g/{i}#0", [5], FinishReason.STOP)
    assert [len((await t).tokens) for t in tasks] == [1] * 4


async def test_a_group_s_later_turns_go_to_its_replica_until_it_ends(two):
    router, a, b, _ = two
    first = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [5], FinishReason.STOP)
    await first
    busy = [asyncio.create_task(complete(router, request(f"{i}/0", str(i), 5))) for i in range(3)]
    turns = [asyncio.create_task(complete(router, request(f"g/{i}"))) for i in (1, 2)]
    await settle()
    assert {"g/1#0", "g/2#0"} <= set(a.requests)  # though the other one has less to do
    for id in list(a.requests)[1:]:
        a.emit(id, [5], FinishReason.STOP)
    await asyncio.gather(*turns)
    router.forget("g")
    load = asyncio.create_task(complete(router, request("load/0", "load", 500)))
    await settle()
    other = b if "load/0#0" in a.requests else a
    again = asyncio.create_task(complete(router, request("g/3")))
    await settle()
    assert "g/3#0" in other.requests
    for task in (load, again, *busy):
        task.cancel()


async def test_groups_go_to_the_replica_with_fewest_outstanding_tokens(two):
    router, a, b, _ = two
    tasks = [
        asyncio.create_task(complete(router, request(f"{g}/0", g, n))) for g, n in (("x", 100), ("y", 10), ("z", 10))
    ]
    await settle()
    assert set(a.requests) == {"x/0#0"}
    assert set(b.requests) == {"y/0#0", "z/0#0"}
    a.emit("x/0#0", [1] * 95)
    await settle()
    assert router.outstanding_tokens == {"a": 5, "b": 20}
    for t in tasks:
        t.cancel()
    await settle()
    assert router.outstanding_tokens == {"a": 0, "b": 0}
    assert (a.aborted, sorted(b.aborted)) == (["x/0#0"], ["y/0#0", "z/0#0"])


async def test_a_sample_aborted_by_a_sync_continues_under_the_new_version(two):
    router, a, _, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [11, 12, 13])
    a.emit("g/0#0", [], FinishReason.ABORT)
    await settle()
    rest = a.requests["g/0#1"]
    assert (rest.tokens.tolist(), rest.position, rest.max_new_tokens) == ([1, 2, 11, 12, 13], 3, 7)
    assert rest.resumed == 3
    a.version = PolicyVersion(0, 1)
    a.emit("g/0#0", [99])  # a late event of the aborted attempt
    a.emit("g/0#1", [14], FinishReason.STOP)
    done = await task
    assert done.tokens.tolist() == [11, 12, 13, 14]
    assert [(s.start, s.version.number) for s in done.spans] == [(0, 0), (3, 1)]


@pytest.mark.parametrize("finish", [FinishReason.ABORT, FinishReason.LENGTH, None])
@pytest.mark.parametrize("at", range(1, 5))
async def test_a_sampled_stop_token_ends_the_request_whatever_the_engine_reports(two, finish, at):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [*range(11, 10 + at), EOS], finish)
    await settle()
    await router.set_routable(["b"])
    assert (await task).finish is FinishReason.STOP
    assert (await task).tokens.tolist() == [*range(11, 10 + at), EOS]
    await settle()
    assert not b.requests
    assert a.aborted == (["g/0#0"] if finish is None else [])


async def test_an_error_on_a_stop_token_stays_an_error(two):
    router, a, _, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [EOS], FinishReason.ERROR, "logits are not numbers")
    with pytest.raises(GenerationFailed, match="not numbers"):
        await task


async def test_a_snapshot_that_ends_with_a_stop_token_is_not_continued(two):
    router, a, b, _ = two
    output = GeneratedTokens()
    output.add(np.array([11, EOS], np.int32), -np.ones(2, np.float32), PolicyVersion(0, 0), False)
    done = await complete(router, request("g/0"), output)
    assert (done.tokens.tolist(), done.finish) == ([11, EOS], FinishReason.STOP)
    assert not a.requests
    assert not b.requests


async def test_a_sample_of_an_evicted_replica_continues_elsewhere(two):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [11])
    await settle()
    await router.set_routable(["b"])
    await settle()
    a.emit("g/0#0", [99, 99], FinishReason.STOP)  # a late event of the evicted replica
    await settle()
    assert b.requests["g/0#1"].tokens.tolist() == [1, 2, 11]
    b.emit("g/0#1", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11, 12]


async def test_a_retired_replica_reports_all_tokens_of_its_requests_which_go_on_elsewhere(two):
    router, a, b, _ = two
    tasks = [asyncio.create_task(complete(router, request(f"g/{i}"))) for i in range(2)]
    await settle()
    retiring = asyncio.create_task(router.retire("a"))
    await settle()
    assert sorted(a.aborted) == ["g/0#0", "g/1#0"]
    await router.set_routable(["a", "b"])  # of a sync that ends meanwhile
    new = asyncio.create_task(complete(router, request("h/0", "h")))
    await settle()
    assert list(b.requests) == ["h/0#0"]
    a.emit("g/0#0", [11, 12], FinishReason.ABORT)
    a.emit("g/1#0", [EOS], FinishReason.STOP)  # it ended before the abort came
    await retiring
    await settle()
    assert b.requests["g/0#1"].tokens.tolist() == [1, 2, 11, 12]
    for id in ("g/0#1", "h/0#0"):
        b.emit(id, [13], FinishReason.LENGTH)
    assert [(await task).tokens.tolist() for task in tasks] == [[11, 12, 13], [EOS]]
    await new
    router.forget("g")
    await router.retire("a")  # again
    await router.set_routable(["a", "b"])
    router.replace("a", ScriptedReplica())  # one of this name may join
    await router.set_routable(["a", "b"])
    assert set(router.outstanding_tokens) == {"a", "b"}


@pytest.mark.parametrize("dies", [True, False])
async def test_a_retired_replica_that_dies_or_does_not_report_keeps_no_request(two, monkeypatch, dies):
    monkeypatch.setattr("asyncrl.rollouter.router._HAND_OVER_S", 30.0 if dies else 0.1)
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [11])
    await settle()
    retiring = asyncio.create_task(router.retire("a"))
    await settle()
    if dies:
        a.die(Death())
    await retiring
    await settle()
    assert b.requests["g/0#1"].tokens.tolist() == [1, 2, 11]
    b.emit("g/0#1", [12], FinishReason.LENGTH)
    assert (await task).tokens.tolist() == [11, 12]


async def test_the_unsent_requests_of_a_retired_replica_go_on_at_once():
    a, b = ScriptedReplica(), ScriptedReplica()
    router = Router({"a": a, "b": b}, is_death)
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()  # the router does not run yet
    await router.retire("a")
    running = asyncio.create_task(router.run())
    await settle()
    b.emit("g/0#1", [12], FinishReason.LENGTH)
    assert (await task).tokens.tolist() == [12]
    running.cancel()
    await asyncio.wait([running])


async def test_without_a_routable_replica_requests_wait(two):
    router, a, b, _ = two
    await router.set_routable([])
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    assert not a.requests
    assert not b.requests
    await router.set_routable(["b"])
    await settle()
    b.emit("g/0#0", [1], FinishReason.LENGTH)
    assert (await task).finish is FinishReason.LENGTH


async def test_a_refused_request_raises_with_the_reason(two):
    router, a, _, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [], FinishReason.ERROR, "longer than the context")
    with pytest.raises(GenerationFailed, match="longer than the context"):
        await task


async def test_a_replica_that_answers_with_errors_serves_nothing_until_it_is_replaced(two, caplog):
    router, a, b, running = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.die(ValueError("index out of range"))
    await settle()
    assert router.unfit(None) == {"a": "answers with errors (ValueError: index out of range)"}
    assert "ValueError: index out of range" in caplog.text
    b.emit("g/0#1", [11], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11]
    router.replace("a", again := ScriptedReplica())
    await router.set_routable(["a"])
    assert router.unfit(None) == {}
    task = asyncio.create_task(complete(router, request("h/0")))
    await settle()
    again.emit("h/0#0", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [12]
    assert not running.done()


async def test_a_request_that_kills_its_replicas_fails_and_those_beside_it_do_not(two):
    """A group that was on two dead replicas is served alone, so that the next death tells whether it was the cause."""
    router, a, _, _ = two

    async def replaced(name: str, dying: ScriptedReplica) -> ScriptedReplica:
        dying.die(Death("killed"))
        await settle()
        router.replace(name, new := ScriptedReplica())
        await router.set_routable([name])
        await settle()
        return new

    def served(replica: ScriptedReplica) -> list[str]:
        return sorted(id.split("/")[0] for id in replica.requests)

    async def generates(group: str) -> GeneratedTokens:
        return await complete(router, request(f"{group}/0", group))

    await router.set_routable(["a"])
    beside = asyncio.create_task(generates("beside"))
    await settle()
    a = await replaced("a", a)
    poison = asyncio.create_task(generates("poison"))
    await settle()
    assert served(a) == ["beside", "poison"]
    a = await replaced("a", a)  # the second death of the one, the first of the other
    assert served(a) == ["beside"]
    a.emit("beside/0#2", [11], FinishReason.STOP)
    assert (await beside).tokens.tolist() == [11]
    await settle()
    late = asyncio.create_task(generates("late"))
    await settle()
    assert served(a) == ["beside", "late", "poison"]
    a = await replaced("a", a)
    assert served(a) == ["poison"]
    a = await replaced("a", a)
    with pytest.raises(GenerationFailed, match="3 replicas died while they served its group") as failed:
        await poison
    assert failed.value.reason == "poison"
    assert served(a) == ["late"]
    a.emit(next(iter(a.requests)), [12], FinishReason.STOP)
    assert (await late).tokens.tolist() == [12]


async def test_a_suspect_takes_its_replica_and_others_move(two):
    router, a, b, _ = two
    tasks = {
        group: asyncio.create_task(complete(router, request(f"{group}/0", group))) for group in ("suspect", "other")
    }
    await settle()
    assert list(a.requests) == ["suspect/0#0"]
    assert list(b.requests) == ["other/0#0"]
    a.die(Death("killed"))
    await settle()
    assert "suspect/0#1" in b.requests
    router.replace("a", a := ScriptedReplica())
    b.die(Death("killed"))
    await settle()
    await router.set_routable(["a"])
    await settle()
    assert list(a.requests) == ["suspect/0#2"]  # the other waits
    router.replace("b", b := ScriptedReplica())
    await router.set_routable(["a", "b"])
    await settle()
    assert len(b.requests) == 1
    assert len(a.requests) == 1
    for replica in (a, b):
        replica.emit(next(iter(replica.requests)), [11], FinishReason.STOP)
    for task in tasks.values():
        assert (await task).tokens.tolist() == [11]


async def test_unknown_replicas_are_refused_by_name(two):
    with pytest.raises(ValueError, match="no replica named c"):
        await two[0].set_routable(["c"])


async def test_the_samples_of_a_dead_replica_continue_elsewhere(two):
    router, a, b, running = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [11, 12])
    a.die(Death("killed"))
    await settle()
    assert router.lost == {"a": "killed"}
    assert b.requests["g/0#1"].tokens.tolist() == [1, 2, 11, 12]
    b.emit("g/0#1", [13], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11, 12, 13]
    assert not running.done()


async def test_a_replica_that_only_its_router_has_lost_is_reported(two, monkeypatch):
    """Its process lives, so nobody else would have it restarted."""
    router, a, _, _ = two
    a.die(Death("its machine does not answer"))
    await settle()
    assert router.unfit(None) == {}
    monkeypatch.setattr("asyncrl.rollouter.router._REPLACED_S", -1.0)
    assert router.unfit(None) == {"a": "cannot be reached by its rollouter (its machine does not answer)"}
    router.replace("a", ScriptedReplica())
    assert router.unfit(None) == {}


async def test_a_lost_replica_gets_no_requests_even_if_listed_as_routable(two):
    router, a, b, _ = two
    router.mark_lost("a", "it hangs")
    router.mark_lost("a", "said again")
    assert router.lost == {"a": "it hangs"}
    await router.set_routable(["a", "b"])
    tasks = [asyncio.create_task(complete(router, request(f"{i}/0", str(i)))) for i in range(3)]
    await settle()
    assert (len(a.requests), len(b.requests)) == (0, 3)
    for task in tasks:
        task.cancel()


async def test_without_a_live_replica_samples_wait_for_a_restarted_one(two):
    router, a, b, running = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    a.emit("g/0#0", [11])
    await settle()
    for replica in (a, b):
        replica.die(Death("killed"))
    await settle()
    assert router.lost == {"a": "killed", "b": "killed"}
    restarted = ScriptedReplica()
    router.replace("a", restarted)
    await settle()
    assert restarted.attached == 1
    assert not restarted.requests  # it has no version yet
    await router.set_routable(["a"])
    await settle()
    assert restarted.requests["g/0#2"].tokens.tolist() == [1, 2, 11]
    restarted.emit("g/0#2", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11, 12]
    assert not running.done()


async def test_a_replica_may_be_replaced_before_its_death_is_noticed(two):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    restarted = ScriptedReplica()
    router.replace("a", restarted)
    a.die(Death("killed"))
    await settle()
    b.emit("g/0#1", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [12]
    assert router.lost == {}


@pytest.mark.parametrize("end", [Death("killed"), ValueError("index out of range")])
async def test_an_end_at_the_moment_of_the_replacement_is_not_that_of_the_successor(two, end):
    router, a, _, _ = two
    await settle()
    a.die(end)
    router.replace("a", restarted := ScriptedReplica())
    await router.set_routable(["a"])
    await settle()
    assert (router.lost, router.unfit(None)) == ({}, {})
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    restarted.emit("g/0#0", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [12]


async def test_a_replica_that_leaves_does_not_take_its_successor_along(two):
    router, _, _, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    retiring = asyncio.create_task(router.retire("a"))
    await settle()
    router.replace("a", ScriptedReplica())
    await retiring
    assert set(router.outstanding_tokens) == {"a", "b"}
    task.cancel()


async def test_a_replica_that_dies_during_attach_is_lost(two):
    router, _, _, running = two

    class Stillborn(ScriptedReplica):
        async def attach(self):
            raise Death("killed at its start")

    router.replace("a", Stillborn())
    await settle()
    assert router.lost == {"a": "killed at its start"}
    assert not running.done()


async def test_silence_counts_from_the_last_event_while_there_is_work(two, monkeypatch):
    router, a, _, _ = two
    now = [100.0]
    monkeypatch.setattr("asyncrl.rollouter.router.now_s", lambda: now[0])
    assert router.unfit(4.0) == {}
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    now[0] += 5.0
    assert router.unfit(4.0) == {"a": "has work but produced no token for 5 s"}
    assert router.unfit(None) == router.unfit(6.0) == {}
    a.emit("g/0#0", [11])
    await settle()
    assert router.unfit(4.0) == {}
    a.emit("g/0#0", [], FinishReason.STOP)
    await task
    now[0] += 5.0
    assert router.unfit(4.0) == {}


async def test_a_request_continues_from_its_earlier_tokens(two):
    router, a, _, _ = two
    output = GeneratedTokens()
    output.add(np.array([11, 12], np.int32), -np.ones(2, np.float32), PolicyVersion(0, 0), False)
    a.version = PolicyVersion(0, 1)
    task = asyncio.create_task(complete(router, request("g/0"), output))
    await settle()
    rest = a.requests["g/0#0"]
    assert (rest.tokens.tolist(), rest.position, rest.max_new_tokens) == ([1, 2, 11, 12], 2, 8)
    assert router.outstanding_tokens["a"] == 8
    a.emit("g/0#0", [13], FinishReason.STOP)
    done = await task
    assert done.tokens.tolist() == [11, 12, 13]
    assert [(s.start, s.version.number) for s in done.spans] == [(0, 0), (2, 1)]


async def test_a_request_that_has_all_its_tokens_finishes_at_once(two):
    router, a, _, _ = two
    output = GeneratedTokens()
    output.add(np.arange(10, dtype=np.int32), -np.ones(10, np.float32), PolicyVersion(0, 0), False)
    done = await complete(router, request("g/0"), output)
    assert (len(done.tokens), done.finish) == (10, FinishReason.LENGTH)
    assert not a.requests


async def test_with_one_version_a_sample_restarts_rather_than_continue_under_another(two):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0"), one_version=True))
    await settle()
    a.emit("g/0#0", [11])
    a.die(Death("killed"))
    await settle()
    b.version = PolicyVersion(0, 1)
    b.emit("g/0#1", [12])
    with pytest.raises(VersionChanged, match=r"version 0\.0, now it is 0\.1"):
        await task
    await settle()
    assert b.aborted == ["g/0#1"]
    assert router.outstanding_tokens["b"] == 0


async def test_with_one_version_a_sample_continues_elsewhere_under_the_same_version(two):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, request("g/0"), one_version=True))
    await settle()
    a.emit("g/0#0", [11])
    a.die(Death("killed"))
    await settle()
    b.emit("g/0#1", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11, 12]


def with_grammar(id: str) -> Request:
    grammar = Grammar("regex", "[0-9]*")
    return request(id)._replace(sampling=SamplingParams(stop_token_ids=(EOS,), grammar=grammar))


@pytest.mark.parametrize("interruption", ["death", "abort", "not routable"])
async def test_a_request_with_a_grammar_that_is_interrupted_after_its_first_token_cannot_continue(two, interruption):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, with_grammar("g/0")))
    await settle()
    a.emit("g/0#0", [11])
    await settle()
    if interruption == "death":
        a.die(Death("killed"))
    elif interruption == "abort":
        a.emit("g/0#0", [12], FinishReason.ABORT)
    else:
        await router.set_routable(["b"])
    with pytest.raises(CannotContinue, match=r"g/0 was interrupted after \d tokens of its grammar"):
        await task
    await settle()
    assert not b.requests
    assert set(router.outstanding_tokens.values()) == {0}


async def test_a_request_with_a_grammar_moves_before_its_first_token_and_ends_at_its_last(two):
    router, a, b, _ = two
    task = asyncio.create_task(complete(router, with_grammar("g/0")))
    await settle()
    a.die(Death("killed"))
    await settle()
    b.emit("g/0#1", [11])
    b.emit("g/0#1", [EOS], FinishReason.ABORT)  # the abort met the last token
    done = await task
    assert (done.tokens.tolist(), done.finish) == ([11, EOS], FinishReason.STOP)


async def test_tokens_of_a_snapshot_are_not_continued_within_a_grammar(two):
    router, a, _, _ = two
    output = GeneratedTokens()
    output.add(np.arange(2, dtype=np.int32), -np.ones(2, np.float32), PolicyVersion(0, 0), False)
    with pytest.raises(CannotContinue):
        await complete(router, with_grammar("g/0"), output)
    assert not a.requests


async def test_a_request_cancelled_before_it_is_sent_is_aborted(two):
    router, a, _, _ = two
    task = asyncio.create_task(complete(router, request("g/0")))
    await asyncio.sleep(0)
    task.cancel()
    await settle()
    assert set(a.requests) == set(a.aborted)
    assert router.outstanding_tokens == {"a": 0, "b": 0}


async def test_each_replica_gets_a_changed_scheduling_once_and_so_does_its_replacement(two):
    router, a, b, _ = two
    both = Scheduling(max_running_requests=3, validation_first=True)
    for _ in range(2):
        router.set_max_running_requests(3)
        router.set_validation_first(True)
        await settle()
    assert (a.schedulings, b.schedulings) == ([both], [both])
    a.die(Death("killed"))
    await settle()
    router.replace("a", new := ScriptedReplica())
    await router.set_routable(["a", "b"])
    task = asyncio.create_task(complete(router, request("g/0")))
    await settle()
    assert new.schedulings == [both]  # before its first request
    router.set_validation_first(False)
    await settle()
    router.set_max_running_requests(None)
    await settle()
    assert new.schedulings == b.schedulings == [both, Scheduling(max_running_requests=3), Scheduling()]
    task.cancel()


async def test_the_more_requests_continue_the_less_often_they_are_asked_for_their_tokens(two):
    router, a, b, _ = two
    usual = Scheduling().progress_every_s
    tasks = {f"{i}/0": asyncio.create_task(complete(router, request(f"{i}/0", str(i)))) for i in range(2000)}
    await settle()
    a.emit("0/0#0", [5])
    await settle()
    every_s = a.schedulings[-1].progress_every_s
    assert every_s > 4 * usual
    assert [a.schedulings, b.schedulings] == [[Scheduling(progress_every_s=every_s)]] * 2
    for i in range(1, 2000):
        for replica in (a, b):
            if f"{i}/0#0" in replica.requests:
                replica.emit(f"{i}/0#0", [5], FinishReason.STOP)
    await asyncio.gather(*(task for id, task in tasks.items() if id != "0/0"))
    await settle()
    assert a.schedulings[-1] == b.schedulings[-1] == Scheduling()
    assert len(a.schedulings) < 8  # it does not change with each request
    a.emit("0/0#0", [6], FinishReason.STOP)
    assert (await tasks["0/0"]).tokens.tolist() == [5, 6]


async def test_a_new_group_goes_to_the_replica_with_the_fewest_tokens_whatever_happened_before():
    numbers = np.random.default_rng(0)
    names = [f"replica/{i}" for i in range(7)]
    router = Router(dict.fromkeys(names), is_death)
    for _ in range(3000):
        replica = router._replicas[numbers.choice(names)]
        match numbers.integers(4):
            case 0 | 1:
                replica.outstanding_tokens += int(numbers.integers(1, 5))
            case 2:
                replica.outstanding_tokens -= int(numbers.integers(0, replica.outstanding_tokens + 1))
                router._load_fell(replica)
            case 3 if numbers.random() < 0.1:
                await router.set_routable(numbers.choice(names, numbers.integers(1, 8), replace=False).tolist())
        least = min(router._routable, key=lambda name: (router._replicas[name].outstanding_tokens, name))
        assert router._least_loaded(router._routable) == least
