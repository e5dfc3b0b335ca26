"""Long form of the parameter sync tests: a process killed or stopped in each phase, and many sessions in a row."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.replica_session import PHASES_OF
from asyncrl.param_sync.session import PHASES
from asyncrl.param_sync.session_protocol import Staging
from benchmarks.remote import Remote
from tests.support.collective_processes import resources
from tests.support.sync_processes import (
    RankProcess,
    ReplicaProcess,
    config,
    digests,
    fleet_of,
    hurried,
    processes,
    segments,
    sync,
    version,
)

pytestmark = pytest.mark.faults

TRANSPORTS = ["shared_memory", "gloo"]
BUCKET = [phase for phase in PHASES if phase != "load"]
PHASES_OF_EACH_STAGING = [("bucket", phase) for phase in BUCKET] + [("full", phase) for phase in PHASES]
SLACK_S = 3.0  # beyond a deadline: a second for a party's own words, one for its abort, one to spare

over_each_transport = pytest.mark.parametrize("transport", TRANSPORTS)
in_each_phase = pytest.mark.parametrize(("staging", "phase"), PHASES_OF_EACH_STAGING)


class Meanwhile:
    """A replica session that calls ``then`` when ``step`` is called, or if it is called with the phase before, when
    that one has ended."""

    def __init__(self, replica: Remote, staging: Staging, step: str, then: Any) -> None:
        phases = PHASES_OF[staging]
        before = phases[phases.index(step) - 1]
        self._at, self._after = (step, "") if before in ("plan", "transfer") else ("", before)
        self._replica, self._then = replica, then

    def __getattr__(self, step: str) -> Any:
        if step == self._at:
            self._then()
        method = getattr(self._replica, step)
        if step != self._after:
            return method

        async def call(*args: Any) -> Any:
            answer = await method(*args)
            self._then()
            return answer

        return call


def deadline_of(phase: str) -> dict[str, float]:
    """A short deadline for this phase, for `hurried`; a load shares that of the transfer."""
    return {"transfer_s": 3.0} if phase in ("transfer", "load") else {f"{phase}_s": 1.0}


# -- a receiver --------------------------------------------------------------------------------------------------------


@over_each_transport
@in_each_phase
async def test_a_replica_killed_in_any_phase_is_evicted_at_once(transport, staging, phase):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet, settings = fleet_of(replicas), config(staging=staging)
        await sync(ranks, fleet, 1, settings)
        await replicas["replica/1"].strike(phase, signal.SIGKILL)
        began_s = time.monotonic()
        report = await sync(ranks, fleet, 2, settings)
        assert time.monotonic() - began_s < SLACK_S  # the deadlines are 20 s and more
        assert_named(report.evicted, phase, "replica/1", acknowledged(transport, staging))
        assert fleet.routable == {"replica/0": version(2)}
        assert (await replicas["replica/0"].look())["digests"] == digests(2)

        fleet.remove("replica/1")
        replicas["replica/1"].end()
        replicas["replica/1"] = Remote(ReplicaProcess, "replica/1", transport, {})
        fleet.add("replica/1", replicas["replica/1"])
        await assert_next_sync(ranks, fleet, replicas, settings)


@over_each_transport
@in_each_phase
async def test_a_replica_stopped_in_any_phase_costs_its_deadline_and_serves_nothing_when_it_wakes(
    transport, staging, phase
):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet, late, settings = fleet_of(replicas), replicas["replica/1"], config(staging=staging)
        await sync(ranks, fleet, 1, settings)
        await late.strike(phase, signal.SIGSTOP)
        (limit_s,) = deadline_of(phase).values()
        began_s = time.monotonic()
        report = await sync(ranks, fleet, 2, replace(hurried(**deadline_of(phase)), staging=staging))
        assert time.monotonic() - began_s < limit_s + SLACK_S
        assert_named(report.evicted, phase, "replica/1", acknowledged(transport, staging))
        assert fleet.routable == {"replica/0": version(2)}

        late.signal(signal.SIGCONT)
        with pytest.raises(SyncError):
            await late.resume("of another session", version(2))
        await asyncio.sleep(0.1)
        seen = await late.look()
        assert fleet.routable == {"replica/0": version(2)}
        # It may finish the step in which it was stopped, but no other: its weights are whole, or it is paused.
        whole = seen["digests"] in (digests(1), digests(2))
        assert (seen["intact"] and whole) or "resume 0.2" not in seen["calls"]
        later = {"verify": ["commit 0.2"], "commit": ["restore_kv"], "reload": ["resume 0.2"]}.get(phase, [])
        assert not set(later) & set(seen["calls"][seen["calls"].index("resume 0.1") + 1 :])
        assert (await replicas["replica/0"].look())["digests"] == digests(2)
        await assert_next_sync(ranks, fleet, replicas, settings)


def acknowledged(transport: str, staging: str) -> bool:
    """True if senders know what a replica has read; kept buckets are read at any time."""
    return (transport, staging) != ("shared_memory", "full")


def assert_named(evicted: dict[str, SyncError], phase: str, who: str, bucket: bool) -> None:
    """Check that only ``who`` was evicted; its error names phase, version and, if ``bucket``, a bucket."""
    assert evicted.keys() == {who}
    error = evicted[who]
    assert (error.phase, error.who, error.version) == (phase, who, version(2))
    if phase == "transfer" and bucket:
        assert re.search(r"trainer/0 dropped it: .*; buckets it had read: \d+|bucket 0/\d+ of session", str(error))


async def assert_next_sync(ranks, fleet, replicas, settings):
    assert (await sync(ranks, fleet, 3, settings)).evicted == {}
    assert fleet.routable == dict.fromkeys(replicas, version(3))
    for replica in replicas.values():
        assert (await replica.look())["digests"] == digests(3)


# -- a sender ----------------------------------------------------------------------------------------------------------

SENDER_CALLS = [("offer", "plan"), ("open", "transfer"), ("publish", "transfer"), ("finish", "transfer")]


@over_each_transport
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("staging", ["bucket", "full"])
@pytest.mark.parametrize(("call", "phase"), SENDER_CALLS, ids=[call for call, _ in SENDER_CALLS])
async def test_a_sender_lost_in_its_phases_is_reported_and_no_replica_serves_a_mixture(
    transport, number, staging, call, phase
):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1, config(staging=staging))
        await ranks[0].strike(call, number)
        (limit_s,) = deadline_of(phase).values() if number == signal.SIGSTOP else (0.0,)
        began_s = time.monotonic()
        with pytest.raises(SyncError) as raised:
            await sync(ranks, fleet, 2, replace(hurried(**deadline_of(phase)), staging=staging))
        assert time.monotonic() - began_s < limit_s + SLACK_S
        assert (raised.value.phase, raised.value.who, raised.value.version) == (phase, "trainer/0", version(2))

        for name, replica in replicas.items():
            seen = await replica.look()
            if name in fleet.routable:
                assert fleet.routable[name] == version(1)
                assert (seen["intact"], seen["digests"], seen["calls"][-1]) == (True, digests(1), "resume 0.1")
            else:
                assert "resume 0.2" not in seen["calls"]
        if staging == "full" or call not in ("publish", "finish"):  # nothing has been written
            assert fleet.routable == dict.fromkeys(replicas, version(1))
        else:
            assert fleet.routable == {}

        if number == signal.SIGSTOP:
            ranks[0].signal(signal.SIGCONT)
        else:
            ranks[0] = Remote(RankProcess, 0, transport, slice(None))
        await assert_next_sync(ranks, fleet, replicas, config(staging=staging))


@over_each_transport
@pytest.mark.parametrize(
    ("staging", "step"),
    [("bucket", step) for step in ("pause", "unload", "verify", "commit", "reload", "resume")]
    + [("full", step) for step in ("pause", "unload", "load", "verify", "commit", "reload", "resume")],
)
async def test_a_sender_killed_while_replicas_are_at_work_matters_only_before_the_transfer(transport, staging, step):
    async with processes(2, transport=transport) as (ranks, replicas):
        kill = lambda: ranks[0].signal(signal.SIGKILL)
        fleet, settings = fleet_of(replicas), config(staging=staging)
        await sync(ranks, fleet, 1, settings)
        watched = fleet_of({**replicas, "replica/0": Meanwhile(replicas["replica/0"], staging, step, kill)})
        for name in replicas:
            watched.serve(name, version(1))
        if staging == "bucket" and step in ("pause", "unload"):
            with pytest.raises(SyncError, match=r"sync phase transfer, trainer/0, version 0.2"):
                await sync(ranks, watched, 2, settings)
            served = 1
        else:
            assert (await sync(ranks, watched, 2, settings)).evicted == {}
            served = 2
        assert watched.routable == dict.fromkeys(replicas, version(served))
        for replica in replicas.values():
            assert (await replica.look())["digests"] == digests(served)
        ranks[0] = Remote(RankProcess, 0, transport, slice(None))
        await assert_next_sync(ranks, fleet, replicas, settings)


# -- many sessions -----------------------------------------------------------------------------------------------------


#: sessions until memory is stable: torch records the last 2000 collectives, and a session over gloo has a dozen
WARM = {"shared_memory": 20, "gloo": 220}


@over_each_transport
@pytest.mark.parametrize("staging", ["bucket", "full"])
async def test_200_syncs_in_a_row_leak_nothing(transport, staging):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet, everyone = fleet_of(replicas), [*ranks, *replicas.values()]
        seconds, used = [], []
        warm = WARM[transport]
        for number in range(1, warm + 201):
            began_s = time.monotonic()
            await sync(ranks, fleet, number, config(staging=staging))
            seconds.append(time.monotonic() - began_s)
            of_each = [await remote.resources() for remote in everyone] + [resources()]
            for remote, its in zip(everyone, of_each):
                its["segments"] = len(segments(remote.process.pid))
            used.append(of_each)
        seconds, used = seconds[warm:], used[warm:]
        first_s, last_s = statistics.median(seconds[:20]), statistics.median(seconds[-20:])
        assert last_s < 1.5 * first_s + 0.01
        for process in range(len(everyone) + 1):
            for kind in used[0][process]:
                first = statistics.median(session[process][kind] for session in used[:20])
                last = statistics.median(session[process][kind] for session in used[-20:])
                assert last <= first + (1e6 if kind == "bytes" else 0), f"{kind} of process {process}"


@over_each_transport
async def test_the_death_of_either_side_leaves_nothing_behind(transport):
    def names():
        return {name for name in os.listdir("/dev/shm") if "asyncrl" in name or any(pid in name for pid in pids)}

    pids: set[str] = set()
    addresses = []
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)

        async def used(remote):
            found = await remote.resources()
            return found["fds"], found["threads"], len(segments(remote.process.pid))

        async def comes_back_to(remote, before):
            """Wait for ``before``: threads of a broken group take a while to end."""
            limit_s = time.monotonic() + 10
            while (now := await used(remote)) != before and time.monotonic() < limit_s:
                await asyncio.sleep(0.1)
            assert now == before

        pids |= {str(remote.process.pid) for remote in [*ranks, *replicas.values()]}
        addresses.append((await ranks[0].offer()).address)
        await sync(ranks, fleet, 1)
        await sync(ranks, fleet, 2)
        survivor, sender_used = await used(replicas["replica/0"]), await used(ranks[0])

        replicas["replica/1"].end()
        await sync(ranks, fleet, 3)
        replicas["replica/1"] = Remote(ReplicaProcess, "replica/1", transport, {})
        fleet.add("replica/1", replicas["replica/1"])
        await sync(ranks, fleet, 4)
        await comes_back_to(ranks[0], sender_used)
        await comes_back_to(replicas["replica/0"], survivor)

        ranks[0].end()
        ranks[0] = Remote(RankProcess, 0, transport, slice(None))
        pids |= {str(remote.process.pid) for remote in [*ranks, *replicas.values()]}
        addresses.append((await ranks[0].offer()).address)
        await sync(ranks, fleet, 5)
        await comes_back_to(replicas["replica/0"], survivor)
        assert not listens(addresses[0])
        assert listens(addresses[1])
    assert names() == set()
    assert not any(listens(address) for address in addresses)


@over_each_transport
async def test_closing_both_sides_leaves_nothing_behind(transport):
    async with processes(1, transport=transport) as (ranks, replicas):
        everyone = [*ranks, *replicas.values()]
        before = [(await remote.resources())["threads"] for remote in replicas.values()]
        address = (await ranks[0].offer()).address
        await sync(ranks, fleet_of(replicas), 1)
        for remote in everyone:
            await remote.close()
            assert segments(remote.process.pid) == []
        limit_s = time.monotonic() + 10
        while (after := [(await remote.resources())["threads"] for remote in replicas.values()]) > before:
            assert time.monotonic() < limit_s, f"{after} threads, {before} before the session"
            await asyncio.sleep(0.1)
        assert not listens(address)


def listens(address: Any) -> bool:
    """True if a process listens at a sender's address."""
    if hasattr(address, "port"):
        with socket.socket() as caller:
            return caller.connect_ex((address.host, address.port)) == 0
    return f"@{address.socket}" in Path("/proc/net/unix").read_text()
