"""Syncing adapters: collected over buckets and applied once, or merged; with real transfers between processes."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.param_sync.buckets import Bucket, pack
from asyncrl.param_sync.digest import digest_tensors, dtype_name
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.lora.adapted_weights import AdaptedWeights
from asyncrl.param_sync.lora.adapters import adapter_shapes, check_adapter
from asyncrl.param_sync.lora.merge import MergingExport, merge
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec, is_adapter
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.param_sync.weight_receiver import LocalReceiver
from asyncrl.types.versions import PolicyVersion
from tests.support.sync_processes import RankProcess, Remote, WeightsEngine, config, role_of

SPEC = AdapterSpec("policy", r=8, alpha=16.0, target_modules=("q_proj", "up_proj"), dtype="float32")
#: A of up_proj is 9600 bytes, more than two of the sessions' buckets
MODULES = {
    f"model.layers.{i}.{m}": shape for i in (0, 1) for m, shape in (("q_proj", (24, 16)), ("up_proj", (200, 300)))
}
TIED = {"lm_head.weight": "model.embed.weight"}
HEAD = TensorSpec("lm_head.weight", "bfloat16", (67, 33), "target", "model.embed.weight")
Q_A = "base_model.model.model.layers.0.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


def version(number):
    return PolicyVersion(0, number)


def base(seed):
    g = torch.Generator().manual_seed(seed)
    modules = {f"{name}.weight": torch.randn(shape, generator=g).bfloat16() for name, shape in MODULES.items()}
    embed = torch.randn(67, 33, generator=g).bfloat16()
    return {"model.embed.weight": embed, **modules, "model.norm.weight": torch.randn(7, generator=g)}


def adapter(seed):
    g = torch.Generator().manual_seed(seed)
    pairs = (adapter_shapes(module, shape, SPEC.r) for module, shape in MODULES.items())
    return {name: torch.randn(shape, generator=g) for pair in pairs for name, shape in pair.items()}


def draft(seed):
    return {"mtp.proj.weight": torch.randn(30, 31, generator=torch.Generator().manual_seed(seed))}


def payload(number, with_base):
    """A trainer's export of a version; its frozen base never changes."""
    return (base(100) if with_base else {}) | adapter(number) | draft(number)


def manifest_of(tensors, spec=SPEC):
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape), role_of(n)) for n, t in tensors.items()]
    return Manifest((*specs, HEAD) if "model.embed.weight" in tensors else tuple(specs), spec)


def digest(tensors):
    return digest_tensors(tensors.items())


class CountingWeights(AdaptedWeights):
    takes = 0

    def take(self, bucket):
        super().take(bucket)
        self.takes += 1


class Replica:
    """An engine's weights and its receiver; ``log``: what became visible, in order."""

    def __init__(self, modules=MODULES, with_draft=True):
        self.base, self.draft = base(0), draft(0)
        self.log, self.adapter, self.fails = [], {}, False
        self.with_draft = with_draft
        bases = LiveWeights(self.base, TIED, lambda v: self.log.append(f"base {v}"))
        drafts = LiveWeights(self.draft, {}, lambda v: self.log.append(f"draft {v}")) if with_draft else None
        self.inner = [bases] if drafts is None else [bases, drafts]
        self.receiver = CountingWeights(bases, drafts, modules, self.apply, lambda v: self.log.append(f"version {v}"))

    def apply(self, state, version):
        self.log.append(f"adapter {version}")
        if self.fails:
            raise MemoryError("no room for an adapter")
        assert state.spec == SPEC
        self.adapter = dict(state.tensors)

    def sync(self, number, with_base, capacity=256):
        """A whole session, without processes."""
        tensors = payload(number, with_base)
        if not self.with_draft:
            tensors = {n: t for n, t in tensors.items() if role_of(n) == "target"}
        self.receiver.open(f"s{number}", manifest_of(tensors))
        for bucket in buckets_of(tensors, capacity, session=f"s{number}"):
            self.receiver.take(bucket)
        self.receiver.verify()
        self.receiver.commit(version(number))
        return self


def buckets_of(tensors, capacity=256, session="s", sender=0):
    buffers = []

    def next_buffer():
        buffers.append(torch.zeros(capacity, dtype=torch.uint8))
        return buffers[-1]

    return [
        Bucket(session, sender, i, filled.parts, memoryview(buffers[i].numpy()), filled.checksum)
        for i, filled in enumerate(pack(tensors.items(), next_buffer))
    ]


# -- between processes -------------------------------------------------------------------------------------------------


class AdapterEngine(WeightsEngine):
    def __init__(self):
        self.calls, self.replica = [], Replica()
        self.receiver = self.replica.receiver

    async def digest(self, role):
        replica, receiver = self.replica, self.receiver
        if role == "draft":
            return digest(replica.draft)
        return digest({**(replica.base if receiver.base_travels else {}), **receiver.tensors()})


class ReplicaProcess(EngineSession):
    def __init__(self, name, transport):
        self.engine = AdapterEngine()
        super().__init__(name, self.engine, LocalReceiver(name, self.engine.receiver, make_reader(transport, name)))

    async def look(self):
        replica, receiver = self.engine.replica, self.engine.receiver
        held = {"base": digest(replica.base), "adapter": digest(replica.adapter), "draft": digest(replica.draft)}
        more = {"takes": receiver.takes, "intact": receiver.intact(), "needs_base": receiver.needs_base}
        return held | more | {"log": replica.log, "calls": self.engine.calls}


