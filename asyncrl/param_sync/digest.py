"""Digests of weights: equal on two sides only if names, dtypes, shapes and every byte are equal.

A tensor's hash is its name, dtype and shape, and the `content_hash` of its contiguous bytes. A digest is xxh3_128 over
the hashes in name order, so it does not depend on the order of export, and the hashes of several senders can be
combined::

    digest_tensors(model.named_parameters()) == combine_hashes({**hashes_of_sender_0, **hashes_of_sender_1})
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
import xxhash

from asyncrl.param_sync import device_ranges
from asyncrl.param_sync.content_hash import content_hash
from asyncrl.param_sync.manifest import ROLES, Manifest, Role, TensorSpec

_BATCH_BYTES = 64 << 20  # of tensors that are kept until they are hashed together


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype as in manifests: ``bfloat16``."""
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [nbytes] of the tensor in row-major order: a view of a contiguous tensor, a copy of any other."""
    row = tensor.detach().contiguous()
    # Not view(-1): a dimension of size 1 may keep an odd stride, which cannot be viewed as bytes.
    return row.as_strided((row.numel(),), (1,)).view(torch.uint8)


def digest_tensors(items: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors, 32 hex digits. The tensors may be strided and on any device. On a device, some are kept
    while the next ones are requested, and must not change meanwhile."""
    hashes: dict[str, bytes] = {}
    batch: dict[str, torch.Tensor] = {}  # on devices, to be hashed together
    nbytes = 0
    for name, tensor in items:
        if not device_ranges.works_on(tensor.device):
            hashes[name] = tensor_hash(_spec(name, tensor), _hash_on_host(tensor))
            continue
        batch[name] = tensor
        nbytes += tensor.nbytes
        if nbytes >= _BATCH_BYTES:
            hashes |= _hashes_of(batch)
            batch, nbytes = {}, 0
        del tensor  # it would be held while the next one is made
    return combine_hashes(hashes | _hashes_of(batch))


def hash_tensor(spec: TensorSpec, tensor: torch.Tensor) -> bytes:
    """Hash of a tensor, which may be strided and on any device."""
    return tensor_hash(spec, content_hashes([tensor])[0])


def tensor_hash(spec: TensorSpec, content: bytes) -> bytes:
    """Hash of a tensor from the `content_hash` of its bytes."""
    return _header(spec) + content


def content_hashes(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The `content_hash` of each tensor; those on a device are hashed there, all at once."""
    hashes: dict[int, bytes] = {}
    on_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if device_ranges.works_on(tensor.device):
            on_device.setdefault(tensor.device, []).append(i)
        else:
            hashes[i] = _hash_on_host(tensor)
    for device, indices in on_device.items():
        rows = [tensors[i].detach().contiguous() for i in indices]
        rows = [row if device_ranges.aligned(row) else row.clone() for row in rows]
        ranges = [(row.data_ptr(), row.nbytes, 0) for row in rows]
        hashes.update(zip(indices, device_ranges.copy_and_hash(ranges, device), strict=True))
    return [hashes[i] for i in range(len(tensors))]


def hashes_by_role(manifest: Manifest, contents: Mapping[str, bytes]) -> dict[Role, dict[str, bytes]]:
    """Hashes of the manifest's tensors, by role and name. ``contents``: the `content_hash` of each one's bytes."""
    hashes: dict[Role, dict[str, bytes]] = {role: {} for role in ROLES}
    for spec in manifest:
        if spec.name in contents:
            hashes[spec.role][spec.name] = tensor_hash(spec, contents[spec.name])
    return hashes


def combine_hashes(hashes: Mapping[str, bytes]) -> str:
    """Digest from the hashes of tensors, by name."""
    return xxhash.xxh3_128_hexdigest(b"".join(hashes[name] for name in sorted(hashes)))


def _hash_on_host(tensor: torch.Tensor) -> bytes:
    if tensor.is_cpu and tensor.is_contiguous():
        # By address: making views of a small tensor's bytes takes longer than hashing them.
        return content_hash(memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())))
    return content_hash(flat_bytes(tensor).cpu().numpy().data)


def _hashes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Hashes of tensors on devices, by name."""
    contents = content_hashes(list(tensors.values()))
    return {
        name: tensor_hash(_spec(name, tensor), content)
        for (name, tensor), content in zip(tensors.items(), contents, strict=True)
    }


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, dtype_name(tensor), tuple(tensor.shape))


@functools.lru_cache(1 << 17)  # the same in every session
def _header(spec: TensorSpec) -> bytes:
    return f"{spec.name}\0{spec.dtype}\0{tuple(spec.shape)}\0".encode()
