"""Sender of a sync session, in a trainer rank's process and thread.

::

    sender = Sender("trainer/0", writer)  # once per run; writer None for a rank that exports nothing
    sender.open(plan)
    report = sender.send(backend.export())
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.param_sync.buckets import pack
from asyncrl.param_sync.digest import dtype_name, hashes_by_role
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.session_protocol import Address, SendPlan, SendReport
from asyncrl.param_sync.transports.base import BucketWriter, NoReaders


class Sender:
    """Sends the tensors of an export. ``abort`` may be called from any thread, everything else from the rank's own."""

    def __init__(self, name: str, writer: BucketWriter | None) -> None:
        self._name, self._writer = name, writer
        self._plan: SendPlan | None = None

    @property
    def address(self) -> Address | None:
        """Address for the readers; None for a rank that sends nothing."""
        return None if self._writer is None else self._writer.address

    def open(self, plan: SendPlan) -> None:
        """Join a session: admit its readers."""
        self._plan = plan
        if self._writer is not None:
            with contextlib.suppress(NoReaders):  # `send` must still drive the export
                self._writer.open(plan.session, plan.readers, plan.deadline_s, plan.stall_s, plan.keep)

    def send(self, export: Iterator[tuple[str, torch.Tensor]]) -> SendReport:
        """Send all of ``export``. Always runs it to its end, because other ranks may wait in its collectives.

        Failed readers are dropped and reported. Raises SyncError if the export does not match the manifest, and any
        exception of the export itself."""
        plan, nbytes = self._plan, 0
        if plan is None:
            raise RuntimeError(f"{self._name}: expected open(plan) before each send(), found none")
        self._plan = None
        export = iter(export)
        try:
            if self._writer is None:
                return SendReport()
            contents: dict[str, bytes] = {}
            try:
                tensors, writer = self._checked(export, plan), self._writer
                for filled in pack(tensors, writer.buffer, plan.checksum, contents.__setitem__, writer.zero_copy_from):
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
        return SendReport(nbytes, hashes, dropped, self._writer.ceiling)

    def abort(self, session: str) -> None:
        """Abort a session: its readers are dropped, and `send` finishes without them."""
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
                problem = "which its manifest does not send or sends only once"
            elif tensor.shape != spec.shape or dtype_name(tensor) != spec.dtype:
                problem = f"where its manifest says {spec.dtype}{list(spec.shape)}"
            else:
                yield name, tensor
                continue
            found = f"{dtype_name(tensor)}{list(tensor.shape)}"
            raise SyncError("transfer", self._name, plan.version, None, f"export gave {name} as {found}, {problem}")