class AdapterRank(RankProcess):
    """Sends `payload`, with the base if the plan does; ``fail_at`` is the name of a tensor."""

    lacks = ""  # name of a tensor to leave out; "all": the whole adapter

    def manifest(self):
        if self.lacks == "all":
            return manifest_of(base(100) | draft(0), None)
        return manifest_of({name: t for name, t in payload(0, True).items() if name != self.lacks})

    def _send(self, plan, loop):
        self.with_base = plan.manifest.sends_base
        return super()._send(plan, loop)

    def _export(self, number, loop):
        for name, tensor in list(payload(number, self.with_base).items())[self._share]:
            if name == self.fail_at:
                raise RuntimeError("the trainer ran out of memory")
            yield name, tensor


@contextlib.asynccontextmanager
async def trainer_and_replicas(replicas=1, shares=(slice(None),), transport="shared_memory"):
    ranks = [Remote(AdapterRank, i, transport, share) for i, share in enumerate(shares)]
    others = {f"replica/{i}": Remote(ReplicaProcess, f"replica/{i}", transport) for i in range(replicas)}
    try:
        yield ranks, others
    finally:
        for remote in [*ranks, *others.values()]:
            remote.end()


def fleet_of(replicas):
    fleet = Fleet()
    for name, handle in replicas.items():
        fleet.add(name, handle)
    return fleet


async def sync(ranks, fleet, number, **changes):
    senders = {f"trainer/{i}": rank for i, rank in enumerate(ranks)}
    return await SyncSession(senders, fleet, config(**changes)).run(version(number))


def held(number):
    return {"base": digest(base(100)), "adapter": digest(adapter(number)), "draft": digest(draft(number))}


def without(seen, *keys):
    return {key: value for key, value in seen.items() if key not in keys}


def nbytes(number, with_base):
    return sum(t.nbytes for t in payload(number, with_base).values())


@pytest.mark.parametrize("staging", ["bucket", "full"])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
async def test_the_base_is_sent_once_and_then_only_adapter_and_draft(transport, staging):
    async with trainer_and_replicas(2, transport=transport) as (ranks, replicas):
        fleet = fleet_of(replicas)
        first = await sync(ranks, fleet, 1, staging=staging)
        assert first.nbytes == nbytes(1, True)
        for number in (2, 3):
            report = await sync(ranks, fleet, number, staging=staging)
            assert report.evicted == {}
            assert report.nbytes == nbytes(number, False)
            assert report.digests == {"target": digest(adapter(number)), "draft": digest(draft(number))}
        assert fleet.routable == dict.fromkeys(replicas, version(3))
        for replica in replicas.values():
            seen = await replica.look()
            assert {key: seen[key] for key in held(3)} == held(3)
            assert seen["log"] == [
                *("adapter 0.1", "base 0.1", "draft 0.1", "version 0.1"),
                *("adapter 0.2", "draft 0.2", "version 0.2"),
                *("adapter 0.3", "draft 0.3", "version 0.3"),
            ]


async def test_two_senders_each_send_half_of_the_adapter():
    halves = (slice(0, None, 2), slice(1, None, 2))  # all A of one, all B of the other
    async with trainer_and_replicas(shares=halves) as (ranks, replicas):
        fleet = fleet_of(replicas)
        for number in (1, 2, 3):
            assert (await sync(ranks, fleet, number)).evicted == {}
            seen = await replicas["replica/0"].look()
            assert {key: seen[key] for key in held(number)} == held(number)


async def test_an_abort_during_the_adapter_leaves_the_old_one_applied_and_the_replica_serving():
    async with trainer_and_replicas() as (ranks, replicas):
        fleet, replica = fleet_of(replicas), replicas["replica/0"]
        await sync(ranks, fleet, 1)
        before = await replica.look()
        await ranks[0].set(fail_at="mtp.proj.weight")
        with pytest.raises(SyncError, match=r"trainer/0, version 0.2: RuntimeError: the trainer ran out of memory"):
            await sync(ranks, fleet, 2)
        assert fleet.routable == {"replica/0": version(1)}
        after = await replica.look()
        assert after["takes"] > before["takes"] + 3
        assert without(after, "takes", "calls") == without(before, "takes", "calls")
        assert after["calls"][-1] == "resume 0.1"
        await ranks[0].set(fail_at=-1)
        await sync(ranks, fleet, 3)
        seen = await replica.look()
        assert {key: seen[key] for key in held(3)} == held(3)


async def test_replicas_whose_base_was_interrupted_receive_it_again():
    """One replica held the base, one is new; both receive the stream."""
    async with trainer_and_replicas(2) as (ranks, replicas):
        new = replicas.pop("replica/1")
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        fleet.add("replica/1", new)
        await ranks[0].set(fail_at=Q_A)
        with pytest.raises(SyncError, match="ran out of memory"):
            await sync(ranks, fleet, 2)
        assert fleet.routable == {}
        for replica, adapted in ((replicas["replica/0"], adapter(1)), (new, {})):
            seen = await replica.look()
            assert (seen["intact"], seen["needs_base"], seen["adapter"]) == (False, True, digest(adapted))
        await ranks[0].set(fail_at=-1)
        assert (await sync(ranks, fleet, 3)).nbytes == nbytes(3, True)
        assert fleet.routable == dict.fromkeys(("replica/0", "replica/1"), version(3))
        assert (await sync(ranks, fleet, 4)).nbytes == nbytes(4, False)


