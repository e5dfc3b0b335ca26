"""What a transport is: buffers that a sender fills and publishes, and receivers that read and acknowledge them.

One `BucketWriter` per sending rank and one `BucketReader` per replica live as long as their processes; a session opens
them, uses them once and leaves them ready for the next one. Both are blocking objects of one thread each; only
``abort`` may be called from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from asyncrl.param_sync.buckets import Filled
from asyncrl.param_sync.receiver import Bucket, Placing

#: where a writer is reached: a small picklable value that only its own transport reads
Address = Any


class NoReaders(Exception):
    """Every reader of the session is gone; `BucketWriter.dropped` says why. No error for the writer's owner, which goes
    on without sending."""


class BucketWriter(Protocol):
    """The sending end. A reader that dies is dropped at once, one that is silent after ``stall_s``; the others go on.

    Calls of a session: ``open``, then ``buffer`` and ``publish`` in turn, then ``finish``. The first three raise
    NoReaders when nobody is left.
    """

    @property
    def address(self) -> Address: ...

    @property
    def loose_from(self) -> int | None:
        """Parts of so many bytes and more are sent from where they lie (None: none), which must not be written to
        before `finish` returns: see `asyncrl.param_sync.buckets.pack`."""
        ...

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        """Welcome these readers, which have called `BucketReader.connect`, and no others. ``keep``: readers would like
        all buckets to stay readable until the next session; a transport that can do it marks them as ``kept``, and
        waits for no reader then."""

    def buffer(self) -> torch.Tensor:
        """A free buffer, uint8 [bucket_bytes]: waits until everyone has read what it held."""
        ...

    def publish(self, filled: Filled) -> None:
        """Let the readers have the buffer that `buffer` gave last."""

    def finish(self) -> None:
        """Wait until everyone has read everything, then tell them that it was all."""

    def abort(self, session: str) -> None:
        """End the session if it is the open one: its readers are dropped, a wait in progress ends. From any thread."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Readers that the session lost, and why."""
        ...

    @property
    def ceiling(self) -> float | None:
        """Bytes per second that the bare link was measured to carry; None if it was not."""
        ...

    def close(self) -> None: ...


class BucketReader(Protocol):
    """The receiving end: reads one session's buckets from any number of senders."""

    def connect(self, session: str, addresses: Sequence[Address], deadline_s: float) -> None:
        """Join a session at all its senders; one that was joined before is left. Needs no sender to be at work."""

    def buckets(self, deadline_s: float, place: Placing | None = None) -> Iterator[Bucket]:
        """Every bucket of the session, each sender's in order. A bucket is acknowledged when the next one is asked for,
        and its memory is gone then. Large parts may come to where ``place`` says; when this is over, however it ends,
        nobody writes there any more. Raises SyncError if a sender goes, or at the deadline; may be read once."""
        ...

    def abort(self) -> None:
        """Leave the session: `buckets` ends with an error. From any thread."""

    def close(self) -> None: ...
