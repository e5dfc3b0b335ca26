"""Whole sync sessions between real processes, and their failures."""

from __future__ import annotations

import asyncio
import functools
import re
import signal
import time
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from asyncrl.config.schema import RolloutConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.coordinator import ParameterSyncCoordinator
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import Manifest, ManifestError
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.session import PHASES, SyncSession
from asyncrl.param_sync.session_protocol import REPLICA_CALLS, Offer, ReceivePlan, answer, remote_session
from asyncrl.run.rollouters import Rollouters, shard_names
from tests.support.sync_processes import (
    WeightsEngine,
    config,
    digests,
    fleet_of,
    hurried,
    processes,
    segments,
    sync,
    version,
    weights,
)

BUCKET = {"staging": "bucket"}
FULL = {"staging": "full"}
ROLLING = {"staging": "full", "rollout_update": "rolling"}

over_each_transport = pytest.mark.parametrize("transport", ["shared_memory", "gloo"])


@pytest.mark.parametrize("how", [BUCKET, FULL, ROLLING], ids=["bucket", "full", "rolling"])
@over_each_transport
async def test_all_replicas_reach_the_new_version_bit_exact(how, transport):
    phases = set(PHASES) - ({"load"} if how is BUCKET else set())
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet, recorder = fleet_of(replicas), Recorder("driver")
        assert fleet.routable == {}
        report = await sync(ranks, fleet, 1, config(**how), recorder)
        assert fleet.routable == dict.fromkeys(replicas, version(1))
        assert report.digests == digests(1)
        assert report.nbytes == sum(t.nbytes for t in weights(1).values())
        assert report.evicted == {}
        assert report.paused_s.keys() == replicas.keys()
        assert report.seconds.keys() == phases
        assert {span.name for span in recorder.drain().spans} == {f"sync/{phase}" for phase in phases}
        for replica in replicas.values():
            seen = await replica.look()
            assert seen["digests"] == digests(1)
            assert seen["calls"] == ["pause abort", "release_kv", "commit 0.1", "restore_kv", "resume 0.1"]


@pytest.mark.parametrize(
    ("pause", "kv", "calls"),
    [
        ("wait", "keep", ["pause wait", "commit 0.1", "resume 0.1"]),
        ("keep", "recompute", ["pause keep", "flush_kv", "commit 0.1", "resume 0.1"]),
    ],
)
async def test_pause_and_kv_are_as_configured(pause, kv, calls):
    async with processes(1) as (ranks, replicas):
        await sync(ranks, fleet_of(replicas), 1, config(pause=pause, kv=kv, checksum=False))
        seen = await replicas["replica/0"].look()
        assert seen["calls"] == calls
        assert seen["digests"] == digests(1)