async def test_the_base_is_sent_again_after_a_replica_restarts():
    """The replica joins by its own session, as between two versions."""
    async with trainer_and_replicas() as (ranks, replicas), trainer_and_replicas() as (_, fresh):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        await sync(ranks, fleet, 2)
        fleet.add("replica/1", fresh["replica/0"])
        senders = {"trainer/0": ranks[0]}
        report = await SyncSession(senders, fleet, config(), only=["replica/1"]).run(version(2))
        assert report.nbytes == nbytes(2, True)
        assert (await replicas["replica/0"].look())["log"].count("base 0.2") == 0
        seen = await fresh["replica/0"].look()
        assert {key: seen[key] for key in held(2)} == held(2)
        assert (await sync(ranks, fleet, 3)).nbytes == nbytes(3, False)


def test_an_adapter_without_a_base_is_refused():
    message = r"base first: the sender sends 9 tensors and none of the base, but the replica holds no committed base"
    refused(Replica(), manifest_of(payload(1, False)), message)


async def test_a_sender_without_its_adapter_is_refused_before_anything_is_paused():
    async with trainer_and_replicas() as (ranks, replicas):
        fleet = fleet_of(replicas)
        await sync(ranks, fleet, 1)
        calls = (await replicas["replica/0"].look())["calls"]
        await ranks[0].set(lacks=Q_A)
        message = f"adapter policy .r 8. is incomplete.*{Q_A}: expected by the replica, but not sent"
        with pytest.raises(ManifestError, match=message):
            await sync(ranks, fleet, 2)
        await ranks[0].set(lacks="all")
        with pytest.raises(ManifestError, match="the replica takes a LoRA adapter, but the sender's manifest has none"):
            await sync(ranks, fleet, 2)
        assert (await replicas["replica/0"].look())["calls"] == calls
        assert fleet.routable == {"replica/0": version(1)}


@pytest.mark.parametrize("checksum", [True, False])
async def test_a_damaged_bucket_reaches_no_engine(checksum):
    async with trainer_and_replicas() as (ranks, replicas):
        fleet, replica = fleet_of(replicas), replicas["replica/0"]
        await sync(ranks, fleet, 1)
        before = await replica.look()
        await ranks[0].damage_next()
        message = "bucket 0/0 of session .*damaged in transit" if checksum else "verify.*the target's digest is"
        with pytest.raises(SyncError, match=message):
            await sync(ranks, fleet, 2, checksum=checksum)
        after = await replica.look()
        assert (after["adapter"], after["log"]) == (before["adapter"], before["log"])
        await sync(ranks, fleet, 3)
        assert (await replica.look())["adapter"] == digest(adapter(3))


# -- one receiver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [64, 320, 1 << 20])
def test_buckets_of_any_size_give_the_same_weights(capacity):
    replica = Replica().sync(1, True, capacity).sync(2, False, capacity)
    assert (digest(replica.base), digest(replica.adapter), digest(replica.draft)) == tuple(held(2).values())


def test_nothing_of_the_adapter_is_visible_before_the_commit():
    replica = Replica().sync(1, True)
    replica.log.clear()
    receiver, tensors = replica.receiver, payload(2, False)
    receiver.open("s2", manifest_of(tensors))
    for bucket in buckets_of(tensors, session="s2"):
        receiver.take(bucket)
        assert digest(receiver.tensors()) == digest(adapter(1))
    receiver.verify()
    assert (digest(replica.adapter), replica.log) == (digest(adapter(1)), [])
    assert digest(receiver.tensors()) == digest(adapter(2))  # covered by the session's digest
    receiver.commit(version(2))
    assert replica.log == ["adapter 0.2", "draft 0.2", "version 0.2"]
    assert digest(receiver.tensors()) == digest(replica.adapter) == digest(adapter(2))
    with pytest.raises(SyncError, match="nothing verified to commit"):
        receiver.commit(version(2))
    assert len(replica.log) == 3
    with pytest.raises(SyncError, match="session None"):
        receiver.take(bucket)


def test_a_frozen_draft_is_sent_only_with_the_base():
    replica = Replica().sync(1, True)
    held, whole = digest(replica.draft), replace(manifest_of(payload(2, True)), frozen_draft=True)
    alone, tensors = whole.without_base(), adapter(2)
    assert [t.name for t in alone] == list(tensors)
    replica.receiver.open("s", alone)
    for bucket in buckets_of(tensors):
        replica.receiver.take(bucket)
    replica.receiver.verify()
    replica.receiver.commit(version(2))
    assert (digest(replica.adapter), digest(replica.draft)) == (digest(tensors), held)
    assert replica.log[-2:] == ["adapter 0.2", "version 0.2"]
    refused(replica, replace(alone, frozen_draft=False), "mtp.proj.weight: a parameter of the replica that is not sent")
    lacks = Manifest(tuple(t for t in whole if t.role == "target"), SPEC, frozen_draft=True)
    refused(replica, lacks, "mtp.proj.weight: a parameter of the replica that is not sent")


