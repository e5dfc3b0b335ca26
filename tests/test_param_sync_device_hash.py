"""Content hashes on the host, and the kernel that copies and hashes on a device: in Triton's interpreter, and on a GPU.

The interpreter must be chosen before triton is imported, so its tests call functions of this file in a process of
their own, where the CPU counts as a device."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.param_sync import device_ranges
from asyncrl.param_sync.buckets import Bucket, check_checksum, pack
from asyncrl.param_sync.content_hash import CHUNK_BYTES, ContentHash, content_hash
from asyncrl.param_sync.digest import digest_tensors, dtype_name, flat_bytes
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.tensor_assembler import TensorAssembler

ROOT = Path(__file__).parent.parent
#: around words, stripes, the padded length, blocks, four blocks read at once, chunks
BORDERS = (0, 8, 64, 128, 192, 240, 256, 1024, 1088, 2048, 4096, 5120)
LENGTHS = sorted({max(border + d, 0) for border in BORDERS for d in (-1, 0, 1)} | {5, 300, 7777})
LONG = (CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, CHUNK_BYTES + 300, 2 * CHUNK_BYTES)


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def awkward_tensors() -> dict[str, torch.Tensor]:
    """Strided ones, empty ones, ones at odd addresses, one larger than a bucket of 2048 bytes."""
    rand = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return {
        "small": rand(5),
        "empty": torch.empty(0, 3),
        "strided": rand(8, 9).t(),
        "large": rand(1000),
        "row": rand(10, 33).bfloat16()[3],
        "shifted": rand(40)[1:],
        "bytes": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "last": rand(100, 3).bfloat16(),
    }


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorSpec(n, dtype_name(t), tuple(t.shape)) for n, t in tensors.items()))


# -- on the host -------------------------------------------------------------------------------------------------------


def test_a_device_without_memory_for_the_check_is_checked_again(monkeypatch):
    device, checks = torch.device("cuda", 63), []

    def check(device):
        checks.append(device)
        if len(checks) == 1:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(device_ranges, "_check", check)
    monkeypatch.setattr(device_ranges, "works_on", functools.cache(device_ranges.works_on.__wrapped__))
    with pytest.raises(torch.OutOfMemoryError):
        device_ranges.works_on(device)
    assert device_ranges.works_on(device)
    assert device_ranges.works_on(device)
    assert len(checks) == 2


def test_tensors_packed_on_a_device_are_not_held_while_their_bucket_is_sent(monkeypatch):
    monkeypatch.setattr(device_ranges, "works_on", lambda device: True)
    monkeypatch.setattr(device_ranges, "copy", lambda ranges, device: None)
    made = []

    def export():
        for i in range(8):
            tensor = torch.zeros(16)
            made.append(weakref.ref(tensor))
            yield str(i), tensor
            del tensor

    for filled in pack(export(), lambda: torch.zeros(256, dtype=torch.uint8), checksum=False):
        assert len(filled.parts) == 4
        assert sum(tensor() is not None for tensor in made) == 1  # the last one given


def test_the_hash_is_xxh3_of_one_chunk_or_of_the_hashes_of_more():
    data = random_bytes(2 * CHUNK_BYTES + 100).numpy().tobytes()
    xxh3 = xxhash.xxh3_128_digest
    assert content_hash(data[:241]) == xxh3(data[:241])
    assert content_hash(data[:CHUNK_BYTES]) == xxh3(data[:CHUNK_BYTES])
    assert content_hash(data[:240]) == xxh3(data[:240] + bytes(16))
    assert content_hash(b"") == xxh3(bytes(256))
    chunks = [data[:CHUNK_BYTES], data[CHUNK_BYTES : 2 * CHUNK_BYTES], data[2 * CHUNK_BYTES :] + bytes(156)]
    assert content_hash(data) == xxh3(b"".join(map(xxh3, chunks)))


@given(st.lists(st.sampled_from([0, 1, 240, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES]), max_size=6))
def test_bytes_in_pieces_have_the_hash_of_the_whole(sizes):
    data, piecewise, at = memoryview(random_bytes(sum(sizes)).numpy().tobytes()), ContentHash(), 0
    for size in sizes:
        piecewise.update(data[at : at + size])
        at += size
    assert piecewise.digest() == content_hash(data)


# -- on a device -------------------------------------------------------------------------------------------------------


def check_hashes(device: torch.device, lengths: list[int]) -> None:
    """Many ranges in one call: hashes equal to the host's, copies without a byte too many."""
    data = [random_bytes(n, seed) for seed, n in enumerate(lengths)]
    here = [d.to(device) for d in data]
    into = [torch.full((n + 64,), 0xEE, dtype=torch.uint8, device=device) for n in lengths]
    ranges = [(h.data_ptr(), h.nbytes, t.data_ptr()) for h, t in zip(here, into, strict=True)]
    expected = [content_hash(d.numpy().data) for d in data]
    assert device_ranges.copy_and_hash(ranges, device) == expected
    for d, t in zip(data, into, strict=True):
        assert torch.equal(t[: len(d)].cpu(), d)
        assert t[len(d) :].eq(0xEE).all()
    assert device_ranges.copy_and_hash([(source, n, 0) for source, n, _ in ranges], device) == expected
    again = [torch.zeros_like(h) for h in here]
    device_ranges.copy([(source, n, t.data_ptr()) for (source, n, _), t in zip(ranges, again, strict=True)], device)
    assert all(torch.equal(t, h) for t, h in zip(again, here, strict=True))


