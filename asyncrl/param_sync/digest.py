"""Digests of weights: equal on two sides only if names, dtypes, shapes and every byte are equal.

A tensor's hash is its name, dtype and shape, and xxh3_128 of its contiguous bytes. A digest is xxh3_128 over the hashes
in name order, so it does not depend on the order of export, and the hashes of several senders can be combined::

    digest_tensors(model.named_parameters()) == combine_hashes({**hashes_of_sender_0, **hashes_of_sender_1})
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import torch
import xxhash

from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec

ROLES: tuple[Role, ...] = ("target", "draft")


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
    """Digest of named tensors, 32 hex digits. The tensors may be strided and on any device."""
    return combine_hashes(
        {name: hash_tensor(TensorSpec(name, dtype_name(tensor), tuple(tensor.shape)), tensor) for name, tensor in items}
    )


def hash_tensor(spec: TensorSpec, tensor: torch.Tensor) -> bytes:
    """Hash of a tensor, which may be strided and on any device."""
    return _header(spec) + xxhash.xxh3_128_digest(flat_bytes(tensor).cpu().numpy().data)


def hashes_by_role(manifest: Manifest, contents: Mapping[str, bytes]) -> dict[Role, dict[str, bytes]]:
    """Hashes of the manifest's tensors, by role and name. ``contents``: xxh3_128 of each one's bytes."""
    hashes: dict[Role, dict[str, bytes]] = {role: {} for role in ROLES}
    for spec in manifest:
        if spec.name in contents:
            hashes[spec.role][spec.name] = _header(spec) + contents[spec.name]
    return hashes


def combine_hashes(hashes: Mapping[str, bytes]) -> str:
    """Digest from the hashes of tensors, by name."""
    return xxhash.xxh3_128_hexdigest(b"".join(hashes[name] for name in sorted(hashes)))


@functools.lru_cache(1 << 17)  # the same in every session
def _header(spec: TensorSpec) -> bytes:
    return f"{spec.name}\0{spec.dtype}\0{tuple(spec.shape)}\0".encode()