def test_an_engine_may_keep_the_tensors_of_an_adapter():
    replica = Replica().sync(1, True)
    first = replica.adapter
    replica.sync(2, False)
    assert digest(first) == digest(adapter(1))


def test_an_abort_at_any_bucket_keeps_the_old_adapter():
    replica, tensors = Replica().sync(1, True, 4096), payload(2, False)
    receiver, buckets = replica.receiver, buckets_of(tensors, 4096)
    of_draft = next(i for i, bucket in enumerate(buckets) if bucket.parts[-1].name == "mtp.proj.weight")
    for taken in range(len(buckets) + 1):
        receiver.open("s", manifest_of(tensors))
        for bucket in buckets[:taken]:
            receiver.take(bucket)
        if taken == len(buckets):
            receiver.verify()
        receiver.abort()
        assert digest(receiver.tensors()) == digest(replica.adapter) == digest(adapter(1))
        assert receiver.intact() == (taken <= of_draft)
        assert not receiver.needs_base
        with pytest.raises(SyncError, match="this receiver is in session None"):
            receiver.take(buckets[0])
        with pytest.raises(SyncError, match="no session is open"):
            receiver.verify()
        with pytest.raises(SyncError, match="nothing verified"):
            receiver.commit(version(2))
    replica.sync(3, False)
    assert receiver.intact()
    assert digest(replica.adapter) == digest(adapter(3))


def test_a_bucket_is_checked_as_a_whole_before_any_part_is_written():
    replica, tensors = Replica(), payload(1, True)
    receiver = replica.receiver
    (bucket,) = buckets_of(tensors, 1 << 20)
    at_draft = next(i for i, part in enumerate(bucket.parts) if part.name.startswith("mtp."))
    wrong = list(bucket.parts)
    wrong[at_draft] = wrong[at_draft]._replace(start=64)
    stray = bucket.parts[0]._replace(name="stray")
    damaged = bytearray(bucket.data)
    damaged[bucket.parts[at_draft].offset] ^= 1
    cases = [
        (bucket._replace(session="older"), "is in session s"),
        (bucket._replace(sequence=1), "out of sequence, bucket 0 of this sender comes next"),
        (bucket._replace(parts=(*bucket.parts, stray)), "stray is not a tensor that the manifest sends"),
        (bucket._replace(parts=tuple(wrong)), "mtp.proj.weight: byte 64 came early"),
        (bucket._replace(data=memoryview(damaged)), "bucket 0/0 of session s: damaged in transit"),
    ]
    before = digest(replica.base), digest(replica.draft)
    for refused, message in cases:
        receiver.open("s", manifest_of(tensors))
        with pytest.raises(SyncError, match=message):
            receiver.take(refused)
        receiver.abort()
        assert (digest(replica.base), digest(replica.draft)) == before
        assert receiver.intact()


def test_base_and_draft_have_destinations_and_the_adapter_has_none():
    replica, tensors, cpu = Replica(), payload(1, True), torch.device("cpu")
    receiver = replica.receiver
    receiver.open("s", manifest_of(tensors))
    (bucket,) = buckets_of(tensors, 1 << 20)
    in_place = {}
    for part in bucket.parts:
        if (destination := receiver.destination("s", part, cpu)) is not None:
            destination.copy_(torch.frombuffer(bucket.data, dtype=torch.uint8)[part.offset : part.offset + part.nbytes])
            in_place[part.name] = destination
            bucket.data[part.offset : part.offset + part.nbytes] = bytes(part.nbytes)
    assert in_place.keys() == {name for name in tensors if not is_adapter(name)}
    assert not receiver.intact()
    receiver.take(bucket._replace(in_place=in_place))
    receiver.verify()
    receiver.commit(version(1))
    assert receiver.intact()
    assert digest(replica.base) == digest(base(100))
    assert digest(replica.draft) == digest(draft(1))
    assert digest(replica.adapter) == digest(adapter(1))


def test_a_checksum_is_taken_once(monkeypatch):
    seen = []
    for module in ("lora.adapted_weights", "live_weights"):
        monkeypatch.setattr(f"asyncrl.param_sync.{module}.check_checksum", lambda b: seen.append(b.checksum))
    Replica().sync(1, True, 1 << 20)
    assert len([checksum for checksum in seen if checksum is not None]) == 1


def test_verify_reports_missing_tensors_of_each_part():
    for name, with_base, message in (
        (Q_B, False, f"{Q_B}: 0 of 768 bytes"),
        ("mtp.proj.weight", False, "mtp.proj.weight: 0 of 3720 bytes"),
        ("model.norm.weight", True, "model.norm.weight: 0 of 28 bytes"),
    ):
        replica, tensors = Replica().sync(1, True), payload(2, with_base)
        replica.receiver.open("s", manifest_of(tensors))
        for bucket in buckets_of({n: t for n, t in tensors.items() if n != name}):
            replica.receiver.take(bucket)
        with pytest.raises(SyncError, match=f"verify: 1 tensors are incomplete: {message}"):
            replica.receiver.verify()
        with pytest.raises(SyncError, match="nothing verified"):
            replica.receiver.commit(version(2))