@pytest.mark.parametrize("how", [BUCKET, ROLLING], ids=["bucket", "rolling"])
@over_each_transport
async def test_several_senders_share_a_session(how, transport):
    async with processes(2, shares=(slice(0, 5), slice(5, None)), transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        for number in (1, 2):
            assert (await sync(ranks, fleet, number, config(**how))).digests == digests(number)
        assert fleet.routable == dict.fromkeys(replicas, version(2))


async def test_many_sessions_leak_nothing():
    async with processes(2) as (ranks, replicas):
        fleet, everyone = fleet_of(replicas), [*ranks, *replicas.values()]
        await sync(ranks, fleet, 1)
        before = [(await remote.resources())["fds"] for remote in everyone]
        for number in range(2, 52):
            await sync(ranks, fleet, number)
        assert [(await remote.resources())["fds"] for remote in everyone] == before


async def test_closing_releases_memory_and_descriptors():
    async with processes(1) as (ranks, replicas):
        everyone = [*ranks, *replicas.values()]
        await sync(ranks, fleet_of(replicas), 1)
        assert all(segments(remote.process.pid) for remote in everyone)
        for remote in everyone:
            await remote.close()
            assert segments(remote.process.pid) == []


# -- staging full ------------------------------------------------------------------------------------------------------


async def test_with_a_host_copy_replicas_generate_during_the_transfer_and_the_senders_are_free_after_it():
    async with processes(2) as (ranks, replicas):
        fleet, sent = fleet_of(replicas), asyncio.Event()
        await sync(ranks, fleet, 1, config(**ROLLING))
        await ranks[0].set(hold_at=9)
        session = SyncSession({"trainer/0": ranks[0]}, fleet, config(**ROLLING), on_sent=sent.set)
        running = asyncio.create_task(session.run(version(2)))
        await ranks[0].held()
        before = [(await replica.look())["calls"] for replica in replicas.values()]
        assert all(calls[-1] == "resume 0.1" for calls in before)  # nothing is paused
        replicas["replica/1"].signal(signal.SIGSTOP)
        await ranks[0].release()
        await asyncio.wait_for(sent.wait(), 10)  # a replica that does not read delays no sender
        replicas["replica/1"].signal(signal.SIGCONT)
        report = await running
        assert report.evicted == {}
        assert fleet.routable == dict.fromkeys(replicas, version(2))


async def test_a_rolling_update_switches_replicas_one_at_a_time():
    async with processes(3) as (ranks, replicas):
        recorder = Recorder("driver")
        await sync(ranks, fleet_of(replicas), 1, config(**ROLLING), recorder)
        spans = recorder.drain().spans
        paused = sorted((s.start_s, s.end_s, s.args["who"]) for s in spans if s.name == "sync/pause")
        resumed = sorted((s.start_s, s.end_s, s.args["who"]) for s in spans if s.name == "sync/resume")
        assert [who for *_, who in paused] == [who for *_, who in resumed] == sorted(replicas)
        for (_, end_s, _), (start_s, _, _) in zip(resumed[:-1], paused[1:], strict=True):
            assert end_s <= start_s


async def test_a_sender_that_dies_in_the_transfer_leaves_the_old_version_serving():
    async with processes(2) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1, config(**FULL))
        await ranks[0].set(hold_at=9)
        session = asyncio.create_task(sync(ranks, fleet, 2, config(**FULL)))
        await ranks[0].held()
        ranks[0].signal(signal.SIGKILL)
        with pytest.raises(SyncError, match=r"sync phase transfer, trainer/0, version 0.2"):
            await session
        assert fleet.routable == dict.fromkeys(replicas, version(1))
        for replica in replicas.values():
            seen = await replica.look()
            assert (seen["digests"], seen["calls"][-1]) == (digests(1), "resume 0.1")
        async with processes(0) as (fresh, _):
            await sync(fresh, fleet, 3, config(**FULL))
        assert fleet.routable == dict.fromkeys(replicas, version(3))


async def test_a_replica_that_dies_in_a_rolling_update_is_evicted_and_the_others_continue():
    async with processes(3) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1, config(**ROLLING))
        replicas["replica/1"].signal(signal.SIGKILL)
        report = await sync(ranks, fleet, 2, config(**ROLLING))
        assert report.evicted.keys() == {"replica/1"}
        assert fleet.routable == {"replica/0": version(2), "replica/2": version(2)}


async def test_a_replica_that_dies_in_a_rolling_update_is_reported_before_the_others_have_changed():
    async with processes(3) as (ranks, replicas):
        fleet, reported = fleet_of(replicas), []
        await sync(ranks, fleet, 1, config(**ROLLING))

        async def report():
            reported.append(dict(fleet.routable))

        dies = lambda: replicas["replica/0"].signal(signal.SIGKILL)
        await SyncSession({"trainer/0": ranks[0]}, fleet, config(**ROLLING), None, None, dies, report).run(version(2))
        assert {"replica/1": version(2), "replica/2": version(1)} in reported


async def test_a_copy_is_read_again_only_in_its_own_session():
    """A stopped replica wakes when the memory of its copy holds a later version."""
    async with processes(2) as (ranks, replicas):
        fleet, late = fleet_of(replicas), replicas["replica/1"]
        await sync(ranks, fleet, 1, config(**ROLLING))
        sent = asyncio.Event()
        settings = hurried(pause_s=3.0, **{f"{p}_s": 5.0 for p in ("plan", "transfer", "resume", "reload")})
        settings = replace(settings, **ROLLING)
        session = SyncSession({"trainer/0": ranks[0]}, fleet, settings, on_sent=sent.set)
        running = asyncio.create_task(session.run(version(2)))
        await sent.wait()
        late.signal(signal.SIGSTOP)
        report = await running
        assert report.evicted.keys() <= {"replica/1"}
        await sync(ranks, fleet, 3, replace(settings, deadlines=replace(settings.deadlines, plan_s=3.0)))
        late.signal(signal.SIGCONT)
        for step in (late.load, lambda session: late.verify(session, {})):
            with pytest.raises(SyncError):
                await step(report.session)
        assert (await sync(ranks, fleet, 4, config(**ROLLING))).evicted == {}
        assert fleet.routable == dict.fromkeys(replicas, version(4))
        assert (await late.look())["digests"] == digests(4)