def check_buckets(device: torch.device, hosted: list[Bucket], contents: dict[str, bytes]) -> None:
    """Buckets, digests and live weights on the device equal those ``hosted`` on the CPU, made of the same tensors."""
    tensors = {name: _on(device, tensor) for name, tensor in awkward_tensors().items()}
    digest = digest_tensors(awkward_tensors().items())
    assert digest_tensors(tensors.items()) == digest
    for zero_copy_from in (None, 100):
        hashes: dict[str, bytes] = {}
        buckets = buckets_of(tensors, device, hashes, zero_copy_from)
        assert hashes == contents
        assert [b.checksum for b in buckets] == [b.checksum for b in hosted]
        live = {name: _on(device, torch.zeros_like(tensor)) for name, tensor in tensors.items()}
        live["shifted"] = torch.zeros(42, device=device)[1:40]
        weights = LiveWeights(live, {}, on_commit=lambda version: None)
        whole = TensorAssembler("s", manifest_of(tensors))
        weights.open("s", manifest_of(tensors))
        for bucket in buckets:
            weights.take(bucket)
            assert all(torch.equal(tensor, tensors[spec.name]) for spec, tensor in whole.take(bucket))
        weights.verify()
        whole.verify()
        assert digest_tensors(live.items()) == whole.digest("target") == digest
        buffer = buckets[1].data
        assert isinstance(buffer, torch.Tensor)
        buffer[5] ^= 1
        with pytest.raises(SyncError, match="damaged in transit"):
            check_checksum(buckets[1])


def buckets_of(
    tensors: dict[str, torch.Tensor], device: torch.device, hashes: dict[str, bytes], zero_copy_from: int | None = None
) -> list[Bucket]:
    """Buckets of 2048 bytes as they arrive, each with its own buffer; ``hashes`` gets those of the tensors."""
    buffers: list[torch.Tensor] = []

    def next_buffer() -> torch.Tensor:
        buffers.append(torch.full((2048,), 0xEE, dtype=torch.uint8, device=device))
        return buffers[-1]

    buckets = []
    for i, filled in enumerate(pack(tensors.items(), next_buffer, True, hashes.__setitem__, zero_copy_from)):
        for part in filled.parts:
            if part.name in filled.zero_copy:
                buffers[i][part.offset : part.offset + part.nbytes].copy_(filled.zero_copy[part.name])
        buckets.append(Bucket("s", 0, i, filled.parts, buffers[i], filled.checksum))
    return buckets


def _on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor at the same offset and with the same strides."""
    storage = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device=device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(tensor)


def interpret() -> None:
    """All checks on the CPU; runs in a process of its own."""
    cpu, contents = torch.device("cpu"), dict[str, bytes]()
    hosted = buckets_of(awkward_tensors(), cpu, contents)
    check_hashes(cpu, [*LENGTHS, *LONG[:4]])
    device_ranges.works_on = lambda device: True
    check_buckets(cpu, hosted, contents)


@pytest.mark.vllm  # the default environment has no triton
def test_the_kernel_in_tritons_interpreter():
    pytest.importorskip("triton")
    code = "from tests.test_param_sync_device_hash import interpret; interpret()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_hashes_and_buckets_on_a_gpu_are_those_of_the_host():
    device, contents = torch.device("cuda", torch.cuda.current_device()), dict[str, bytes]()
    assert device_ranges.works_on(device)
    hosted = buckets_of(awkward_tensors(), torch.device("cpu"), contents)
    check_hashes(device, [*LENGTHS, *LONG, 50 * CHUNK_BYTES + 12345])
    check_buckets(device, hosted, contents)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_a_digest_of_more_than_one_batch_is_that_on_the_host(monkeypatch):
    monkeypatch.setattr("asyncrl.param_sync.digest._BATCH_BYTES", 1 << 20)
    tensors = {f"t{i}": flat_bytes(random_bytes(300_000 + i, i)) for i in range(10)}
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    mixed = {name: there[name] if int(name[1:]) % 2 else tensor for name, tensor in tensors.items()}
    assert digest_tensors(there.items()) == digest_tensors(mixed.items()) == digest_tensors(tensors.items())