def test_a_byte_that_arrives_after_verify_must_be_verified_again():
    replica = Replica()
    for receiver, tensors in ((replica.receiver, payload(1, True)), (replica.inner[1], draft(1))):
        receiver.open("s", manifest_of(tensors))
        buckets = buckets_of(tensors)
        for bucket in buckets:
            receiver.take(bucket)
        receiver.verify()
        receiver.take(Bucket("s", 0, len(buckets), (), memoryview(bytearray(64)), None))
        with pytest.raises(SyncError, match="nothing verified"):
            receiver.commit(version(1))
        assert replica.log == []


@pytest.mark.parametrize("with_draft", [True, False])
def test_an_apply_that_fails_leaves_the_replica_not_intact_until_the_next_commit(with_draft):
    replica = Replica(with_draft=with_draft).sync(1, True)
    replica.fails = True
    with pytest.raises(MemoryError):
        replica.sync(2, False)
    assert replica.log[-1] == "adapter 0.2"
    assert not replica.receiver.intact()
    assert replica.receiver.tensors() == {}
    with pytest.raises(SyncError, match="nothing verified"):
        replica.receiver.commit(version(2))
    replica.receiver.abort()
    assert not replica.receiver.intact()
    replica.fails = False
    assert replica.sync(3, False).receiver.intact()


def test_an_abort_reaches_base_and_draft_even_if_one_refused_the_plan():
    tensors = payload(1, True)
    whole = manifest_of(tensors)
    no_draft = manifest_of({n: t for n, t in tensors.items() if not n.startswith("mtp.")})
    for manifest in (whole, no_draft):
        replica = Replica()
        with contextlib.suppress(ManifestError):
            replica.receiver.open("s", manifest)
        replica.receiver.abort()
        for receiver in replica.inner:
            with pytest.raises(SyncError, match="no session is open"):
                receiver.verify()


# -- refusals at plan time ---------------------------------------------------------------------------------------------


def refused(replica, manifest, message):
    with pytest.raises(ManifestError, match=message):
        replica.receiver.open("s", manifest)
    with pytest.raises(SyncError, match="session None"):
        replica.receiver.take(buckets_of(payload(1, True))[0])


def test_lora_must_be_on_or_off_at_both_sides():
    plain = manifest_of(base(1) | draft(1), None)
    none = "the replica takes a LoRA adapter, but the sender's manifest has none"
    refused(Replica(), plain, f"{none} .and 0 adapter tensors")
    refused(Replica(), manifest_of(payload(1, True), None), f"{none} .and 8 adapter tensors")
    off = Replica(modules=None)
    refused(
        off,
        manifest_of(payload(1, True)),
        "8 adapter tensors of adapter policy, but the replica was made with LoRA off",
    )
    refused(off, manifest_of(payload(1, True), None), "8 adapter tensors, but the replica was made with LoRA off")
    refused(
        off, manifest_of(base(1) | draft(1)), "0 adapter tensors of adapter policy, but the replica was made with LoRA"
    )


def test_without_lora_the_receiver_behaves_like_base_and_draft():
    replica = Replica(modules=None)
    for session in ("first", "second"):
        tensors = base(1) | draft(1)
        replica.receiver.open(session, manifest_of(tensors, None))
        for bucket in buckets_of(tensors, session=session):
            replica.receiver.take(bucket)
        replica.receiver.verify()
        replica.receiver.commit(version(1))
    assert (digest(replica.base), digest(replica.draft)) == (digest(base(1)), digest(draft(1)))
    assert replica.log == ["base 0.1", "draft 0.1", "version 0.1"] * 2
    with pytest.raises(ManifestError, match="a parameter of the replica that is not sent"):
        replica.receiver.open("third", manifest_of(draft(1), None))


def test_base_and_draft_check_their_own_tensors():
    tensors = payload(1, True)
    part = {n: t for n, t in tensors.items() if n != "model.norm.weight"}
    refused(Replica(), manifest_of(part), "model.norm.weight: a parameter of the replica that is not sent")
    no_draft = {n: t for n, t in tensors.items() if not n.startswith("mtp.")}
    refused(Replica(), manifest_of(no_draft), "mtp.proj.weight: a parameter of the replica that is not sent")
    refused(Replica(with_draft=False), manifest_of(tensors), "sends 1 draft tensors, but the replica has no draft")
    replica = Replica().sync(1, True)
    with pytest.raises(ManifestError, match=r"model.norm.weight: a parameter of the replica that is not sent"):
        replica.receiver.open("s", manifest_of(part))


def test_an_incomplete_adapter_is_refused_with_both_sides_named():
    whole = manifest_of(payload(1, True))
    check_adapter(whole, MODULES)

    def q_a(shape, dtype="float32", role="target", tied_to=None):
        others = (t for t in whole if t.name != Q_A)
        return replace(whole, tensors=(*others, TensorSpec(Q_A, dtype, shape, role, tied_to)))

    def all_but(part):
        return {name: shape for name, shape in MODULES.items() if part not in name}

    def adapted(**changes):
        return replace(whole, adapter=replace(SPEC, **changes))

    unsent = replace(whole, tensors=tuple(t for t in whole if t.name != Q_A))
    takes = r"the replica takes target float32\[8, 16\]"
    cases = [
        (unsent, MODULES, f"{Q_A}: expected by the replica, but not sent"),
        (q_a((8, 16), tied_to=Q_B), MODULES, f"{Q_A}: expected by the replica, but not sent"),
        (q_a((4, 16)), MODULES, rf"{Q_A}: sent as target float32\[4, 16\], {takes}"),
        (q_a((8, 16), "float16"), MODULES, rf"{Q_A}: sent as target float16\[8, 16\], {takes}"),
        (q_a((8, 16), role="draft"), MODULES, rf"{Q_A}: sent as draft float32\[8, 16\], {takes}"),
        (whole, all_but("0.q_proj"), f"{Q_A}: sent, but no target module of the replica takes it"),
        (whole, all_but("up_proj"), "up_proj: a target module of the sender, but the replica has none of this name"),
        (adapted(target_modules=("q_proj",)), MODULES, "up_proj.lora_A.weight: sent, but no target module"),
        (adapted(r=4), MODULES, r"adapter policy \(r 4\) .* the replica, 8 differ: .*; and 4 more. Both sides must"),
    ]
    for manifest, modules, message in cases:
        refused(Replica(modules), manifest, message)


