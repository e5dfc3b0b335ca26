"""The receiving end of a sync session inside each engine worker: the seam that every engine implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from asyncrl.param_sync.manifest import Manifest
from asyncrl.sample import PolicyVersion


class TensorPart(NamedTuple):
    """A piece of a tensor inside a bucket: ``nbytes`` at ``offset`` of the bucket are the tensor's bytes from
    ``start`` on (a whole tensor has start 0 and nbytes of its spec)."""

    name: str
    start: int
    nbytes: int
    offset: int


class Bucket(NamedTuple):
    """One flat buffer of many tensors. ``data`` is only valid until `Receiver.take` returns: the buffer is used again,
    unless it is ``kept`` until the next session. It is uint8 [n]: a memoryview on the host, a tensor on a device.

    The key (session, sender, sequence) is unique; ``checksum`` is that of its parts (`buckets`), or None when off.
    ``placed``: bytes, uint8 [nbytes], of tensors whose part is not in ``data``: it came to where `Receiver.place` said.
    """

    session: str
    sender: int
    sequence: int
    parts: tuple[TensorPart, ...]
    data: memoryview | torch.Tensor
    checksum: int | None
    kept: bool = False
    placed: Mapping[str, Any] = {}


#: `Receiver.place`, of the one receiver there is
Placing = Callable[[str, TensorPart, torch.device], torch.Tensor | None]


class Receiver(Protocol):
    """One per engine worker; all workers of a tensor-parallel replica read the same bucket.

    Called in this order, from one thread: ``open`` once, ``take`` per bucket, ``verify``, ``commit``; ``abort`` at any
    point instead. ``open`` runs while generation goes on and touches nothing; ``take`` and ``place`` run
    under pause.
    """

    @property
    def needs_base(self) -> bool:
        """Whether the next manifest must send all of the target, and not an adapter alone."""
        ...

    def open(self, session: str, manifest: Manifest) -> None:
        """Check every name, shape and dtype against the live parameters. Raises ManifestError naming both sides."""

    def place(self, session: str, part: TensorPart, device: torch.device) -> torch.Tensor | None:
        """Where this part belongs, uint8 [nbytes] on ``device``: it arrives there before its bucket is taken, so from
        now on the weights are of no version. None if it cannot, and comes in the bucket."""

    def take(self, bucket: Bucket) -> None:
        """Copy the bucket's tensors to where they belong, but for those that are there."""

    def verify(self) -> None:
        """All of the manifest has arrived, whole. Raises SyncError naming what is missing."""

    def commit(self, version: PolicyVersion) -> None:
        """The new weights are the live ones, target and draft alike."""

    def abort(self) -> None:
        """Forget the session. Whether the live weights are still whole is for `intact` to say."""

    def intact(self) -> bool:
        """Whether the live weights are those of one version (False after an abort amid staging ``bucket``)."""
