"""Digests, buckets and live weights, without processes."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.param_sync.buckets import ALIGN_BYTES, Bucket, TensorPart, check_checksum, pack
from asyncrl.param_sync.digest import combine_hashes, digest_tensors, dtype_name, hashes_by_role
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec
from asyncrl.param_sync.tensor_assembler import TensorAssembler
from asyncrl.param_sync.weight_receiver import LocalReceiver
from asyncrl.types.versions import PolicyVersion

V1 = PolicyVersion(0, 1)


def manifest_of(tensors, tied=()):
    specs = [TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()]
    return Manifest((*specs, *tied))


def buckets_of(tensors, capacity=256, checksum=True, session="s", on_hash=None, zero_copy_from=None, destination=None):
    """Buckets as a transport delivers them, each with its own buffer; zero-copy parts arrive at their ``destination``
    if they have one, else in the buffer."""
    buffers = []

    def next_buffer():
        buffers.append(torch.full((capacity,), 0xEE, dtype=torch.uint8))
        return buffers[-1]

    def bucket_of(i, filled):
        in_place = {}
        for part in filled.parts:
            if part.name in filled.zero_copy:
                into = destination(session, part, torch.device("cpu")) if destination is not None else None
                if into is None:
                    into = buffers[i][part.offset : part.offset + part.nbytes]
                else:
                    in_place[part.name] = into
                into.copy_(filled.zero_copy[part.name])
        return Bucket(session, 0, i, filled.parts, memoryview(buffers[i].numpy()), filled.checksum, in_place=in_place)

    packed = pack(tensors.items(), next_buffer, checksum, on_hash, zero_copy_from)
    return [bucket_of(i, filled) for i, filled in enumerate(packed)]


def receiver_of(live, tied=None, versions=None):
    return LiveWeights(live, tied or {}, (versions if versions is not None else []).append)


def same_bits(a, b):
    return a.shape == b.shape and digest_tensors([("x", a)]) == digest_tensors([("x", b)])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors_and_targets(draw):
    """Tensors, some strided, and live views of the same shapes, some strided or slices of a fused tensor."""
    sources, live = {}, {}
    for i in range(draw(st.integers(1, 8))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 9), max_size=3))
        generator = torch.Generator().manual_seed(i)
        for side in (sources, live):
            layout = draw(st.sampled_from(["plain", "transposed", "sliced"]))
            if layout == "transposed":
                full = torch.randint(0, 2, shape[::-1], generator=generator).to(dtype)
                side[f"t{i}"] = full.permute(list(reversed(range(full.ndim))))
            elif layout == "sliced" and shape:
                full = torch.randint(0, 2, [*shape[:-1], shape[-1] + 3], generator=generator).to(dtype)
                side[f"t{i}"] = full[..., 1 : 1 + shape[-1]]
            else:
                side[f"t{i}"] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return sources, live


@settings(max_examples=150, deadline=None)
@given(tensors_and_targets(), st.sampled_from([64, 128, 1024]), st.sampled_from([None, 1, 48, 100]), st.booleans())
def test_any_tensors_arrive_bit_exact_in_any_views(case, capacity, zero_copy_from, placing):
    sources, live = case
    receiver, contents = receiver_of(live), {}
    receiver.open("s", manifest_of(sources))
    destination = receiver.destination if placing else None
    for bucket in buckets_of(
        sources, capacity, on_hash=contents.__setitem__, zero_copy_from=zero_copy_from, destination=destination
    ):
        ends = 0
        for part in sorted(bucket.parts, key=lambda p: (p.offset, p.nbytes)):
            assert part.offset % ALIGN_BYTES == 0
            assert ends <= part.offset <= part.offset + part.nbytes <= capacity
            ends = part.offset + part.nbytes
        receiver.take(bucket)
    receiver.verify()
    assert digest_tensors(live.items()) == digest_tensors(sources.items())
    hashes = hashes_by_role(manifest_of(sources), contents)["target"]
    assert combine_hashes(hashes) == digest_tensors(sources.items())


def test_writing_to_a_slice_leaves_the_rest_of_a_fused_tensor_unchanged():
    fused = torch.full((6, 10), 7.0)
    live = {"gate": fused[:, :4], "up": fused[:, 4:9]}
    receiver = receiver_of(live)
    sources = {"gate": torch.zeros(6, 4), "up": torch.ones(6, 5)}
    receiver.open("s", manifest_of(sources))
    for bucket in buckets_of(sources, 64):
        receiver.take(bucket)
    assert fused[:, 9].eq(7).all()
    assert fused[:, :4].eq(0).all()
    assert fused[:, 4:9].eq(1).all()


def test_a_tensor_that_fits_a_bucket_is_never_split_and_an_exact_fit_closes_it():
    tensors = {"a": torch.zeros(40), "b": torch.zeros(64), "c": torch.zeros(64), "large": torch.zeros(100)}
    buckets = buckets_of(tensors, 256)
    assert [[(p.name, p.start, p.nbytes) for p in b.parts] for b in buckets] == [
        [("a", 0, 160)],
        [("b", 0, 256)],
        [("c", 0, 256)],
        [("large", 0, 256)],
        [("large", 256, 144)],
    ]


def test_a_large_tensor_fills_the_rest_of_a_bucket():
    buckets = buckets_of({"a": torch.zeros(16), "large": torch.zeros(100)}, 256)
    assert [p.nbytes for b in buckets for p in b.parts] == [64, 192, 208]


def test_no_tensors_make_no_bucket_and_capacity_is_checked():
    assert buckets_of({}) == []
    with pytest.raises(ValueError, match="multiple of 64"):
        buckets_of({"a": torch.zeros(1)}, capacity=100)


def test_each_tensor_is_read_before_the_next_is_requested():
    shared = torch.zeros(30)

    def export():
        for i in range(5):
            yield f"t{i}", shared.fill_(i)

    buffer = torch.zeros(1024, dtype=torch.uint8)
    (filled,) = pack(export(), lambda: buffer)
    sent = [float(buffer[p.offset : p.offset + 4].view(torch.float32)) for p in filled.parts]
    assert sent == [0, 1, 2, 3, 4]


def test_large_contiguous_tensors_are_not_copied():
    tensors = {
        "small": torch.ones(10),
        "large": torch.ones(40),
        "strided": torch.ones(8, 5).t(),
        "row": torch.ones(4, 40)[2],
        "split": torch.ones(140),
    }
    filled = list(pack(tensors.items(), lambda: torch.zeros(512, dtype=torch.uint8), zero_copy_from=160))
    assert [list(f.zero_copy) for f in filled] == [["large"], ["row", "split"], ["split"]]
    assert [[part.name for part in f.parts if part.name not in f.zero_copy] for f in filled] == [
        ["small", "strided"],
        [],
        [],
    ]
    assert filled[0].zero_copy["large"].data_ptr() == tensors["large"].data_ptr()
    assert filled[1].zero_copy["row"].data_ptr() == tensors["row"].data_ptr()
    (start, count) = next(part[1:3] for part in filled[2].parts)
    assert filled[2].zero_copy["split"].data_ptr() == tensors["split"].data_ptr() + start
    assert start + count == 560
    none = [f.zero_copy for f in pack(tensors.items(), lambda: torch.zeros(512, dtype=torch.uint8))]
    assert none == [{}, {}, {}]


def test_the_digest_does_not_depend_on_order_or_layout():
    a, b = torch.randn(5, 6), torch.randn(3).to(torch.bfloat16)
    expected = digest_tensors([("a", a), ("b", b)])
    assert digest_tensors([("b", b), ("a", a.t().contiguous().t())]) == expected


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.tensor([0, 0, 0, -0.0])},
        {"a": torch.zeros(4), "empty": torch.empty(0)},
    ],
)
def test_the_digest_covers_names_shapes_dtypes_and_every_bit(other):
    assert digest_tensors(other.items()) != digest_tensors([("a", torch.zeros(4))])


def test_hashes_taken_while_packing_give_the_digest_and_combine_over_senders():
    tensors = {"b": torch.randn(300), "a": torch.randn(3), "none": torch.empty(0, 4)}
    hashes = {}
    for share in (["b"], ["a", "none"]):
        contents = {}
        buckets_of({n: tensors[n] for n in share}, 256, on_hash=contents.__setitem__)
        hashes |= hashes_by_role(manifest_of(tensors), contents)["target"]
    assert combine_hashes(hashes) == digest_tensors(tensors.items())


# -- the receiver ------------------------------------------------------------------------------------------------------


def test_a_commit_reports_the_version_and_ends_the_session():
    versions, live = [], {"a": torch.zeros(9)}
    receiver = receiver_of(live, versions=versions)
    receiver.open("s", manifest_of({"a": torch.ones(9)}))
    assert receiver.intact()
    for bucket in buckets_of({"a": torch.ones(9)}):
        receiver.take(bucket)
    assert not receiver.intact()
    receiver.verify()
    receiver.commit(V1)
    assert receiver.intact()
    assert versions == [V1]
    assert live["a"].eq(1).all()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, "c: sent, but unknown to the replica"),
        ({"a": torch.zeros(2)}, "b: a parameter of the replica that is not sent"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"b: sent as float32\[4\], the replica holds float32\[3\]"),
        ({"a": torch.zeros(2), "b": torch.zeros(3).half()}, r"b: sent as float16\[3\], the replica holds float32\[3\]"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3), "head": torch.zeros(2)},
            "head: sent, but the replica ties it to a",
        ),
    ],
)
@pytest.mark.parametrize("after_one_that_fits", [False, True])
def test_a_manifest_that_does_not_fit_is_refused(sent, message, after_one_that_fits):
    live = {"a": torch.zeros(2), "b": torch.zeros(3)}
    receiver = receiver_of(live, {"head": "a"})
    if after_one_that_fits:
        receiver.open("r", manifest_of(live))
    with pytest.raises(ManifestError, match=message):
        receiver.open("s", manifest_of(sent))


def test_a_manifest_that_arrives_again_is_the_one_of_before():
    adapter = AdapterSpec("a", 2, 4.0, ("q_proj",), "float32")
    sent = Manifest((TensorSpec("a", "float32", (2, 3)), TensorSpec("h", "int8", (), "draft", "a")), adapter, True)
    first, second = (pickle.loads(pickle.dumps(manifest)) for manifest in (sent, replace(sent)))
    assert first == sent
    assert first is second
    assert pickle.loads(pickle.dumps(first)) is first
    assert pickle.loads(pickle.dumps(sent.without_base())) == sent.without_base() != sent


def test_a_manifest_error_counts_all_problems_and_lists_a_few():
    receiver = receiver_of({f"p{i}": torch.zeros(1) for i in range(30)})
    with pytest.raises(ManifestError, match=r"30 differ.*and 26 more") as error:
        receiver.open("s", Manifest(()))
    assert len(str(error.value)) < 600


def test_tied_names_are_known_and_not_sent():
    head = TensorSpec("head", "float32", (2,), "target", "a")
    sent = {"a": torch.ones(2)}
    receiver_of({"a": torch.zeros(2)}, {"head": "a"}).open("s", manifest_of(sent, [head]))
    receiver_of({"a": torch.zeros(2)}, {"head": "a"}).open("s", manifest_of(sent))
    receiver_of({"a": torch.zeros(2)}).open("s", manifest_of(sent, [head]))
    with pytest.raises(ManifestError, match="head: the sender ties it to a, the replica to storage of its own"):
        receiver_of({"a": torch.zeros(2), "head": torch.zeros(2)}).open("s", manifest_of(sent, [head]))


def opened(live, tensors, session="s"):
    receiver = receiver_of(live)
    receiver.open(session, manifest_of(tensors))
    return receiver


def test_buckets_of_another_session_or_out_of_sequence_change_nothing():
    tensors, live = {"a": torch.ones(100), "b": torch.ones(100)}, {"a": torch.zeros(100), "b": torch.zeros(100)}
    receiver = opened(live, tensors)
    first, second, *_ = buckets_of(tensors)
    for bucket, message in (
        (first._replace(session="older"), "is in session s"),
        (second, "out of sequence, bucket 0"),
    ):
        with pytest.raises(SyncError, match=message):
            receiver.take(bucket)
    assert receiver.intact()
    assert live["a"].eq(0).all()
    receiver.take(first)
    with pytest.raises(SyncError, match="out of sequence, bucket 1"):
        receiver.take(first)


def test_no_byte_is_accepted_twice():
    tensors, live = {"a": torch.ones(10), "none": torch.empty(0)}, {"a": torch.zeros(10), "none": torch.empty(0)}
    (bucket,) = buckets_of(tensors)
    for part in bucket.parts:
        receiver = opened(live, tensors)
        receiver.take(bucket)
        again = bucket._replace(sequence=1, parts=(part,), checksum=None)
        with pytest.raises(SyncError, match=f"{part.name}: byte 0 arrived a second time"):
            receiver.take(again)


def test_a_gap_or_an_overlong_part_is_refused():
    tensors, live = {"a": torch.ones(100)}, {"a": torch.zeros(100)}
    first, second = buckets_of(tensors)
    with pytest.raises(SyncError, match="byte 256 came early"):
        opened(live, tensors).take(second._replace(sequence=0))
    (part,) = first.parts
    for wrong in (part._replace(nbytes=404), part._replace(nbytes=254), part._replace(offset=64)):
        with pytest.raises(SyncError, match="does not fit"):
            opened(live, tensors).take(first._replace(parts=(wrong,)))


def test_a_damaged_bucket_is_refused_before_it_is_written():
    tensors, live = {"a": torch.ones(10)}, {"a": torch.zeros(10)}
    (bucket,) = buckets_of(tensors)
    check_checksum(bucket)
    bucket.data[17] ^= 4
    with pytest.raises(SyncError, match="damaged in transit"):
        opened(live, tensors).take(bucket)
    assert live["a"].eq(0).all()


def test_a_part_has_a_destination_if_the_session_sends_it_and_its_view_is_contiguous():
    live = {"a": torch.zeros(100), "strided": torch.zeros(10, 10).t(), "other": torch.zeros(100)}
    receiver, cpu = receiver_of(live), torch.device("cpu")
    part = TensorPart("a", 0, 400, 0)
    assert receiver.destination("s", part, cpu) is None
    receiver.open("s", manifest_of(live))
    for wrong in (
        part._replace(name="stray"),
        part._replace(name="strided"),
        part._replace(start=4),
        part._replace(start=-4),
        part._replace(nbytes=-4),
    ):
        assert receiver.destination("s", wrong, cpu) is None
    assert receiver.destination("older", part, cpu) is None
    assert receiver.destination("s", part, torch.device("meta")) is None
    assert receiver.intact()
    destination = receiver.destination("s", part._replace(start=8, nbytes=16), cpu)
    assert (destination.dtype, destination.numel(), destination.data_ptr()) == (
        torch.uint8,
        16,
        live["a"].data_ptr() + 8,
    )
    assert not receiver.intact()  # it may be written from now on


def test_a_byte_damaged_in_place_is_detected_and_nothing_else_is_written():
    tensors, live = {"a": torch.ones(60), "b": torch.ones(5)}, {"a": torch.zeros(60), "b": torch.zeros(5)}
    receiver = opened(live, tensors)
    (bucket,) = buckets_of(tensors, 512, zero_copy_from=100, destination=receiver.destination)
    assert bucket.in_place.keys() == {"a"}
    live["a"].view(torch.uint8)[17] ^= 4
    with pytest.raises(SyncError, match="bucket 0/0 of session s: damaged in transit"):
        receiver.take(bucket)
    assert live["b"].eq(0).all()
    assert not receiver.intact()

    receiver.open("s", manifest_of(tensors))
    (bucket,) = buckets_of(tensors, 512, zero_copy_from=100, destination=receiver.destination)
    receiver.take(bucket)
    receiver.verify()
    receiver.commit(V1)
    assert receiver.intact()
    assert digest_tensors(live.items()) == digest_tensors(tensors.items())


def test_a_host_copy_holds_the_packed_bytes_only():
    tensors, live = {"a": torch.ones(60), "empty": torch.ones(0)}, {"a": torch.zeros(60), "empty": torch.zeros(0)}
    receiver = LocalReceiver("r0", opened(live, tensors), None)
    (bucket,) = buckets_of(tensors, 4096)
    receiver._stage(bucket)
    assert [len(staged.data) for staged in receiver._copy] == [256]  # 240, and the empty one at the next 64
    receiver._load()
    assert live["a"].eq(1).all()


def test_an_in_place_part_must_arrive_in_order_like_any_other():
    tensors, live = {"a": torch.ones(100)}, {"a": torch.zeros(100)}
    receiver = opened(live, tensors)
    first, second = buckets_of(tensors, zero_copy_from=1, destination=receiver.destination)
    with pytest.raises(SyncError, match="byte 256 came early"):
        receiver.take(second._replace(sequence=0))
    receiver = opened(live, tensors)
    receiver.take(first)
    with pytest.raises(SyncError, match="byte 0 arrived a second time"):
        receiver.take(first._replace(sequence=1))


def test_verify_reports_missing_bytes_and_commit_needs_verify():
    tensors = {"a": torch.ones(100), "none": torch.empty(0)}
    live = {"a": torch.zeros(100), "none": torch.empty(0)}
    receiver = opened(live, tensors)
    receiver.take(buckets_of(tensors)[0])
    with pytest.raises(SyncError, match="2 tensors are incomplete: a: 256 of 400 bytes, none: 0 of 0"):
        receiver.verify()
    with pytest.raises(SyncError, match="nothing verified"):
        receiver.commit(V1)
    receiver.abort()
    assert not receiver.intact()
    with pytest.raises(SyncError, match="no session is open"):
        receiver.verify()


def test_an_error_keeps_its_fields_across_processes():
    error = SyncError("transfer", None, None, BucketKey("s", 2, 5), "it broke").located("replica/1", V1)
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "sync phase transfer, replica/1, version 0.1, bucket 2/5 of session s: it broke"
    assert (again.phase, again.who, again.version, again.bucket) == ("transfer", "replica/1", V1, ("s", 2, 5))


# -- whole tensors -----------------------------------------------------------------------------------------------------


def mixed_tensors():
    return {
        "big": torch.arange(300, dtype=torch.float32).view(20, 15),  # spans several buckets
        "empty": torch.zeros(0, 3),
        "strided": torch.arange(24, dtype=torch.bfloat16).view(4, 6).t(),
        "small": torch.tensor([1, 2, 3], dtype=torch.int64),
    }


def test_tensors_are_whole_copies_with_the_senders_digest():
    tensors = mixed_tensors()
    whole, arrived = TensorAssembler("s", manifest_of(tensors)), {}
    for bucket in buckets_of(tensors):
        arrived |= {spec.name: tensor for spec, tensor in whole.take(bucket)}
        bucket.data[:] = bytes(len(bucket.data))  # buffers are reused
    whole.verify()
    assert arrived.keys() == tensors.keys()
    assert all(torch.equal(arrived[name], tensors[name]) for name in tensors)
    assert whole.digest("target") == digest_tensors(tensors.items())
    assert whole.nbytes == sum(t.nbytes for t in tensors.values())


def test_the_buckets_of_two_senders_may_alternate():
    first, second = ({f"{s}": torch.full((200,), float(i))} for i, s in enumerate("ab"))
    whole, arrived = TensorAssembler("s", manifest_of(first | second)), {}
    for one, other in zip(buckets_of(first), buckets_of(second), strict=True):
        for bucket in (one, other._replace(sender=1)):
            arrived |= {spec.name: tensor for spec, tensor in whole.take(bucket)}
    whole.verify()
    assert all(torch.equal(arrived[name], t) for name, t in (first | second).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda buckets: [buckets[0]._replace(session="old")], "bucket 0 of session s comes next"),
        (lambda buckets: buckets[1:], "bucket 0 of session s comes next"),
        (lambda buckets: [*buckets, buckets[0]._replace(sequence=len(buckets))], "came a second time"),
        (lambda buckets: [buckets[0]._replace(checksum=1)], "damaged in transit"),
        (lambda buckets: [buckets[1]._replace(sequence=0)], "0 of 1200 have arrived"),
    ],
)
def test_parts_that_are_not_next_are_refused(change, message):
    tensors = mixed_tensors()
    whole = TensorAssembler("s", manifest_of(tensors))
    arriving = chain.from_iterable(map(whole.take, change(buckets_of(tensors))))
    with pytest.raises(SyncError, match=message):
        list(arriving)


def test_incomplete_tensors_are_reported():
    tensors = mixed_tensors()
    whole = TensorAssembler("s", manifest_of(tensors))
    list(whole.take(buckets_of(tensors)[0]))
    with pytest.raises(SyncError, match="4 tensors have not arrived completely: big"):
        whole.verify()