def test_names_with_another_prefix_or_an_adapter_segment_are_not_canonical():
    for name in (Q_A.removeprefix("base_model.model."), Q_A.replace("lora_A", "lora_A.default")):
        tensors = payload(1, True)
        tensors[name] = tensors.pop(Q_A)
        with pytest.raises(ManifestError, match=rf"2 differ: .*{Q_A}: expected by the replica, but not sent") as error:
            check_adapter(manifest_of(tensors), MODULES)
        assert f"{name}: sent, but no target module" in str(error.value)


def test_adapter_tensors_are_recognised_by_whole_segments():
    assert all(map(is_adapter, (Q_A, Q_B, "x.lora_embedding_A", "x.lora_embedding_B", "x.lora_A.default.weight")))
    assert not any(map(is_adapter, ("x.weight", "x.flora_A.weight", "x.lora_Ab.weight", "lora.weight")))


def test_an_adapter_has_a_rank_and_targets_by_whole_ends_of_paths():
    for wrong in ({"r": 0}, {"target_modules": ()}):
        with pytest.raises(ManifestError, match="expected a rank of at least 1 and a target module, found r"):
            replace(SPEC, **wrong)
    assert SPEC.targets("q_proj")
    assert SPEC.targets("a.b.q_proj")
    assert not SPEC.targets("a.kq_proj")
    assert not SPEC.targets("a.q_proj.weight")
    assert replace(SPEC, target_modules=("0.q_proj",)).targets("layers.0.q_proj")
    assert not replace(SPEC, target_modules=("0.q_proj",)).targets("layers.10.q_proj")


@st.composite
def complete_adapters(draw):
    """A manifest with a complete adapter, among other tensors, and the modules it was made for."""
    leaves = ["q_proj", "v_proj", "up_proj", "embed"]
    size = st.integers(1, 9)
    paths = draw(st.lists(st.tuples(st.integers(0, 12), st.sampled_from(leaves)), min_size=1, max_size=12, unique=True))
    modules = {f"model.layers.{i}.{leaf}": (draw(size), draw(size)) for i, leaf in paths}
    targets = draw(st.lists(st.sampled_from(sorted({leaf for _, leaf in paths})), min_size=1, unique=True))
    spec = AdapterSpec(
        "a", draw(st.integers(1, 4)), 1.0, tuple(targets), draw(st.sampled_from(["float32", "bfloat16"]))
    )
    specs = [TensorSpec("model.norm.weight", "float32", (3,)), TensorSpec("mtp.norm.weight", "float32", (3,), "draft")]
    for module, weight in modules.items():
        if spec.targets(module):
            pair = adapter_shapes(module, weight, spec.r, embedding=module.endswith("embed"))
            specs += [TensorSpec(name, spec.dtype, shape) for name, shape in pair.items()]
    return Manifest(tuple(draw(st.permutations(specs))), spec), modules


@settings(max_examples=150, deadline=None)
@given(complete_adapters(), st.data())
def test_a_complete_adapter_passes_and_any_single_change_is_refused(case, data):
    manifest, modules = case
    check_adapter(manifest, modules)
    victim = data.draw(st.sampled_from([t for t in manifest if is_adapter(t.name)]))
    rows, columns = victim.shape
    module = victim.name.removeprefix("base_model.model.").split(".lora_")[0]
    changed = {
        "dropped": None,
        "taller": victim._replace(shape=(rows + 1, columns)),
        "wider": victim._replace(shape=(rows, columns + 1)),
        "flat": victim._replace(shape=(rows * columns,)),
        "recast": victim._replace(dtype="float16"),
        "draft": victim._replace(role="draft"),
        "elsewhere": victim._replace(name=victim.name.replace("model.layers", "model.blocks")),
        "unloved": victim,
        "unknown": victim,
        "doubled": victim,
    }
    how = data.draw(st.sampled_from(sorted(changed)))
    tensors = [spec for t in manifest if (spec := changed[how] if t == victim else t) is not None]
    if how == "unloved":  # the replica's module has another shape
        modules = {m: (out + 1, into + 1) if m == module else (out, into) for m, (out, into) in modules.items()}
    elif how == "unknown":
        modules = {m: weight for m, weight in modules.items() if m != module}
    elif how == "doubled":  # a second pair, of the other kind
        kind = not module.endswith("embed")
        tensors += [TensorSpec(n, "float32", s) for n, s in adapter_shapes(module, (2, 2), 1, embedding=kind).items()]
    with pytest.raises(ManifestError, match=module.replace("layers", "(layers|blocks)")):
        check_adapter(Manifest(tuple(tensors), manifest.adapter), modules)


