"""The router against scripted replicas: balance, groups kept together, samples that survive syncs and evictions."""

import asyncio

import numpy as np
import pytest

from asyncrl.rollouter.agent_loops.base import GenerationFailed
from asyncrl.rollouter.engine import EventBatch, Request, SamplingParams
from asyncrl.rollouter.router import Router
from asyncrl.sample import FinishReason, PolicyVersion


class Scripted:
    """A replica that does what the test says: it keeps what was submitted, and reports what the test puts."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.submits: list[int] = []
        self.aborted: list[str] = []
        self._events: asyncio.Queue[EventBatch | Exception] = asyncio.Queue()
        self.version = PolicyVersion(0, 0)

    async def submit(self, requests):
        self.submits.append(len(requests))
        self.requests |= {r.id: r for r in requests}

    async def abort(self, ids):
        self.aborted += ids

    async def events(self):
        event = await self._events.get()
        if isinstance(event, Exception):
            raise event
        return event

    def say(self, id: str, tokens: list[int], finish: FinishReason | None = None, error: str = "") -> None:
        n = len(tokens)
        self._events.put_nowait(
            EventBatch(
                [id],
                np.array([0, n]),
                np.array(tokens, np.int32),
                -np.ones(n, np.float32),
                [self.version],
                [finish],
                [False],
                {id: error} if error else {},
            )
        )

    def die(self, error: Exception) -> None:
        self._events.put_nowait(error)


def request(id: str, group: str = "g", max_new: int = 10) -> Request:
    return Request(id, group, np.array([1, 2], np.int32), 2, 7, 0, max_new, SamplingParams())


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def two():
    replicas = {"a": Scripted(), "b": Scripted()}
    router = Router(replicas)
    running = asyncio.create_task(router.run())
    yield router, replicas["a"], replicas["b"], running
    running.cancel()


async def test_a_group_stays_on_one_replica_and_goes_out_in_one_call(two):
    router, a, b, _ = two
    tasks = [asyncio.create_task(router.generate(request(f"g/{i}"))) for i in range(4)]
    await settle()
    assert (a.submits, b.submits) == ([4], [])
    for i in range(4):
        a.say(f"g/{i}#0", [5], FinishReason.STOP)
    assert [len((await t).tokens) for t in tasks] == [1] * 4


async def test_groups_go_where_fewest_tokens_are_outstanding(two):
    router, a, b, _ = two
    tasks = [
        asyncio.create_task(router.generate(request(f"{g}/0", g, n))) for g, n in (("x", 100), ("y", 10), ("z", 10))
    ]
    await settle()
    assert set(a.requests) == {"x/0#0"}
    assert set(b.requests) == {"y/0#0", "z/0#0"}
    a.say("x/0#0", [1] * 95)
    await settle()
    assert router.outstanding_tokens == {"a": 5, "b": 20}
    for t in tasks:
        t.cancel()
    await settle()
    assert router.outstanding_tokens == {"a": 0, "b": 0}
    assert (a.aborted, sorted(b.aborted)) == (["x/0#0"], ["y/0#0", "z/0#0"])


async def test_a_sample_cut_by_a_sync_continues_under_the_new_version(two):
    router, a, _, _ = two
    task = asyncio.create_task(router.generate(request("g/0")))
    await settle()
    a.say("g/0#0", [11, 12, 13])
    a.say("g/0#0", [], FinishReason.ABORT)
    await settle()
    rest = a.requests["g/0#1"]
    assert (rest.tokens.tolist(), rest.position, rest.max_new_tokens) == ([1, 2, 11, 12, 13], 3, 7)
    a.version = PolicyVersion(0, 1)
    a.say("g/0#0", [99])  # late, of the part that was cut
    a.say("g/0#1", [14], FinishReason.STOP)
    done = await task
    assert done.tokens.tolist() == [11, 12, 13, 14]
    assert [(s.start, s.version.number) for s in done.spans] == [(0, 0), (3, 1)]


async def test_a_sample_of_an_evicted_replica_continues_elsewhere(two):
    router, a, b, _ = two
    task = asyncio.create_task(router.generate(request("g/0")))
    await settle()
    a.say("g/0#0", [11])
    await settle()
    await router.set_routable(["b"])
    await settle()
    a.say("g/0#0", [99, 99], FinishReason.STOP)  # a ghost
    await settle()
    assert b.requests["g/0#1"].tokens.tolist() == [1, 2, 11]
    b.say("g/0#1", [12], FinishReason.STOP)
    assert (await task).tokens.tolist() == [11, 12]


async def test_without_a_routable_replica_requests_wait(two):
    router, a, b, _ = two
    await router.set_routable([])
    task = asyncio.create_task(router.generate(request("g/0")))
    await settle()
    assert not a.requests
    assert not b.requests
    await router.set_routable(["b"])
    await settle()
    b.say("g/0#0", [1], FinishReason.LENGTH)
    assert (await task).finish is FinishReason.LENGTH


async def test_a_refused_request_says_why(two):
    router, a, _, _ = two
    task = asyncio.create_task(router.generate(request("g/0")))
    await settle()
    a.say("g/0#0", [], FinishReason.ERROR, "longer than the context")
    with pytest.raises(GenerationFailed, match="longer than the context"):
        await task


async def test_a_dying_replica_ends_the_router_with_its_exception(two):
    _, a, _, running = two
    a.die(ValueError("out of memory"))
    with pytest.raises(ExceptionGroup) as e:
        await running
    assert "out of memory" in str(e.value.exceptions[0])


async def test_unknown_replicas_are_refused_by_name(two):
    with pytest.raises(ValueError, match="no replica named c"):
        await two[0].set_routable(["c"])
