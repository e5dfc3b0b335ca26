"""Delivery of weights to SGLang's server over a process group: one broadcast per parcel.

For replicas whose two ends share no memory: GPUs without peer access, containers without shared memory. Uses SGLang's
distributed update: this process is rank 0, the server's workers are the other ranks. The group forms in the first
session and lasts until a call in it fails; its connections are then closed, so that no member waits, and the next
session forms a new one. The server is asked to receive only once a parcel is here.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import torch
import torch.distributed as dist

from asyncrl.param_sync.transports import gloo, nccl
from asyncrl.param_sync.transports.broadcast import BroadcastChannel, GroupRendezvous
from asyncrl.param_sync.transports.process_group import host_store
from asyncrl.rollouter.engines.base import EngineDied, EngineError
from asyncrl.rollouter.engines.sglang.client import Client, ServerRefusal
from asyncrl.rollouter.engines.sglang.delivery import CAPACITY_BYTES, Parcel

Backend = Literal["gloo", "nccl"]

_HOST = "127.0.0.1"  # the server is a child of this process
_CALL_S = 120.0  # timeout of one broadcast
_LAST_WORDS_S = 5.0  # for the server to say why a broadcast failed


class ByGroup:
    """Implements `asyncrl.rollouter.engines.sglang.delivery.Delivery`. With ``backend`` nccl this process needs its own
    GPU: NCCL refuses two members on one."""

    def __init__(self, client: Client, backend: Backend, workers: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._client, self._backend, self._workers = client, backend, workers
        self._device = "cuda" if backend == "nccl" else "cpu"  # over gloo, SGLang's members copy to their GPUs
        self.parcels = Parcel(self._device, capacity_bytes), Parcel(self._device, capacity_bytes)
        self._name = ""  # of the group, or of the last one
        self._channel: BroadcastChannel | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._store: dist.TCPStore | None = None
        self._delivering = False

    async def open(self, deadline_s: float) -> None:
        """Form the group if there is none. Raises EngineDied if the workers do not join: they are then stuck waiting
        for it."""
        if self._channel is not None:
            return
        try:
            async with asyncio.timeout(deadline_s):
                await self._form()
        except TimeoutError:
            raise EngineDied(
                f"SGLang's workers did not join a {self._backend} group within {deadline_s:g} s; restart the replica"
            ) from None

    async def deliver(self, parcel: Parcel, selector: str) -> None:
        channel, thread = self._channel, self._thread
        if channel is None or thread is None:
            raise EngineError("no group with SGLang's workers: call `open` first")
        flat = parcel.flat()
        posted = asyncio.ensure_future(
            self._client.post(
                "/update_weights_from_distributed",
                names=[place.name for place in parcel.places],
                dtypes=[str(place.dtype).removeprefix("torch.") for place in parcel.places],
                shapes=[list(place.shape) for place in parcel.places],
                group_name=self._name,
                load_format="flattened_bucket",
                flush_cache=False,  # the session flushes if param_sync.kv asks for it
                selector=selector,
            )
        )
        sent = asyncio.get_running_loop().run_in_executor(thread, lambda: channel.receive(flat).wait())
        sent.add_done_callback(_retrieved)
        self._delivering = True
        try:
            await asyncio.wait([posted, sent], return_when=asyncio.FIRST_EXCEPTION)
            if not posted.done():  # SGLang's own error says more
                self.abort()
                await asyncio.wait([posted], timeout=_LAST_WORDS_S)
            if posted.done():
                posted.result()
            sent.result()
            self._delivering = False
        finally:
            self.abort()
            if not posted.done():
                posted.cancel()

    def abort(self) -> None:
        """Close the group's connections if a delivery is in progress."""
        channel, thread = self._channel, self._thread
        if not self._delivering or channel is None or thread is None:
            return
        self._delivering, self._channel, self._thread, self._store = False, None, None, None
        # It may block, and this is an event loop.
        threading.Thread(target=channel.end_calls, daemon=True).start()
        # The thread destroys the channel once its calls have ended: the destructor waits for them.
        thread.submit([channel].clear)
        thread.shutdown(wait=False)

    async def _form(self) -> None:
        if self._name:
            with contextlib.suppress(ServerRefusal):  # it has no group of this name
                await self._client.post("/destroy_weights_update_group", group_name=self._name)
        self._name = f"asyncrl-{uuid.uuid4().hex}"
        self._store = host_store(_HOST)
        size = 1 + self._workers
        keys, port = _keys(self._name, self._device), self._store.port
        rendezvous = GroupRendezvous(keys, 0, size, _HOST, port, _CALL_S, chained=False)
        thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-group")
        loop, device = asyncio.get_running_loop(), torch.device(self._device)
        transport = nccl.TRANSPORT if self._backend == "nccl" else gloo.TRANSPORT
        joined = loop.run_in_executor(thread, transport.open_channel, rendezvous, _HOST, device)
        joined.add_done_callback(_retrieved)
        try:
            await self._client.post(
                "/init_weights_update_group",
                master_address=_HOST,
                master_port=self._store.port,
                rank_offset=1,
                world_size=size,
                group_name=self._name,
                backend=self._backend,
            )
            self._channel, self._thread = await joined, thread
        finally:
            if self._thread is not thread:
                self._store = None  # fails members that wait on it
                thread.shutdown(wait=False)


def _keys(group_name: str, device: str) -> str:
    """Key prefix under which torch, as SGLang calls it, runs the group's rendezvous in the store."""
    return f"{group_name}/{group_name}//{device}/"


def _retrieved(future: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()
