"""Weight receiver of a vLLM replica, in the replica's process: directs vLLM's workers, which read the buckets."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.lora.adapters import ModuleShapes
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.manifest import ROLES, AdapterSpec, ManifestError, Role
from asyncrl.param_sync.session_protocol import ReceivePlan
from asyncrl.rollouter.engines.remote_receiver import RemoteReceiver
from asyncrl.types.versions import PolicyVersion

THE_SLOT = 1  # slot of the adapter if a replica holds only one


class WorkerReceiver(RemoteReceiver):
    """Implements `asyncrl.param_sync.weight_receiver.WeightReceiver` over vLLM's weight-transfer interface. Does not
    offer staging ``full``: a worker cannot generate while it receives.

    ``modules``: those that an adapter may target, None without LoRA. The workers collect an adapter and at the commit
    replace the last one with it or, with ``slots``, put it beside those that still have requests."""

    title = "vLLM"

    def __init__(
        self,
        llm: AsyncLLM,
        name: str,
        transport: str,
        modules: ModuleShapes | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:
        super().__init__(name, modules, slots)
        self._llm, self._transport = llm, transport
        self._workers = llm.vllm_config.parallel_config.world_size_across_dp
        self._attached = False
        self._has_draft = self._draft_takes_base = False
        self._digests: dict[Role, str] = {}

    def needs_base(self) -> bool:
        return super().needs_base() or self._draft_takes_base

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        self._check(plan)
        if not self._attached:
            init = {"name": self._name, "transport": self._transport, "workers": self._workers}
            await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init))
            self._has_draft = (await self.ask("attach"))[0]["draft"]
            self._attached = True
        opened = await self.ask("open", plan)
        if nowhere := set.intersection(*(set(elsewhere) for _, elsewhere, _ in opened)):
            some = ", ".join(sorted(nowhere)[:4])
            raise ManifestError(f"{some}: sent, but unknown to every pipeline stage of the replica")
        self._manifest = plan.manifest
        self._draft_takes_base |= any(takes_base for _, _, takes_base in opened)
        return [reader for reader, _, _ in opened]

    async def receive(self, deadline_s: float) -> int:
        if self._manifest.sends_base:
            self._intact = self._has_base = False
            await self._update(self._llm.start_weight_update, deadline_s)
        else:
            await self.ask("receive", deadline_s)
        if self._has_draft and self._manifest.sends_draft:
            self._intact = False
            await self._update(self._llm.start_draft_weight_update, deadline_s)
        return (await self.ask("received_bytes"))[0]

    async def verify(self) -> None:
        """Check that every worker received all tensors and, as far as fingerprints show, holds them in its live
        parameters."""
        answers = await self.ask("verify")
        self._digests = answers[0][0]
        if any(digests != self._digests for digests, _ in answers):
            raise SyncError("verify", self._name, None, None, f"vLLM's workers received different weights: {answers}")
        for role in ROLES:
            votes = [stale for _, said in answers if (stale := said.get(role)) is not None]
            if votes and all(votes):
                message = f"new weights were sent for the {role}, but vLLM's did not change"
                raise SyncError("verify", self._name, None, None, message)

    async def digest(self, role: Role) -> str:
        return self._digests[role]

    async def abort(self) -> None:
        if self._attached:
            async with self._ending():
                await self.ask("abandon")

    async def close(self) -> None:
        if self._attached:
            await self.abort()
            await self._llm.shutdown_weight_transfer_engine()

    async def ask(self, command: str, *arguments: Any) -> list[Any]:
        """Run a command on every worker. Returns their answers in order, or raises the error of the first one that
        failed. vLLM's own collective_rpc also reaches the workers of all copies of the model, but returns only the
        first copy's answers."""
        call = ("asyncrl", None, (command, pickle.dumps(arguments)), None)
        copies = await self._llm.engine_core.call_utility_all_async("collective_rpc", *call)  # type: ignore[attr-defined]
        results = [pickle.loads(answer) for answers in copies for answer in answers]
        for outcome, result in results:
            if outcome == "failed":
                raise result
        return [result for _, result in results]

    async def _adopt(self, adapter: AdapterSpec, version: PolicyVersion) -> None:
        slot = self._slots.publish(version) if self._slots is not None else THE_SLOT
        keep = self._slots.free_idle() if self._slots is not None else []
        passed_over = await self.ask("adopt", adapter, slot, keep)
        if nowhere := set.intersection(*map(set, passed_over)):  # a pipeline stage has only its own layers
            some = ", ".join(sorted(nowhere)[:4])
            raise SyncError("commit", self._name, version, None, f"vLLM does not adapt {some}: unused weights")

    async def _name_version(self, version: PolicyVersion) -> str | None:
        await self._llm.update_weight_version(str(version))
        return await self._llm.get_weight_version()

    async def _update(self, start: Callable[[], Awaitable[None]], deadline_s: float) -> None:
        await start()
        try:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"deadline_s": deadline_s}))
        except Exception:
            await self.ask("failure")  # raises the worker's own error: vLLM passes on only its text
            raise
        await self._llm.finish_weight_update()