# -- merging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merge_is_computed_in_float32_and_cast_once(dtype):
    g = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=g).to(dtype) for shape in ((50, 30), (4, 30), (50, 4)))
    before = weight.clone()
    merged = merge(weight, a, b, alpha=6.0, r=4)
    exact = (weight.double() + 1.5 * (b.double() @ a.double())).to(torch.float32)
    assert merged.dtype == dtype
    assert torch.equal(weight, before)
    if dtype == torch.float32:
        torch.testing.assert_close(merged, exact, rtol=1e-6, atol=1e-5)
    else:  # within half a unit in the last place, except for ties that float32 rounds the other way
        assert (merged != exact.to(dtype)).float().mean() < 0.01


def embedding_case():
    spec = AdapterSpec("e", 3, 6.0, ("embed", "proj"), "float32")
    g = torch.Generator().manual_seed(3)
    tensors = {
        "model.embed.weight": torch.randn(11, 5, generator=g),
        "model.proj.weight": torch.randn(6, 5, generator=g),
    }
    shapes = adapter_shapes("model.embed", (11, 5), 3, embedding=True) | adapter_shapes("model.proj", (6, 5), 3)
    return tensors, {n: torch.randn(s, generator=g) for n, s in shapes.items()}, spec


def test_an_embedding_s_pair_is_merged_transposed():
    weights, pairs, spec = embedding_case()
    a, b = (
        pairs["base_model.model.model.embed.lora_embedding_A"],
        pairs["base_model.model.model.embed.lora_embedding_B"],
    )
    assert (a.shape, b.shape) == ((3, 11), (5, 3))
    tensors = {
        "model.embed.weight": weights["model.embed.weight"],
        **pairs,
        "model.proj.weight": weights["model.proj.weight"],
    }
    merging = MergingExport(manifest_of_plain(tensors, spec))
    merged = dict(merging(iter(tensors.items())))
    torch.testing.assert_close(merged["model.embed.weight"], weights["model.embed.weight"] + 2.0 * (b @ a).t())


def manifest_of_plain(tensors, spec, *tied):
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape), role_of(n)) for n, t in tensors.items()]
    return Manifest((*specs, *tied), spec)


def module_by_module(tensors, order=("weight", "bias", "A", "B")):
    """A module's parameters in torch's order: weight, bias, pair."""
    rest = {n: t for n, t in tensors.items() if not is_adapter(n)}
    out = {}
    for name, tensor in rest.items():
        module = name.removesuffix(".weight")
        pair = {n: t for n, t in tensors.items() if n.startswith(f"base_model.model.{module}.lora_")}
        trio = {"weight": {name: tensor}, "bias": {f"{module}.bias": torch.ones(2)} if pair else {}}
        for letter in "AB":
            trio[letter] = {n: t for n, t in pair.items() if f"lora_{letter}" in n}
        for kind in order:
            out |= trio[kind]
    return out


@pytest.mark.parametrize(
    "order", [("weight", "bias", "A", "B"), ("B", "A", "weight", "bias"), ("A", "weight", "B", "bias")]
)
def test_a_merged_export_has_full_weights_under_the_merged_manifest(order):
    """Of modules with a pair; an expert whose name ends like a target has none."""
    expert = {"model.layers.0.experts.3.up_proj.weight": torch.randn(20, 30)}
    tensors = expert | module_by_module(payload(1, True), order)
    merging = MergingExport(manifest_of(tensors))
    merged = {name: tensor.clone() for name, tensor in merging(iter(tensors.items()))}
    assert merging.merged.adapter is None
    planned = {t.name: (t.dtype, t.shape) for t in merging.merged.sent()}
    assert planned == {n: (dtype_name(t), tuple(t.shape)) for n, t in merged.items()}
    for name, tensor in merged.items():
        expected = tensors[name]
        module = name.removesuffix(".weight")
        if module in MODULES:
            a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
            expected = (expected.double() + 2.0 * (b.double() @ a.double())).bfloat16()
        torch.testing.assert_close(tensor, expected, rtol=1e-2, atol=0)
        assert not torch.equal(tensor, tensors[name]) or module not in MODULES


def test_an_engine_without_lora_accepts_a_merged_export():
    tensors = {n: t for n, t in module_by_module(payload(1, True)).items() if not n.endswith(".bias")}
    merging = MergingExport(manifest_of(tensors))
    replica = Replica(modules=None)
    replica.receiver.open("s", merging.merged)
    for bucket in buckets_of(dict(merging(iter(tensors.items())))):
        replica.receiver.take(bucket)
    replica.receiver.verify()
    replica.receiver.commit(version(1))
    name = "model.layers.1.up_proj"
    a, b = (tensors[f"base_model.model.{name}.lora_{letter}.weight"] for letter in "AB")
    assert torch.equal(replica.base[f"{name}.weight"], merge(tensors[f"{name}.weight"], a, b, SPEC.alpha, SPEC.r))


