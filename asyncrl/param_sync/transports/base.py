"""Transport interface: carries buckets from senders to replicas.

A transport is a module in this folder, an entry point or an import path with an object `TRANSPORT`. It makes one
`BucketWriter` per sending rank and one `BucketReader` per replica. Both live as long as their processes: a session
opens them, uses them and leaves them ready for the next one. They block, and belong to one thread each; only ``abort``
may be called from another. Every transport must pass `tests/test_param_sync_contract.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from asyncrl.config.schema import Config
from asyncrl.param_sync.buckets import Bucket, DestinationOf, Filled
from asyncrl.param_sync.session_protocol import Address
from asyncrl.param_sync.transports.placement import Placements
from asyncrl.plugins.registry import Registry

MIB = 1024 * 1024


class NoReaders(Exception):
    """The session has lost every reader; `BucketWriter.dropped` has the reasons. Not an error for the writer's owner,
    which continues without sending."""


class BucketWriter(Protocol):
    """The sending end. A reader that dies is dropped at once, a silent one after ``stall_s``; the others continue.

    Calls of a session: ``open``, then ``buffer`` and ``publish`` in turn, then ``finish``. The first three raise
    NoReaders when no reader is left.
    """

    @property
    def address(self) -> Address: ...

    @property
    def zero_copy_from(self) -> int | None:
        """Minimum bytes of parts that are sent from the tensor's own memory (None: none are), which must not change
        before `finish` returns, see `asyncrl.param_sync.buckets.pack`."""
        ...

    def open(self, session: str, readers: Sequence[str], deadline_s: float, stall_s: float, keep: bool = False) -> None:
        """Admit these readers, which have called `BucketReader.connect`, and no others. ``keep``: readers need all
        buckets readable until the next session; a transport that can do so marks them ``kept`` and does not wait for
        readers."""

    def buffer(self) -> torch.Tensor:
        """A free buffer, uint8 [bucket_bytes]. Waits until every reader has read its last contents."""
        ...

    def publish(self, filled: Filled) -> None:
        """Send the buffer that `buffer` returned last."""

    def finish(self) -> None:
        """Wait until every reader has read everything, then send the end of the session."""

    def abort(self, session: str) -> None:
        """End the session if it is the open one: drops its readers and ends a wait in progress. May be called from any
        thread."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """Readers that the session lost, with the reason."""
        ...

    @property
    def ceiling(self) -> float | None:
        """Measured speed of the bare link in bytes per second; None if it was not measured."""
        ...

    def close(self) -> None: ...


class BucketReader(Protocol):
    """The receiving end: reads one session's buckets from any number of senders."""

    def connect(self, session: str, addresses: Sequence[Address], deadline_s: float) -> None:
        """Join a session at all its senders and leave any earlier one. The senders need not have opened it yet. Raises
        SyncError of phase plan if a sender has ended."""

    def buckets(self, deadline_s: float, destination: DestinationOf | None = None) -> Iterator[Bucket]:
        """All buckets of the session, each sender's in order. Requesting the next bucket acknowledges this one and
        frees its memory. Large parts may arrive directly at their ``destination``; once the iterator has ended, even by
        an exception, nothing writes there any more. Raises SyncError if a sender disconnects, at the deadline, or if
        the receiver kept a view of a bucket. Can be iterated once."""
        ...

    def abort(self) -> None:
        """Leave the session: `buckets` raises SyncError. May be called from any thread."""

    def close(self) -> None: ...


class Transport(Protocol):
    """One kind of transport: its limits, and its two ends. Subclasses inherit the defaults below."""

    bucket_bytes: int = 4 * MIB
    """Bucket size if ``param_sync.bucket_bytes`` sets none."""

    across_machines: bool = False
    """True if it joins pools on different machines, so that the rollout pool may be placed away from the trainers."""

    auto_order: int | None = None
    """``param_sync.transport: auto`` takes the lowest that fits; None: only used if named."""

    def unfit(self, senders: Placements, replicas: Placements) -> str | None:
        """None if it can join these placements, else its requirement: "needs all senders and replicas on …"."""
        return None

    def route(self, senders: Placements, replicas: Placements) -> str:
        """How the data travels between placements that fit, for the log."""
        return f"{len(senders)} senders, {len(replicas)} replicas"

    def problems(self, config: Config) -> Iterator[str]:
        """One line per option that rules this transport out, beginning with the option."""
        yield from ()

    @abstractmethod
    def writer(self, sender: int, bucket_bytes: int, host: str) -> BucketWriter:
        """The sending end of rank ``sender``. ``host``: its machine's address on the replicas' network."""
        ...

    @abstractmethod
    def reader(self, replica: str) -> BucketReader:
        """The receiving end of ``replica``."""
        ...


TRANSPORTS: Registry[Transport] = Registry(
    kind="transport",
    option="param_sync.transport",
    package="asyncrl.param_sync.transports",
    attribute="TRANSPORT",
    entry_points="asyncrl.transports",
    interface=Transport,
)
