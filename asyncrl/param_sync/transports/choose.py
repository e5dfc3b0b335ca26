"""Chooses the transport between senders and replicas, and makes its two ends by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncrl.config.schema import Config
from asyncrl.param_sync.transports.base import TRANSPORTS, BucketReader, BucketWriter, Transport
from asyncrl.param_sync.transports.placement import Placements
from asyncrl.plugins.registry import UnknownPart

AUTO = "auto"


class Choice(NamedTuple):
    transport: str
    why: str


class TransportError(ValueError):
    """The configured transport cannot join these placements; the message says which can."""


def choose(wanted: str, senders: Placements, replicas: Placements) -> Choice:
    """``wanted``: a transport by name or import path, or ``auto`` for the fastest that fits. Raises TransportError if
    it does not fit and UnknownPart if there is none."""
    unfit = "finds no transport" if wanted == AUTO else TRANSPORTS.find(wanted).unfit(senders, replicas)
    if unfit is None:
        return Choice(wanted, "as configured")
    fitting = [
        Choice(name, transport.route(senders, replicas))
        for name, transport in _automatic()
        if transport.unfit(senders, replicas) is None
    ]
    if wanted == AUTO and fitting:
        return fitting[0]
    others = ", ".join(f"{name} ({route})" for name, route in fitting)
    raise TransportError(
        f"param_sync.transport: {wanted} {unfit}; found senders {_listed(senders)} and replicas {_listed(replicas)}. "
        f"Transports that fit: {others or 'none'}"
    )


def problems(config: Config) -> Iterator[str]:
    """Problems of ``param_sync.transport`` that are known before anything is placed, one line each."""
    wanted = config.param_sync.transport
    try:
        if wanted == AUTO:
            _automatic()
        else:
            yield from TRANSPORTS.find(wanted).problems(config)
    except UnknownPart as e:
        yield str(e).replace(": expected one of ", f": expected {AUTO}, one of ", 1)


def across_machines(wanted: str) -> bool:
    """True if the named transport joins pools on different machines; False for ``auto``, which takes any that fits."""
    return wanted != AUTO and TRANSPORTS.find(wanted).across_machines


def bucket_sizes(config: Config) -> list[int]:
    """Bucket sizes, in bytes, that a run of this configuration may have: one if it is set, otherwise those of the
    transports that may be taken."""
    wanted = config.param_sync.transport
    if config.param_sync.bucket_bytes:
        return [config.param_sync.bucket_bytes]
    if wanted != AUTO:
        return [TRANSPORTS.find(wanted).bucket_bytes]
    possible = (transport for _, transport in _automatic() if not any(transport.problems(config)))
    return sorted({transport.bucket_bytes for transport in possible})


def make_writer(name: str, sender: int, bucket_bytes: int, host: str) -> BucketWriter:
    """The sending end of rank ``sender``. ``bucket_bytes`` 0: the transport's own size. ``host``: its machine's address
    on the replicas' network."""
    transport = TRANSPORTS.find(name)
    writer = transport.writer(sender, bucket_bytes or transport.bucket_bytes, host)
    return TRANSPORTS.checked(writer, BucketWriter, name)


def make_reader(name: str, replica: str) -> BucketReader:
    """The receiving end of ``replica``."""
    return TRANSPORTS.checked(TRANSPORTS.find(name).reader(replica), BucketReader, name)


def _automatic() -> list[tuple[str, Transport]]:
    """The transports that ``auto`` may take, in order of preference."""
    found = [(name, TRANSPORTS.find(name)) for name in TRANSPORTS.names()]
    ordered = [(transport.auto_order, name, transport) for name, transport in found if transport.auto_order is not None]
    return [(name, transport) for _, name, transport in sorted(ordered, key=lambda item: item[:2])]


def _listed(placements: Placements) -> str:
    return ", ".join(map(str, placements))