@over_each_transport
async def test_a_wrong_shape_is_refused_before_anything_is_paused(transport):
    async with processes(2, extra={"norm.weight": torch.zeros(8)}, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        with pytest.raises(ManifestError, match=r"norm.weight: sent as float32\[7\], the replica holds float32\[8\]"):
            await sync(ranks, fleet, 1)
        for replica in replicas.values():
            assert (await replica.look())["calls"] == []
        fleet.remove("replica/1")
        await sync(ranks, fleet, 1)
        assert fleet.routable == {"replica/0": version(1)}


@over_each_transport
async def test_a_replica_killed_in_the_transfer_is_evicted_at_once_and_survivors_commit(transport):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        await ranks[0].set(hold_at=9)
        session = asyncio.create_task(sync(ranks, fleet, 2))
        await ranks[0].held()
        replicas["replica/1"].signal(signal.SIGKILL)
        await ranks[0].release()
        started = time.monotonic()
        report = await session
        assert time.monotonic() - started < 5  # its deadlines are 20 s and more
        assert report.evicted.keys() == {"replica/1"}
        expected = r"transfer, replica/1, version 0.2: .*; trainer/0 dropped it: went away .*; buckets it had read: \d"
        assert re.search(expected, str(report.evicted["replica/1"]))
        assert fleet.routable == {"replica/0": version(2)}
        assert (await replicas["replica/0"].look())["digests"] == digests(2)
        report = await sync(ranks, fleet, 3)
        assert report.evicted["replica/1"].phase == "plan"
        assert fleet.routable == {"replica/0": version(3)}


@over_each_transport
async def test_a_stopped_replica_costs_its_deadline_and_changes_nothing_when_it_wakes(transport):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet, late = fleet_of(replicas), replicas["replica/1"]
        await sync(ranks, fleet, 1)
        await ranks[0].set(hold_at=9)
        session = asyncio.create_task(sync(ranks, fleet, 2, hurried(transfer_s=3.0)))
        await ranks[0].held()
        late.signal(signal.SIGSTOP)
        await ranks[0].release()
        report = await session
        error = report.evicted["replica/1"]
        assert (error.phase, error.who, error.version) == ("transfer", "replica/1", version(2))
        assert "was silent" in str(error)
        assert report.paused_s["replica/0"] < report.paused_s["replica/1"] - 0.5  # it delays no other replica
        assert fleet.routable == {"replica/0": version(2)}

        late.signal(signal.SIGCONT)
        seen = await late.look()
        assert seen["calls"][-2:] == ["pause abort", "release_kv"]  # it neither committed nor resumed
        assert not seen["intact"]
        for attempt in (late.receive(report.session, 1.0), late.verify(report.session, {})):
            with pytest.raises(SyncError, match=r"transfer|verify"):
                await attempt
        with pytest.raises(SyncError):
            await late.commit(report.session, version(2))
        assert (await late.look())["calls"] == seen["calls"]

        assert (await sync(ranks, fleet, 3)).evicted == {}
        assert fleet.routable == dict.fromkeys(replicas, version(3))
        assert (await late.look())["digests"] == digests(3)


async def test_a_replica_stopped_before_the_session_does_not_delay_the_others():
    async with processes(2) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        replicas["replica/1"].signal(signal.SIGSTOP)
        report = await sync(ranks, fleet, 2, hurried(plan_s=3.0))
        assert report.evicted["replica/1"].phase == "plan"
        assert "3 s" in str(report.evicted["replica/1"])
        assert fleet.routable == {"replica/0": version(2)}
        replicas["replica/1"].signal(signal.SIGCONT)
        await sync(ranks, fleet, 3)
        assert fleet.routable == dict.fromkeys(replicas, version(3))


@over_each_transport
async def test_a_killed_sender_fails_the_session_and_no_replica_serves_a_mixture(transport):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        await ranks[0].set(hold_at=9)
        session = asyncio.create_task(sync(ranks, fleet, 2))
        await ranks[0].held()
        ranks[0].signal(signal.SIGKILL)
        with pytest.raises(SyncError, match=r"sync phase transfer, trainer/0, version 0.2"):
            await session
        assert fleet.routable == {}
        for replica in replicas.values():
            seen = await replica.look()
            assert not seen["intact"]
            assert seen["calls"][-1] == "release_kv"  # still paused
        async with processes(0, transport=transport) as (fresh, _):
            await sync(fresh, fleet, 3)
        assert fleet.routable == dict.fromkeys(replicas, version(3))


@over_each_transport
async def test_untouched_replicas_keep_serving_when_the_sender_fails(transport):
    async with processes(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        await ranks[0].set(fail_at=0)
        with pytest.raises(SyncError, match=r"trainer/0, version 0.2: RuntimeError: the trainer ran out of memory"):
            await sync(ranks, fleet, 2)
        assert fleet.routable == dict.fromkeys(replicas, version(1))
        for replica in replicas.values():
            seen = await replica.look()
            assert seen["calls"][-4:] == ["pause abort", "release_kv", "restore_kv", "resume 0.1"]
            assert seen["digests"] == digests(1)


@over_each_transport
async def test_a_stopped_sender_fails_at_the_deadline_and_writes_nothing_when_it_wakes(transport):
    async with processes(1, transport=transport) as (ranks, replicas):
        fleet, replica = fleet_of(replicas), replicas["replica/0"]
        await sync(ranks, fleet, 1)
        await ranks[0].set(hold_at=0)
        settings = hurried(transfer_s=1.0, reload_s=2.0, resume_s=2.0)
        session = asyncio.create_task(sync(ranks, fleet, 2, settings))
        await ranks[0].held()
        ranks[0].signal(signal.SIGSTOP)
        with pytest.raises(SyncError, match=r"transfer, trainer/0, version 0.2: no answer within the deadline of 1 s"):
            await session
        assert fleet.routable == {"replica/0": version(1)}
        ranks[0].signal(signal.SIGCONT)
        await ranks[0].release()
        assert (await replica.look())["digests"] == digests(1)
        await sync(ranks, fleet, 3)
        assert (await replica.look())["digests"] == digests(3)


@over_each_transport
async def test_a_damaged_bucket_evicts_and_the_export_runs_to_its_end(transport):
    async with processes(1, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await ranks[0].damage_next()
        with pytest.raises(SyncError, match=r"all replicas.*bucket 0/0 of session .*damaged in transit"):
            await sync(ranks, fleet, 1)
        assert fleet.routable == {}
        assert (await ranks[0].look())["exported"] == len(weights(0))
        await sync(ranks, fleet, 2)
        assert fleet.routable == {"replica/0": version(2)}


async def test_without_checksums_the_digest_detects_damage():
    async with processes(1) as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        await ranks[0].damage_next()
        with pytest.raises(SyncError, match=r"sync phase verify, replica/0, version 0.2.*the target's digest is"):
            await sync(ranks, fleet, 2, config(checksum=False))
        assert "commit 0.2" not in (await replicas["replica/0"].look())["calls"]


async def test_rejoining_with_a_dead_sender_fails_at_once():
    async def routable(names):
        pass

    async with processes(1) as (ranks, replicas):
        group = ParameterSyncCoordinator(config(), {"trainer/0": ranks[0]}, {}, routable, Recorder("driver"))
        group.join("replica/0", replicas["replica/0"])
        ranks[0].signal(signal.SIGKILL)
        with pytest.raises(SyncError, match=r"sync phase plan, trainer/0, version 0.1"):
            await group.rejoin(version(1))
        assert group.routable() == []


async def test_a_session_under_way_counts_as_a_sync_just_now():
    """Replicas are silent as long as it lasts."""

    async def routable(names): ...

    async with processes(1) as (ranks, replicas):
        group = ParameterSyncCoordinator(config(), {"trainer/0": ranks[0]}, {}, routable, Recorder("driver"))
        group.join("replica/0", replicas["replica/0"])
        syncing = asyncio.create_task(group(version(1)))
        await asyncio.sleep(0)
        before = group.last_sync_s
        await asyncio.sleep(0.001)
        assert not syncing.done()
        assert group.last_sync_s > before
        await syncing
        ended = group.last_sync_s
        await asyncio.sleep(0.001)
        assert group.last_sync_s == ended


async def test_a_replica_that_fails_two_syncs_in_a_row_is_restarted():
    unfit = []

    async def routable(names): ...

    async def restart(name, why):
        unfit.append((name, why))

    async with processes(2) as (ranks, replicas):
        senders, recorder = {"trainer/0": ranks[0]}, Recorder("driver")
        group = ParameterSyncCoordinator(config(), senders, {}, routable, recorder, restart)
        for name, replica in replicas.items():
            group.join(name, replica)
        await group(version(1))
        replicas["replica/1"].signal(signal.SIGKILL)
        await group(version(2))
        assert (group.routable(), unfit) == (["replica/0"], [])
        await group(version(3))
        ((name, why),) = unfit
        assert name == "replica/1"
        assert why.startswith("failed two syncs in a row (")


async def test_a_replica_that_others_cannot_stand_in_for_is_restarted_after_one_failed_sync(monkeypatch):
    unfit = []

    async def routable(names): ...

    async def restart(name, why):
        unfit.append((name, why))

    class Evicting:
        def __init__(self, senders, fleet, *_):
            self._fleet = fleet

        async def run(self, version):
            self._fleet.serve("replica/0", version)
            self._fleet.evict("replica/1", "stuck")
            return SimpleNamespace(evicted={"replica/1": "stuck"})

    monkeypatch.setattr("asyncrl.param_sync.coordinator.SyncSession", Evicting)
    shards = [SimpleNamespace(name=name) for name in shard_names("rollouter", 2)]
    strands = Rollouters(shards, RolloutConfig(replicas=2, shards=2)).strands
    group = ParameterSyncCoordinator(config(), {}, {}, routable, Recorder("driver"), restart, strands=strands)
    for name in ("replica/0", "replica/1", "replica/2"):
        group.join(name, name)
    await group.rejoin(version(1))
    assert unfit == [("replica/1", "failed a sync, and samples wait for it (stuck)")]
    assert group.stranded()
    await group.leave("replica/1")  # it dies, and nobody else of its shard is left to be synced
    await asyncio.wait_for(group.someone_to_join(), 10)


async def test_the_death_of_a_whole_shard_changes_nothing_for_the_replicas_of_others():
    async def routable(names): ...

    async def restart(name, why): ...

    shards = [SimpleNamespace(name=name) for name in shard_names("rollouter", 2)]
    strands = Rollouters(shards, RolloutConfig(replicas=2, shards=2)).strands
    group = ParameterSyncCoordinator(config(), {}, {}, routable, Recorder("driver"), restart, strands=strands)
    for name in ("replica/0", "replica/1"):
        group.join(name, name)
        group.fleet.serve(name, version(1))
    group.joiners_seen()
    await group.leave("replica/1")
    assert group.stranded()
    with pytest.raises(TimeoutError):  # until its successor is there
        await asyncio.wait_for(group.someone_to_join(), 0.05)
    group.join("replica/1", "its successor")
    await asyncio.wait_for(group.someone_to_join(), 10)


async def test_a_replica_that_was_replaced_during_a_sync_is_not_restarted(monkeypatch):
    unfit = []

    async def routable(names): ...

    async def restart(name, why):
        unfit.append(name)

    class Evicting:
        def __init__(self, *_): ...

        async def run(self, version):
            if version.number == 2:  # the supervisor found it dead and started another one
                await group.leave("replica/0")
                group.join("replica/0", "its successor")
            return SimpleNamespace(evicted={"replica/0": "stuck"})

    monkeypatch.setattr("asyncrl.param_sync.coordinator.SyncSession", Evicting)
    recorder, served = Recorder("driver"), lambda _: False
    group = ParameterSyncCoordinator(config(), {}, {}, routable, recorder, restart, strands=served)
    group.join("replica/0", "a replica")
    for number, restarted in ((1, []), (2, []), (3, []), (4, ["replica/0"])):
        await group.rejoin(version(number))
        assert unfit == restarted


async def test_a_session_needs_replicas_and_a_resolved_pause():
    async with processes(0) as (ranks, _):
        with pytest.raises(SyncError, match="the fleet is empty"):
            await sync(ranks, Fleet(), 1)
    with pytest.raises(ValueError, match="'auto'"):
        SyncSession({}, Fleet(), config(pause="auto"))


# -- calls between processes -------------------------------------------------------------------------------------------


async def test_a_remote_session_forwards_the_declared_calls_and_no_others():
    asked = []

    class Asked:
        def __getattr__(self, name):
            async def call(*args):
                asked.append((name, *args))
                return name

            return call

    remote = remote_session(functools.partial(answer, Asked()))
    for name in sorted(REPLICA_CALLS):
        assert await getattr(remote, name)("s", 1) == name
    assert asked == [(name, "s", 1) for name in sorted(REPLICA_CALLS)]
    with pytest.raises(AttributeError, match="close is not a call of a replica's sync session"):
        remote.close  # noqa: B018
    with pytest.raises(ValueError, match=r"expected a call of ReplicaSession .*, found close"):
        await answer(Asked(), "close")


class KeepsTheDeadline(SimpleNamespace):
    """A sender and a replica whose samples do not end before the deadline of a pause."""

    async def offer(self):
        return Offer(Manifest(()), None)

    async def plan(self, plan):
        return ["replica/0"]

    async def pause(self, session, mode, deadline_s):
        await asyncio.sleep(deadline_s + 0.05)
        raise TimeoutError(f"did not complete within {deadline_s:g} s, 3 requests run")

    async def unload(self, session, kv):
        await asyncio.Event().wait()

    async def abort(self, session): ...


async def test_a_replica_that_keeps_a_deadline_says_itself_what_it_waited_for():
    fleet, party = Fleet(), KeepsTheDeadline()
    fleet.add("replica/0", party)
    session = SyncSession({"trainer/0": party}, fleet, hurried(pause_s=0.2))
    with pytest.raises(SyncError, match=r"did not complete within 0.2 s, 3 requests run"):
        await session.run(version(1))


def test_the_protocol_lists_every_phase():
    phases = {"receive" if phase == "transfer" else phase for phase in PHASES}
    assert phases | {"needs_base", "abort"} == REPLICA_CALLS


# -- a session that ends while a phase is under way --------------------------------------------------------------------


class Slow(WeightsEngine):
    """An engine whose next ``slow`` call waits until it is cancelled, or `finish` is set."""

    def __init__(self) -> None:
        super().__init__(weights(0))
        self.slow, self.finish = "", asyncio.Event()

    async def pause(self, mode, deadline_s):
        return await self._slowly("pause", super().pause(mode, deadline_s))

    async def release_kv(self):
        return await self._slowly("release_kv", super().release_kv())

    async def resume(self, version):
        await self._slowly("resume", super().resume(version))

    async def _slowly(self, call, answer):
        found = await answer
        if call == self.slow:
            self.slow = ""
            try:
                await self.finish.wait()
            except asyncio.CancelledError:
                self.calls.append(f"{call} taken back")
                raise
        return found


class Nothing:
    """A receiver of nothing."""

    async def open(self, plan):
        return ("r",)

    async def receive(self, deadline_s):
        return 0

    def intact(self):
        return True

    async def verify(self): ...
    async def commit(self, version): ...
    async def abort(self): ...


def calls_of(session: EngineSession, number: int) -> dict[str, Coroutine]:
    """Of the phases after the plan, by name."""
    name, of = f"s{number}", version(number)
    return {
        "pause": session.pause(name, "wait", 60),
        "unload": session.unload(name, "unload"),
        "receive": session.receive(name, 60),
        "verify": session.verify(name, {}),
        "commit": session.commit(name, of),
        "reload": session.reload(name),
        "resume": session.resume(name, of),
    }


def plan(number: int) -> ReceivePlan:
    return ReceivePlan(f"s{number}", version(number), None, (), 60)


async def phases(session: EngineSession, number: int) -> None:
    await session.plan(plan(number))
    await asyncio.gather(*calls_of(session, number).values())


async def test_calls_of_one_moment_are_gone_through_in_the_order_of_the_phases():
    """However they arrive, and the ones after a phase that fails fail, too."""
    engine = Slow()
    session = EngineSession("replica/0", engine, Nothing())
    await session.plan(plan(1))
    await asyncio.wait_for(asyncio.gather(*reversed(calls_of(session, 1).values())), 10)
    assert engine.calls == ["pause wait", "release_kv", "restore_kv", "resume 0.1"]

    await session.plan(plan(2))
    calls = calls_of(session, 2)
    calls.pop("verify").close()
    wrong = session.verify("s2", {"target": "another"})
    asked = [asyncio.ensure_future(call) for call in reversed(calls.values())]
    await asyncio.wait_for(asked[-1], 10)  # the pause
    with pytest.raises(SyncError, match=r"sync phase verify, replica/0.*the senders' is another: different") as raised:
        await wrong
    assert raised.value.version is None  # the session's, not the one committed before
    for phase, call in zip(("resume", "reload", "commit"), asked, strict=False):
        with pytest.raises(SyncError, match=f"sync phase {phase}, replica/0.*expected after verify, which failed"):
            await call
    with pytest.raises(SyncError, match=r"sync phase pause.*called again"):
        await session.pause("s2", "wait", 60)
    assert engine.calls[4:] == ["pause wait", "release_kv"]  # it stays paused
    assert await session.abort("s2") == version(1)
    assert engine.calls[6:] == ["restore_kv", "resume 0.1"]


async def test_no_phase_follows_one_for_which_the_session_no_longer_waits():
    engine = Slow()
    session = EngineSession("replica/0", engine, Nothing())
    await session.plan(replace(plan(1), limits={"pause": 0.01}))
    engine.slow = "pause"
    pause = asyncio.ensure_future(session.pause("s1", "wait", 60))
    unload = asyncio.ensure_future(session.unload("s1", "unload"))
    await asyncio.sleep(0.05)
    engine.finish.set()
    await pause
    with pytest.raises(SyncError, match=r"sync phase unload.*after pause, for which the session no longer waited"):
        await unload
    assert engine.calls == ["pause wait"]


async def test_a_commit_that_has_begun_is_not_aborted():
    """An engine might commit what is left of the weights."""

    class Noting(Nothing):
        def __init__(self):
            self.calls = []

        async def commit(self, version):
            self.calls.append("commit")

        async def abort(self):
            self.calls.append("abort")

    session = EngineSession("replica/0", Slow(), receiver := Noting())
    await session.plan(plan(1))
    calls = calls_of(session, 1)
    for phase in ("pause", "unload", "receive", "verify"):
        await calls.pop(phase)
    receiver.calls.clear()
    committing = asyncio.ensure_future(calls.pop("commit"))
    ending = asyncio.ensure_future(session.abort("s1"))
    for call in calls.values():
        call.close()
    with pytest.raises(SyncError, match="session s1 ended during this phase"):
        await committing
    assert await ending == version(1)
    assert receiver.calls == ["commit", "abort"]


async def test_a_phase_is_gone_through_once():
    session = EngineSession("replica/0", Slow(), Nothing())
    await session.plan(plan(1))
    for _ in range(2):
        call = asyncio.ensure_future(session.pause("s1", "wait", 60))
        await asyncio.wait([call])
    with pytest.raises(SyncError, match=r"sync phase pause, replica/0.*called again"):
        await call


@pytest.mark.parametrize("ended_by", ["abort", "plan"])
@pytest.mark.parametrize("slow", ["pause", "release_kv", "resume"])
async def test_what_a_session_left_under_way_has_ended_before_anything_else_happens(slow, ended_by):
    """A pause is taken back, other calls are waited for; the replica then serves a version, or the next session."""
    engine = Slow()
    session = EngineSession("replica/0", engine, Nothing())
    await phases(session, 1)
    engine.calls.clear()
    engine.slow = slow
    running = asyncio.create_task(phases(session, 2))
    while engine.slow:
        await asyncio.sleep(0)
    if ended_by == "abort":
        ending = asyncio.create_task(session.abort("s2"))
    else:
        ending = asyncio.create_task(phases(session, 3))
    if slow == "pause":
        expected = ["pause wait", "pause taken back"]
    else:
        await asyncio.sleep(0.01)
        assert not ending.done()
        expected = engine.calls.copy()
        assert expected[-1].startswith(slow)
        engine.finish.set()
    result = await asyncio.wait_for(ending, 10)
    with pytest.raises(SyncError, match=r"session s2 (ended|is over)"):
        await running
    if ended_by == "abort":
        committed = version(2 if slow == "resume" else 1)
        assert result == committed
        then = ["restore_kv", f"resume {committed}"] if slow == "release_kv" else []
    else:
        then = ["release_kv", "restore_kv", "resume 0.3"]
        then = then[1:] if slow == "release_kv" else ["pause wait", *then]
    assert engine.calls == [*expected, *then]
