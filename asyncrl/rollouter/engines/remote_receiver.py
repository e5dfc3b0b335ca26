"""Base class of weight receivers that forward weights to the engine's own processes."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.lora.adapters import ModuleShapes, check_lora
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, Role
from asyncrl.param_sync.session_protocol import ReceivePlan
from asyncrl.rollouter.engines.base import EngineDied
from asyncrl.types.versions import PolicyVersion

_ENDING_S = 30.0  # for the engine to end an abandoned update


class RemoteReceiver(ABC):
    """Implements `commit` of `asyncrl.param_sync.weight_receiver.WeightReceiver`, and with it the rule for when the
    live weights are those of a version; the abstract methods implement the rest. Does not offer staging ``full``: the
    engine keeps no copy of the weights.

    ``modules``: those that an adapter may target, None without LoRA. ``slots``: of the adapters that the engine holds
    at once, None if a new one replaces the last."""

    title: str  # the engine's name in messages

    def __init__(self, name: str, modules: ModuleShapes | None, slots: AdapterSlots | None) -> None:
        self._name, self._modules, self._slots = name, modules, slots
        self._manifest = Manifest(())  # the session's
        self._has_base = False
        self._intact = True
        self.committed: PolicyVersion | None = None
        self.adapter: AdapterSpec | None = None  # the one that requests run with

    # -- to be implemented by an engine --------------------------------------------------------------------------------
    # `open` sets `_manifest`; `receive` clears `_intact` before it changes live weights, and `_has_base` before it
    # changes the base.

    @abstractmethod
    async def open(self, plan: ReceivePlan) -> Sequence[str]: ...

    @abstractmethod
    async def receive(self, deadline_s: float) -> int: ...

    @abstractmethod
    async def verify(self) -> None: ...

    @abstractmethod
    async def digest(self, role: Role) -> str:
        """Digest of the role's tensors as they arrived in the last session."""

    @abstractmethod
    async def abort(self) -> None:
        """Also raises EngineDied if the engine does not end its update, see `_ending`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    async def _adopt(self, adapter: AdapterSpec, version: PolicyVersion) -> None:
        """Make new requests run with the adapter that was received."""

    @abstractmethod
    async def _name_version(self, version: PolicyVersion) -> str | None:
        """Set the version of the live weights. Returns the one that the engine then reports."""

    # -- WeightReceiver ------------------------------------------------------------------------------------------------

    def needs_base(self) -> bool:
        return not self._has_base

    def intact(self) -> bool:
        return self._intact

    async def load(self) -> None:
        raise self._no_copy("load")

    async def commit(self, version: PolicyVersion) -> None:
        adapter = self._manifest.adapter
        if adapter is not None:
            self._intact = False
            await self._adopt(adapter, version)
        if (named := await self._name_version(version)) != str(version):
            message = f"{self.title}'s version was set to {version}, but it reports {named}"
            raise SyncError("commit", self._name, version, None, message)
        self.committed, self.adapter, self._intact = version, adapter, True
        self._has_base |= self._manifest.sends_base

    # -- for engines ---------------------------------------------------------------------------------------------------

    def _check(self, plan: ReceivePlan) -> None:
        """Raises SyncError for staging ``full``, and ManifestError for an adapter or a missing base, see
        `asyncrl.param_sync.lora.adapters.check_lora`."""
        if plan.staging != "bucket":
            raise self._no_copy("plan")
        check_lora(plan.manifest, self._modules, self.needs_base())

    @contextlib.asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """Deadline of the calls that end an abandoned update. Raises EngineDied after it: only a restart helps then."""
        try:
            async with asyncio.timeout(_ENDING_S):
                yield
        except TimeoutError:
            raise EngineDied(
                f"{self.title} did not end an abandoned update within {_ENDING_S:g} s; restart the replica"
            ) from None

    def _no_copy(self, phase: str) -> SyncError:
        message = f"{self.title} keeps no copy of the weights; expected staging bucket"
        return SyncError(phase, self._name, None, None, message)
