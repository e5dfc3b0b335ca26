"""Weight receiver of an SGLang replica: reads buckets and hands them to the server.

The server writes tensors straight into its live weights and keeps no copy. SGLang's selector routes them to the target
or the draft. This process checks that everything arrived; the server's own checksums show that it is live.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from asyncrl.models.checkpoint import is_draft
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.lora.adapters import ModuleShapes
from asyncrl.param_sync.lora.slots import AdapterSlots
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, Role, TensorSpec, is_adapter
from asyncrl.param_sync.session_protocol import ReceivePlan
from asyncrl.param_sync.tensor_assembler import TensorAssembler
from asyncrl.param_sync.transports.base import BucketReader
from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.remote_receiver import RemoteReceiver
from asyncrl.rollouter.engines.sglang.checksums import SentChecksums, unmoved
from asyncrl.rollouter.engines.sglang.client import Client, ServerRefusal
from asyncrl.rollouter.engines.sglang.delivery import Delivery, Parcel, parcels
from asyncrl.rollouter.engines.sglang.lora import load_adapter, unload_adapter
from asyncrl.types.versions import PolicyVersion

T = TypeVar("T")


class _Seen(NamedTuple):
    """Verified state of a role: hashes of its tensors as they arrived, and the server's checksums of its parameters."""

    hashes: Mapping[str, bytes]
    live: Mapping[str, str]


