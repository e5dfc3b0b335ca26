"""Assembly of whole tensors from a session's buckets, for engines whose loaders take one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from asyncrl.param_sync.buckets import Bucket, check_checksum, part_hashes
from asyncrl.param_sync.digest import combine_hashes, hash_tensor, tensor_hash
from asyncrl.param_sync.errors import BucketKey, SyncError
from asyncrl.param_sync.manifest import Manifest, Role, TensorSpec


class _Arriving(NamedTuple):
    spec: TensorSpec
    data: torch.Tensor  # uint8 [nbytes]


class TensorAssembler:
    """Takes buckets and yields completed tensors, each its own copy on the bucket's device. ::

        tensors = TensorAssembler(session, manifest)
        for bucket in reader.buckets(deadline_s):
            for spec, tensor in tensors.take(bucket): ...
        tensors.verify()
        tensors.digest("target")  # equal to the senders'

    Holds at most one tensor per sender.
    """

    def __init__(self, session: str, manifest: Manifest) -> None:
        self._session = session
        self._missing = {t.name: t for t in manifest.sent()}
        self._arriving: dict[str, _Arriving] = {}
        self._at: dict[str, int] = {}  # bytes so far
        self._next: dict[int, int] = {}  # sender → sequence of its next bucket
        self._hashes: dict[Role, dict[str, bytes]] = {"target": {}, "draft": {}}
        self.nbytes = 0

    def take(self, bucket: Bucket) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """Raises SyncError for a bucket of another session, out of sequence, with a wrong checksum, or with bytes that
        are not expected next."""
        key = BucketKey(bucket.session, bucket.sender, bucket.sequence)
        expected = self._next.get(bucket.sender, 0)
        if bucket.session != self._session or bucket.sequence != expected:
            raise _refused(key, f"bucket {expected} of session {self._session} comes next")
        on_device = isinstance(bucket.data, torch.Tensor)
        hashes = part_hashes(bucket) if on_device else None  # at once, and tensors in one part not again
        check_checksum(bucket, hashes)
        self._next[bucket.sender] = expected + 1
        data = bucket.data if isinstance(bucket.data, torch.Tensor) else np.frombuffer(bucket.data, np.uint8)
        device = data.device if isinstance(data, torch.Tensor) else torch.device("cpu")
        contents: Sequence[bytes | None] = hashes or [None] * len(bucket.parts)
        for (name, start, count, offset), content in zip(bucket.parts, contents, strict=True):
            arriving = self._arriving.get(name) or self._begin(key, name, device)
            at = self._at[name]
            if start != at or at + count > arriving.spec.nbytes or offset + count > len(data):
                raise _refused(
                    key, f"{name}: bytes {start} to {start + count}, {at} of {arriving.spec.nbytes} have arrived"
                )
            into, piece = arriving.data[at : at + count], data[offset : offset + count]
            if isinstance(piece, torch.Tensor):
                into.copy_(piece)
            else:
                into.numpy()[:] = piece
            self._at[name] = at + count
            self.nbytes += count
            if at + count == arriving.spec.nbytes:
                yield self._finish(name, content if start == 0 else None)

    def verify(self) -> None:
        """Raises SyncError unless every tensor of the manifest has arrived completely."""
        lacking = [*self._arriving, *self._missing]
        if lacking:
            some = ", ".join(lacking[:4]) + (" …" if len(lacking) > 4 else "")
            raise SyncError("verify", None, None, None, f"{len(lacking)} tensors have not arrived completely: {some}")

    def digest(self, role: Role) -> str:
        """Digest of the completed tensors, see `asyncrl.param_sync.digest`."""
        return combine_hashes(self._hashes[role])

    def hashes(self, role: Role) -> dict[str, bytes]:
        """Hash of each completed tensor."""
        return self._hashes[role]

    def _begin(self, key: BucketKey, name: str, device: torch.device) -> _Arriving:
        spec = self._missing.pop(name, None)
        if spec is None:
            raise _refused(key, f"{name} is not a tensor that the manifest sends, or it came a second time")
        self._arriving[name] = _Arriving(spec, torch.empty(spec.nbytes, dtype=torch.uint8, device=device))
        self._at[name] = 0
        return self._arriving[name]

    def _finish(self, name: str, content: bytes | None) -> tuple[TensorSpec, torch.Tensor]:
        """``content``: the tensor's `content_hash`, if it is known."""
        spec, data = self._arriving.pop(name)
        del self._at[name]
        tensor = data.view(getattr(torch, spec.dtype)).view(spec.shape)
        found = hash_tensor(spec, tensor) if content is None else tensor_hash(spec, content)
        self._hashes[spec.role][name] = found
        return spec, tensor


def _refused(key: BucketKey, message: str) -> SyncError:
    return SyncError("transfer", None, None, key, message)
