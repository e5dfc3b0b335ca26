"""The sending half of a sync session, in a trainer rank's process and thread.

::

    sender = Sender("trainer/0", SharedMemoryWriter(0, bucket_bytes))  # once per run; a rank that yields nothing: None
    sender.open(plan)
    report = sender.send(backend.export())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.digest import ROLES, combine_hashes, dtype_name, hashes_by_role
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import Manifest, Role
from asyncrl.param_sync.transports.base import Address, BucketWriter, NoReaders
from asyncrl.sample import PolicyVersion
from asyncrl.telemetry.recorder import now_s


@dataclass(frozen=True)
class SendPlan:
    """What a sender is told of a session. ``readers`` are those that have connected, by name; one that is silent for
    ``stall_s`` is dropped, so that the others still make the ``deadline_s`` of the whole transfer. ``keep``: readers
    come back to the buckets later (staging ``full``)."""

    session: str
    version: PolicyVersion
    manifest: Manifest
    readers: tuple[str, ...]
    deadline_s: float
    stall_s: float
    checksum: bool
    keep: bool = False


@dataclass(frozen=True)
class SendReport:
    """What one sender sent. ``hashes``: of each of its tensors by role and name, joined over all senders they give the
    digests. ``dropped``: readers that it lost, and why. Without any reader left nothing is hashed. ``ceiling``: bytes
    per second of the bare link, if its transport has measured it."""

    nbytes: int = 0
    seconds: float = 0.0
    hashes: dict[Role, dict[str, bytes]] = field(default_factory=lambda: {role: {} for role in ROLES})
    dropped: dict[str, str] = field(default_factory=dict)
    ceiling: float | None = None

    @property
    def digests(self) -> dict[Role, str]:
        return {role: combine_hashes(self.hashes[role]) for role in ROLES}


class Sender:
    """Sends what an export yields. ``abort`` may be called from any thread, the rest from the rank's own."""

    def __init__(self, name: str, writer: BucketWriter | None) -> None:
        self._name, self._writer = name, writer
        self._plan: SendPlan | None = None

    @property
    def address(self) -> Address | None:
        """Where readers connect; None for a rank that sends nothing."""
        return None if self._writer is None else self._writer.address

    def open(self, plan: SendPlan) -> None:
        """Join a session: welcome its readers."""
        self._plan = plan
        if self._writer is not None:
            with contextlib.suppress(NoReaders):  # `send` still has to drive the export
                self._writer.open(plan.session, plan.readers, plan.deadline_s, plan.stall_s, plan.keep)

    def send(self, export: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        """Send all of ``export``, which is driven to its end whatever happens: other ranks may wait in its collectives.

        Readers that fail are dropped and reported. Raises SyncError if the export does not keep to the manifest, and
        what the export itself raises."""
        plan, started_s, nbytes = self._plan, now_s(), 0
        if plan is None:
            raise RuntimeError(f"{self._name}: send() without an open plan; call open(plan) first, once per send")
        self._plan = None
        export = iter(export)
        try:
            if self._writer is None:
                return SendReport()
            contents: dict[str, bytes] = {}
            try:
                tensors, writer = self._checked(export, plan), self._writer
                for filled in pack(tensors, writer.buffer, plan.checksum, contents.__setitem__, writer.loose_from):
                    writer.publish(filled)
                    nbytes += sum(part.nbytes for part in filled.parts)
                writer.finish()
            except NoReaders:
                pass  # the report names them all
            except BaseException:
                self._writer.abort(plan.session)
                raise
        finally:
            for _ in export:
                pass
        hashes, dropped = hashes_by_role(plan.manifest, contents), dict(self._writer.dropped)
        return SendReport(nbytes, now_s() - started_s, hashes, dropped, self._writer.ceiling)

    def abort(self, session: str) -> None:
        """End a session that others gave up: its readers are dropped, `send` comes to its end without them."""
        if self._writer is not None:
            self._writer.abort(session)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _checked(self, export: Iterator[tuple[str, torch.Tensor]], plan: SendPlan) -> Iterator[tuple[str, Any]]:
        specs = {t.name: t for t in plan.manifest.sent()}
        for name, tensor in export:
            spec = specs.pop(name, None)
            if spec is None:
                problem = "which its manifest does not send, or not again"
            elif tensor.shape != spec.shape or dtype_name(tensor) != spec.dtype:
                problem = f"where its manifest says {spec.dtype}{list(spec.shape)}"
            else:
                yield name, tensor
                continue
            found = f"{dtype_name(tensor)}{list(tensor.shape)}"
            raise SyncError("transfer", self._name, plan.version, None, f"export gave {name} as {found}, {problem}")
