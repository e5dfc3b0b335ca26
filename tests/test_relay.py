"""Calls to many actors of a machine through its relay, and a sync session that makes them."""

import asyncio

import pytest

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.session_protocol import Offer, ReceivePlan, SendReport, repeatable
from asyncrl.processes.actor_client import ActorDied
from asyncrl.processes.relay import Answer, Call, Relay, Relayed
from asyncrl.types.versions import PolicyVersion

GATHER_S = 0.1


class Replica:
    """Answers at once, or when ``free`` is set; raises ``error`` when it is asked to pause."""

    def __init__(self) -> None:
        self.free, self.error, self.calls = asyncio.Event(), None, []
        self.free.set()

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args):
            self.calls.append(name)
            await self.free.wait()
            if name == "pause" and self.error is not None:
                raise self.error
            return {"plan": ("reader",)}.get(name, 1)

        return call


class CountedRelay(Relay):
    """``sizes``: calls of each exchange. Raises ``death``, or never answers while ``hangs`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.death, self.hangs = [], None, False

    async def exchange(self, caller, calls, gather_s, within_s):
        if self.death is not None:
            raise self.death
        self.sizes.append(len(calls))
        answers = await super().exchange(caller, calls, gather_s, within_s)
        while self.hangs:
            await asyncio.sleep(0.01)
        return answers


@pytest.fixture
def replicas():
    return {f"replica/{i}": Replica() for i in range(3)}


@pytest.fixture
def relay():
    return CountedRelay()


@pytest.fixture
def clients(relay, replicas):
    relayed = Relayed(relay, "driver", GATHER_S)
    return {name: relayed.client(relay.register(replica), replica) for name, replica in replicas.items()}


async def test_calls_of_one_moment_travel_together_and_each_gets_its_own_answer(relay, clients, replicas):
    found = await asyncio.gather(
        clients["replica/0"].verify("s", {}),
        clients["replica/1"].unload("s", "unload"),
        clients["replica/2"].plan(None),
    )
    assert found == [1, 1, ("reader",)]
    assert relay.sizes == [3]
    assert [replica.calls for replica in replicas.values()] == [["verify"], ["unload"], ["plan"]]


async def test_a_replica_that_hangs_delays_no_other(clients, replicas):
    replicas["replica/1"].free.clear()
    slow = asyncio.create_task(clients["replica/1"].commit("s", PolicyVersion(0, 1)))
    others = asyncio.gather(*(clients[f"replica/{i}"].verify("s", {}) for i in (0, 2)))
    assert await asyncio.wait_for(others, 40 * GATHER_S) == [1, 1]
    assert not slow.done()
    replicas["replica/1"].free.set()
    assert await slow == 1


async def test_a_call_is_made_while_earlier_ones_wait(relay, clients, replicas):
    for name in ("replica/1", "replica/2"):
        replicas[name].free.clear()
    slow = [asyncio.create_task(clients[f"replica/{i}"].events("s")) for i in (1, 2)]
    await asyncio.sleep(0)
    for _ in range(3):
        assert await asyncio.wait_for(clients["replica/0"].submit("s"), 40 * GATHER_S) == 1
    replicas["replica/1"].free.set()
    replicas["replica/2"].free.set()
    assert await asyncio.gather(*slow) == [1, 1]
    assert sum(relay.sizes) == 5


async def test_answers_of_one_moment_travel_together(relay, clients, replicas):
    for replica in replicas.values():
        replica.free.clear()
    rounds = 5

    async def listen(name):
        for _ in range(rounds):
            await clients[name].events()

    listening = asyncio.gather(*(listen(name) for name in replicas))
    for answered in range(rounds):
        while not all(len(replica.calls) == answered + 1 for replica in replicas.values()):
            await asyncio.sleep(0)
        for replica in replicas.values():
            replica.free.set()
            replica.free.clear()
    await listening
    assert relay.sizes == [3] * rounds


async def test_a_relay_with_nothing_to_answer_says_so(relay):
    replica = Replica()
    replica.free.clear()
    target = relay.register(replica)
    assert await relay.exchange("driver", [Call(0, target, "events", ())], GATHER_S, within_s=0.01) == []
    replica.free.set()
    assert await relay.exchange("driver", [], GATHER_S, within_s=60.0) == [Answer(0, 1, None)]
    assert replica.calls == ["events"]


async def test_an_answer_waits_no_longer_because_its_caller_makes_more_calls(relay):
    hanging, replica = Replica(), Replica()
    hanging.free.clear()
    targets = [relay.register(hanging), relay.register(replica)]
    number, exchanges = 1, []
    exchanges.append(asyncio.create_task(relay.exchange("driver", [Call(0, targets[0], "load", ())], GATHER_S, 60.0)))
    since_s = asyncio.get_running_loop().time()
    while not any(exchange.done() and exchange.result() for exchange in exchanges):
        calls = [Call(number, targets[1], "load", ())]
        exchanges.append(asyncio.create_task(relay.exchange("driver", calls, GATHER_S, 60.0)))
        number += 1
        await asyncio.sleep(GATHER_S / 10)
        assert asyncio.get_running_loop().time() < since_s + 100 * GATHER_S
    assert hanging.calls == ["load"]


async def test_an_answer_to_a_caller_that_gave_up_disturbs_nobody(clients, replicas):
    replicas["replica/1"].free.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(clients["replica/1"].load("s"), 0.01)
    replicas["replica/1"].free.set()
    assert await clients["replica/1"].load("s") == 1


async def test_callers_of_a_relay_do_not_get_each_others_answers(relay, replicas):
    replica = replicas["replica/0"]
    target = relay.register(replica)
    callers = [Relayed(relay, caller, GATHER_S).client(target, replica) for caller in ("driver", "rollouter 1")]
    assert await asyncio.gather(callers[0].verify("s", {}), callers[1].load("s")) == [1, 1]


async def test_errors_of_replicas_keep_their_type(clients, replicas):
    replicas["replica/0"].error = SyncError("pause", None, None, None, "it does not pause")
    found = await asyncio.gather(*(s.pause("s", "abort", 1.0) for s in clients.values()), return_exceptions=True)
    assert isinstance(found[0], SyncError)
    assert found[1:] == [1, 1]


async def test_without_its_relay_a_machine_is_called_directly(relay, clients, replicas, caplog):
    relay.death = ActorDied("relay/0")
    verified = await asyncio.gather(*(clients[name].verify("s", {}) for name in ("replica/0", "replica/1")))
    assert verified == [1, 1]
    assert caplog.text.count("without this relay") == 1
    assert await clients["replica/1"].commit("s", PolicyVersion(0, 1)) == 1
    assert [replica.calls for replica in replicas.values()] == [["verify"], ["verify", "commit"], []]


async def test_a_relay_that_hangs_counts_as_dead(relay, caplog):
    replica, relayed = Replica(), Relayed(relay, "driver", GATHER_S, silent_s=0.05)
    client = relayed.client(relay.register(replica), replica)
    relay.hangs = True
    assert await client.verify("s", {}) == 1
    assert "without this relay from now on: it was silent for 0.05 s" in caplog.text
    assert not relayed.alive
    relay.hangs = False  # its late answer, which nobody wants
    await asyncio.sleep(0.05)
    assert replica.calls == ["verify", "verify"]


async def test_a_relay_reaches_another_machine_through_its_relay_and_without_it(relay, clients, replicas, caplog):
    first = CountedRelay()
    caller = Relayed(first, "driver", GATHER_S)
    there = [caller.client(first.register(client), replicas[name]) for name, client in clients.items()]
    replicas["replica/1"].error = SyncError("pause", None, None, None, "it does not pause")
    pause = [session.pause("s", "abort", 1.0) for session in there]
    assert [type(found) for found in await asyncio.gather(*pause, return_exceptions=True)] == [int, SyncError, int]
    assert relay.sizes == [3]
    relay.death = ActorDied("relay/1")
    assert await asyncio.gather(*(session.verify("s", {}) for session in there)) == [1] * 3
    assert caplog.text.count("without this relay") == 1
    assert [replica.calls for replica in replicas.values()] == [["pause", "verify"]] * 3


async def test_a_phase_that_is_called_again_is_gone_through_once(replicas):
    replica = replicas["replica/0"]
    session = repeatable(replica)
    replica.free.clear()
    first = asyncio.create_task(session.receive("s", 1.0))
    await asyncio.sleep(0)
    again = asyncio.create_task(session.receive("s", 1.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(first, 0.01)
    replica.free.set()
    assert (await again, await session.receive("s", 1.0)) == (1, 1)
    replica.error = SyncError("pause", None, None, None, "it does not pause")
    for _ in range(2):
        with pytest.raises(SyncError, match="does not pause"):
            await session.pause("s", "abort", 1.0)
    assert replica.calls == ["receive", "pause"]
    for _ in range(2):  # a second connection would take the first one's place at the senders, or not
        await session.plan(ReceivePlan("t", PolicyVersion(0, 1), Manifest(()), (), 1.0))
    await session.receive("t", 1.0)
    await session.plan(ReceivePlan("u", PolicyVersion(0, 2), Manifest(()), (), 1.0))
    with pytest.raises(SyncError, match="an earlier session was planned again, late"):
        await session.plan(ReceivePlan("t", PolicyVersion(0, 1), Manifest(()), (), 1.0))
    assert replica.calls == ["receive", "pause", "plan", "receive", "plan"]


class Sender:
    async def offer(self):
        return Offer(Manifest(()), None)

    async def send(self, plan):
        return SendReport()

    async def abort(self, session): ...


@pytest.mark.parametrize("failing", [False, True])
async def test_a_session_calls_all_replicas_at_once_and_evicts_only_what_fails(relay, clients, replicas, failing):
    if failing:
        replicas["replica/2"].error = SyncError("pause", None, None, None, "it does not pause")
    fleet = Fleet()
    for name, client in clients.items():
        fleet.add(name, client)
    report = await SyncSession({"trainer/0": Sender()}, fleet, ParamSyncConfig(pause="abort")).run(PolicyVersion(0, 1))
    assert set(report.evicted) == ({"replica/2"} if failing else set())
    assert set(fleet.routable) == set(replicas) - set(report.evicted)
    assert len(relay.sizes) == 4  # plan; pause and unload; receive; verify, commit, reload and resume