def test_merging_holds_one_module():
    layers, out, into = 6, 256, 256
    spec = AdapterSpec("a", 2, 2.0, ("proj",), "float32")
    shapes = {}
    for i in range(layers):
        shapes |= {f"l.{i}.proj.weight": (out, into)} | adapter_shapes(f"l.{i}.proj", (out, into), 2)

    def export():
        for at, (name, shape) in enumerate(shapes.items()):
            yield name, torch.full(shape, at % 3 + 1.0)  # weight 1, A 2, B 3

    def held_bytes():
        gc.collect()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live_tensors()}
        return sum(storages.values())

    merging = MergingExport(Manifest(tuple(TensorSpec(n, "float32", s) for n, s in shapes.items()), spec))
    before, most = held_bytes(), 0
    for _, tensor in merging(export()):
        assert tensor.eq(1 + 2 * 2 * 3).all()
        most = max(most, held_bytes() - before)
    assert most <= 2 * 4 * out * into


def live_tensors():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor]


def test_a_module_s_tensors_must_come_together_and_the_export_always_ends():
    tensors = {n: t for n, t in module_by_module(payload(1, True)).items() if not n.endswith(".bias")}
    q, q1 = "model.layers.0.q_proj.weight", "model.layers.1.q_proj.weight"
    names = [n for n in tensors if n != Q_B]
    cases = [
        (names, rf"export gave model.layers.0.up_proj.weight while {q}, {Q_A} waits"),
        ([q, q1, *names], f"export gave {q1} while {q} waits"),
        ([q, q, *names], f"export gave {q} while {q} waits"),
        (["model.norm.weight", q, Q_A], f"export ended while {q}, {Q_A} waits"),
    ]
    for order, message in cases:
        driven = []

        def export(order=order, driven=driven):
            for name in order:
                driven.append(name)
                yield name, tensors[name]

        with pytest.raises(SyncError, match=message):
            list(MergingExport(manifest_of(tensors))(export()))
        assert driven == order


def test_merging_refuses_an_incomplete_adapter_a_tied_weight_and_no_adapter():
    tensors = payload(1, True)
    with pytest.raises(ManifestError, match=f"{Q_B}: expected by the base, but not sent"):
        MergingExport(manifest_of({n: t for n, t in tensors.items() if n != Q_B}))
    with pytest.raises(ManifestError, match="the base takes a LoRA adapter, but the sender's manifest has none"):
        MergingExport(manifest_of(base(1), None))
    weights, pairs, spec = embedding_case()
    tied = TensorSpec("lm_head.weight", "float32", (11, 5), "target", "model.embed.weight")
    with pytest.raises(ManifestError, match=r"targets model.embed.weight, whose storage lm_head.weight shares"):
        MergingExport(manifest_of_plain(weights | pairs, spec, tied))


# -- requests in flight ------------------------------------------------------------------------------------------------


def test_requests_finish_on_the_adapter_that_they_started_with():
    slots = AdapterSlots(3)
    assert slots.publish(version(1)) == 1
    assert slots.begin("a") == slots.begin("b") == 1
    assert slots.publish(version(2)) == 2
    assert slots.begin("c") == 2
    assert slots.counts() == {1: 2, 2: 1}
    slots.end("a")
    assert slots.free_idle() == [1, 2]
    slots.end("b")
    assert slots.free_idle() == [2]
    slots.end("c")
    assert slots.free_idle() == [2]  # the newest one stays
    assert slots.publish(version(3)) == 3  # ids of freed slots are not reused


def test_the_error_names_the_requests_that_hold_all_slots():
    slots = AdapterSlots(2)
    for number in (1, 2):
        slots.publish(version(number))
        slots.begin(number)
    with pytest.raises(RuntimeError, match=r"0.1 \(1 requests\), 0.2 \(1 requests\) hold all 2"):
        slots.publish(version(3))
    slots.end(1)
    assert slots.publish(version(3)) == 3


def test_a_new_version_takes_the_slot_of_an_old_one_without_requests():
    slots = AdapterSlots(2)
    slots.publish(version(1))
    slots.begin("outlives two versions")
    slots.publish(version(2))
    slots.end("outlives two versions")
    assert slots.publish(version(3)) == 3
    assert slots.counts() == {2: 0, 3: 0}  # the previously newest one stays


def test_slots_refuse_invalid_calls():
    slots = AdapterSlots(2)
    with pytest.raises(ValueError, match="request a began before a first version"):
        slots.begin("a")
    slots.publish(version(2))
    slots.begin("a")
    with pytest.raises(ValueError, match="request a began a second time, it still runs on slot 1"):
        slots.begin("a")
    with pytest.raises(ValueError, match=r"0.1 is older than 0.2"):
        slots.publish(version(1))
    slots.publish(version(2))  # the same version again, when a replica joins
    with pytest.raises(KeyError):
        slots.end("b")
    with pytest.raises(ValueError, match="expected room for at least 2 adapters"):
        AdapterSlots(1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=60))
def test_a_slot_is_free_only_when_no_request_runs_on_it(steps):
    slots, expected, number, begun = AdapterSlots(100), {}, 0, 0
    for step in [0, *steps]:
        if step < 2:
            number += 1
            assert slots.publish(version(number)) == number
        elif step < 6:
            begun += 1
            assert slots.begin(begun) == number
            expected[begun] = number
        elif expected:
            ended = sorted(expected)[step % len(expected)]
            slots.end(ended)
            del expected[ended]
        assert sum(slots.counts().values()) == len(expected)
        assert set(slots.free_idle()) == {number, *expected.values()}