class ServerReceiver(RemoteReceiver):
    """Implements `asyncrl.param_sync.weight_receiver.WeightReceiver`, without staging ``full``.

    ``delivery``: moves tensors into the server. ``shapes``: of the loaded checkpoint, by name. ``workers``: number of
    processes that load a shard each. ``draft``: whether the server speculates. ``sessions``: whether updates need a
    begin and an end call. ``quantized``: whether small changes may leave the live weights unchanged. ``modules``: those
    that an adapter may target, None without LoRA. An adapter is collected here and loaded at the commit, beside the
    adapters whose ``slots`` have requests."""

    title = "SGLang"

    def __init__(
        self,
        client: Client,
        name: str,
        reader: BucketReader,
        delivery: Delivery,
        *,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        device: str,
        workers: int,
        draft: bool,
        sessions: bool,
        quantized: bool = False,
        modules: ModuleShapes | None = None,
        slots: AdapterSlots | None = None,
    ) -> None:
        super().__init__(name, modules, slots)
        self._client, self._reader, self._delivery = client, reader, delivery
        self._shapes, self._dtype, self._device = shapes, dtype, device
        self._workers, self._draft, self._sessions = workers, draft, sessions
        self._quantized = quantized
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="param-sync")
        self._collected: dict[str, torch.Tensor] = {}  # tensors of the adapter so far
        self._adapters: set[int] = set()  # slots that the server holds
        self._tensors: TensorAssembler | None = None
        self._checksums: SentChecksums | None = None
        self._loaded: Collection[Role] = ()  # roles whose weights the session sends
        self._seen: dict[Role, _Seen] = {}  # verified last
        self._updating = False  # between the server's begin and end

    async def open(self, plan: ReceivePlan) -> Sequence[str]:
        self._check(plan)
        weights = replace(plan.manifest, tensors=tuple(t for t in plan.manifest if not is_adapter(t.name)))
        if clashes := list(_clashes(weights, self._shapes, self._dtype)):
            some = "; ".join(clashes[:4]) + (f" and {len(clashes) - 4} more" if len(clashes) > 4 else "")
            raise ManifestError(f"{self._name}: {some}")
        self._manifest, self._tensors = plan.manifest, TensorAssembler(plan.session, plan.manifest)
        self._loaded = {spec.role for spec in weights.sent()}
        comparable = self._device == "cpu" and self._workers == 1
        self._checksums = SentChecksums(weights.sent(), self._checksums) if comparable else None
        await self._delivery.open(plan.deadline_s)
        await self._in_thread(lambda: self._reader.connect(plan.session, plan.addresses, plan.deadline_s))
        return (self._name,)

    async def receive(self, deadline_s: float) -> int:
        assert self._tensors is not None
        if not self._intact:
            self._seen = {}
        if self._loaded:
            self._intact, self._has_base = False, self._has_base and not self._manifest.sends_base
            await self._begin_update()
        sent = {spec.name for spec in self._manifest.sent()}
        filled = parcels(self._arriving(deadline_s), self._delivery.parcels, sent)
        delivering: asyncio.Task[None] | None = None
        try:
            while (parcel := await self._in_thread(lambda: next(filled, None))) is not None:
                if delivering is not None:
                    await delivering
                delivering = asyncio.create_task(self._deliver(parcel))
            if delivering is not None:
                await delivering
        except BaseException:
            if delivering is not None:
                delivering.cancel()  # the server may never answer; `abort` detects that
            raise
        finally:
            # disconnect at once, so that the senders do not wait for this replica
            await self._in_thread(filled.close)  # type: ignore[attr-defined]
            if delivering is not None:
                await asyncio.gather(delivering, return_exceptions=True)
        await self._end_update()
        return self._tensors.nbytes

    async def verify(self) -> None:
        """Check that all tensors arrived, and that the server's checksums of its live parameters match them. Where the
        two cannot be compared, the checksums must have changed where the sent tensors did. A role whose tensors equal
        those verified last is skipped."""
        assert self._tensors is not None
        self._tensors.verify()
        roles: list[Role] = ["target", "draft"] if self._draft else ["target"]
        for role in roles:
            if role not in self._loaded:
                continue
            hashes = {name: h for name, h in self._tensors.hashes(role).items() if not is_adapter(name)}
            seen = self._seen.get(role)
            if seen is not None and seen.hashes == hashes:
                continue
            live = await self.live_checksums(role)
            problems = []
            if self._checksums is not None:
                problems = self._checksums.differences(role, live.values(), shared=role == "draft")
            elif seen is not None:
                changed = {name for name, h in hashes.items() if seen.hashes.get(name, h) != h}
                problems = [] if self._quantized else unmoved(changed, seen.live, live)
                if changed and seen.live == live:
                    problems = [f"new weights were sent for the {role}, but SGLang's did not change"]
            if problems:
                raise SyncError("verify", self._name, None, None, "; ".join(problems[:4]))
            self._seen[role] = _Seen(dict(hashes), live)

    async def digest(self, role: Role) -> str:
        if self._tensors is None:
            raise EngineError("digest: no sync session has sent weights yet")
        return self._tensors.digest(role)

    async def live_checksums(self, role: Role) -> dict[str, str]:
        """The server's own checksums, by its parameter names; with several workers, by ``worker: name``."""
        said = await self._client.post("/weights_checker", action="checksum", selector=role)
        ranks = said.get("ranks", [])
        if len(ranks) == 1:
            return dict(ranks[0]["checksums"])
        return {f"{i}: {name}": value for i, rank in enumerate(ranks) for name, value in rank["checksums"].items()}

    async def abort(self) -> None:
        self._reader.abort()
        self._delivery.abort()
        await self._in_thread(lambda: None)  # waits until the reading call has ended
        self._collected = {}
        async with self._ending():
            with contextlib.suppress(ServerRefusal):  # the update was abandoned before it began
                await self._end_update()

    async def close(self) -> None:
        self._reader.abort()
        self._thread.shutdown()
        self._reader.close()

    # -- within --------------------------------------------------------------------------------------------------------

    async def _adopt(self, adapter: AdapterSpec, version: PolicyVersion) -> None:
        assert self._slots is not None
        slot, kept = self._slots.publish(version), self._slots.free_idle()
        tensors, self._collected = self._collected, {}
        await load_adapter(self._client, adapter, slot, tensors, self._workers)
        self._adapters.add(slot)
        for idle in self._adapters.difference(kept):
            await unload_adapter(self._client, adapter, idle)
            self._adapters.remove(idle)

    async def _name_version(self, version: PolicyVersion) -> str | None:
        await self._client.post("/update_weight_version", new_version=str(version), abort_all_requests=False)
        return (await self._client.get("/model_info")).get("weight_version")

    async def _deliver(self, parcel: Parcel) -> None:
        if parcel.role == "draft" and not self._draft:
            return  # the server does not speculate
        # a draft may hold tensors of the target too, such as its embedding
        await self._delivery.deliver(parcel, "draft" if parcel.role == "draft" else "all")

    async def _begin_update(self) -> None:
        if not self._sessions:
            return
        self._updating = True
        try:
            await self._client.post("/begin_weight_update")
        except ServerRefusal:  # the last one was abandoned just as it began
            await self._client.post("/end_weight_update")
            await self._client.post("/begin_weight_update")

    async def _end_update(self) -> None:
        """Returns when the server has stopped writing: it handles calls in order."""
        if self._updating:
            self._updating = False
            await self._client.post("/end_weight_update")

    def _arriving(self, deadline_s: float) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        assert self._tensors is not None
        with contextlib.closing(self._reader.buckets(deadline_s)) as buckets:  # type: ignore[type-var]
            for bucket in buckets:
                for spec, tensor in self._tensors.take(bucket):
                    if is_adapter(spec.name):
                        self._collected[spec.name] = tensor.cpu()
                        continue
                    if self._checksums is not None:
                        self._checksums.add(spec, tensor)
                    yield spec, tensor

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _clashes(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Iterator[str]:
    """Differences between the manifest and the loaded checkpoint, one line each. Checked here because SGLang ignores
    unknown names."""
    for spec in manifest.sent():
        if spec.name not in shapes:
            yield f"{spec.name}: sent, but unknown to the replica"
        elif (spec.dtype, spec.shape) != (dtype, shapes[spec.name]):
            yield (
                f"{spec.name}: sent as {spec.dtype}{list(spec.shape)}, the replica holds "
                f"{dtype}{list(shapes[spec.name])}"
            )
    known = {spec.name for spec in manifest}
    roles = {spec.role for spec in manifest}
    for name in shapes:
        role = "draft" if is_draft(name) else "target"
        if name not in known and role in roles and not name.endswith("rotary_emb.inv_freq"):
            yield f"{name}: a parameter of the replica that is not sent"
