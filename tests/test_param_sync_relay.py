"""Sync sessions of many replicas of a machine through its relay."""

import asyncio

import pytest

from asyncrl.config.schema import ParamSyncConfig
from asyncrl.param_sync.digest import ROLES, combine_hashes
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest
from asyncrl.param_sync.relay import GRACE_S, Relay, RelayedSessions
from asyncrl.param_sync.sender import SendReport
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.session_protocol import ReceivePlan, repeatable
from asyncrl.processes.actor_client import ActorDied
from asyncrl.types.versions import PolicyVersion

DIGESTS = {role: combine_hashes({}) for role in ROLES}


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
            return {"plan": ("reader",), "verify": DIGESTS}.get(name, 1)

        return call


class CountedRelay(Relay):
    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.death = [], None

    async def make(self, calls):
        if self.death is not None:
            raise self.death
        self.sizes.append(len(calls))
        return await super().make(calls)


@pytest.fixture
def replicas():
    return {f"replica/{i}": Replica() for i in range(3)}


@pytest.fixture
def relay(replicas):
    made = CountedRelay()
    for name, replica in replicas.items():
        made.register(name, replica)
    return made


@pytest.fixture
def sessions(relay, replicas):
    relayed = RelayedSessions(relay)
    return {name: relayed.session(name, replica) for name, replica in replicas.items()}


async def test_calls_of_one_moment_travel_together_and_each_gets_its_own_answer(relay, sessions, replicas):
    found = await asyncio.gather(
        sessions["replica/0"].verify("s"), sessions["replica/1"].unload("s", "unload"), sessions["replica/2"].plan(None)
    )
    assert found == [DIGESTS, 1, ("reader",)]
    assert relay.sizes == [3]
    assert [replica.calls for replica in replicas.values()] == [["verify"], ["unload"], ["plan"]]


async def test_a_replica_that_hangs_delays_no_other(sessions, replicas):
    replicas["replica/1"].free.clear()
    slow = asyncio.create_task(sessions["replica/1"].commit("s", PolicyVersion(0, 1)))
    others = asyncio.gather(*(sessions[f"replica/{i}"].verify("s") for i in (0, 2)))
    assert await asyncio.wait_for(others, 20 * GRACE_S) == [DIGESTS] * 2
    assert not slow.done()
    replicas["replica/1"].free.set()
    assert await slow == 1


async def test_an_answer_to_a_caller_that_gave_up_disturbs_nobody(sessions, replicas):
    replicas["replica/1"].free.clear()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(sessions["replica/1"].load("s"), 0.01)
    replicas["replica/1"].free.set()
    assert await sessions["replica/1"].load("s") == 1


async def test_errors_of_replicas_keep_their_type(sessions, replicas):
    replicas["replica/0"].error = SyncError("pause", None, None, None, "it does not pause")
    found = await asyncio.gather(*(s.pause("s", "abort", 1.0) for s in sessions.values()), return_exceptions=True)
    assert isinstance(found[0], SyncError)
    assert found[1:] == [1, 1]


async def test_without_its_relay_a_machine_is_called_directly(relay, sessions, replicas, caplog):
    relay.death = ActorDied("relay/0")
    verified = await asyncio.gather(*(sessions[name].verify("s") for name in ("replica/0", "replica/1")))
    assert verified == [DIGESTS] * 2
    assert caplog.text.count("without this relay") == 1
    assert await sessions["replica/1"].commit("s", PolicyVersion(0, 1)) == 1
    assert [replica.calls for replica in replicas.values()] == [["verify"], ["verify", "commit"], []]


async def test_a_relay_reaches_another_machine_through_its_relay_and_without_it(relay, replicas, caplog):
    first, there = CountedRelay(), RelayedSessions(relay)
    for name, replica in replicas.items():
        first.register(name, there.session(name, replica))
    caller = RelayedSessions(first)
    sessions = [caller.session(name, replica) for name, replica in replicas.items()]
    replicas["replica/1"].error = SyncError("pause", None, None, None, "it does not pause")
    pause = [session.pause("s", "abort", 1.0) for session in sessions]
    assert [type(found) for found in await asyncio.gather(*pause, return_exceptions=True)] == [int, SyncError, int]
    assert relay.sizes == [3]
    relay.death = ActorDied("relay/1")
    assert await asyncio.gather(*(session.verify("s") for session in sessions)) == [DIGESTS] * 3
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
    assert replica.calls == ["receive", "pause", "plan", "receive"]


async def test_a_replica_that_was_replaced_is_called_in_its_place(relay, sessions):
    other = Replica()
    relay.register("replica/0", other)
    await sessions["replica/0"].reload("s")
    assert other.calls == ["reload"]


class Sender:
    async def manifest(self):
        return Manifest(())

    async def address(self):
        return None

    async def send(self, plan):
        return SendReport()

    async def abort(self, session): ...


@pytest.mark.parametrize("failing", [False, True])
async def test_a_session_makes_one_call_for_each_phase_and_evicts_only_what_fails(relay, sessions, replicas, failing):
    if failing:
        replicas["replica/2"].error = SyncError("pause", None, None, None, "it does not pause")
    fleet = Fleet()
    for name, session in sessions.items():
        fleet.add(name, session)
    report = await SyncSession({"trainer/0": Sender()}, fleet, ParamSyncConfig(pause="abort")).run(PolicyVersion(0, 1))
    assert set(report.evicted) == ({"replica/2"} if failing else set())
    assert set(fleet.routable) == set(replicas) - set(report.evicted)
    assert len(relay.sizes) == 8  # plan, pause, unload, receive, verify, commit, reload, resume
