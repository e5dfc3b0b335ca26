"""A process group separate from the trainer's default one, driven by threads that can be abandoned.

Any call of a process group may block until its timeout, and the one that ends all others may block for ever, so each
generation of a group has its own threads for calls. When the generation is abandoned, they end by themselves, at the
latest when their calls time out. Once `Group.abort` has returned True, none of them writes to a tensor.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from asyncrl.param_sync.transports.broadcast import BroadcastChannel, CollectiveBackend, GroupRendezvous

log = logging.getLogger(__name__)

BUFFERS = 2  # filling one overlaps sending the other

_ENDING_S = 5.0  # for `end_calls` and all pending calls to end


class Group:
    """One generation of a group: rank 0 sends to all others. ``host``: this member's address on the data network.

    ``on_done(group, error)`` is called in a thread of the group after each `broadcast`, in order, and with the error
    that ended the group. It may still be called after `abort`, so compare the group with the current one."""

    def __init__(
        self,
        rendezvous: GroupRendezvous,
        host: str,
        backend: CollectiveBackend,
        device: torch.device,
        on_done: Callable[[Group, Exception | None], None],
    ) -> None:
        self.generation = rendezvous.generation
        self._device, self._on_done = device, on_done
        self._channel: BroadcastChannel | None = None
        self._requested: queue.SimpleQueue[Sequence[torch.Tensor] | None] = queue.SimpleQueue()
        self._receiving: queue.SimpleQueue[_Receiving | None] = queue.SimpleQueue()
        self._sending: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._changed = threading.Condition()  # guards the fields below
        self._aborted = self._failed = self._ending = self._ended = False
        self._receipts = 0  # posted and not yet ended
        # Calls are posted before earlier ones have ended, and waiting for a receive must not wait for a send, because
        # gloo does not fail a send whose connection was closed.
        threading.Thread(target=self._post_calls, args=(rendezvous, host, backend), daemon=True).start()
        threading.Thread(target=self._await_receipts, daemon=True).start()
        threading.Thread(target=self._await_sends, daemon=True).start()

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> None:
        """Send these flat byte tensors from rank 0, or receive into them on other ranks. On a device, earlier work on
        them must have finished."""
        self._requested.put(pieces)

    def abort(self) -> bool:
        """Abandon the group, also after an error; waits at most `_ENDING_S`. True if nothing writes to its tensors any
        more; after False, a later call may return True."""
        with self._changed:
            self._aborted = True
            self._requested.put(None)
            if (channel := self._channel) is None:
                return True
            if not self._ending:
                self._ending = True
                threading.Thread(target=self._end_calls, args=(channel,), daemon=True).start()
            quiet = lambda: not self._ending and (self._ended or not self._receipts)
            if not (over := self._changed.wait_for(quiet, _ENDING_S)):
                log.warning("param_sync: an aborted broadcast did not end within %g s; leaving its threads", _ENDING_S)
            return over

    def _end_calls(self, channel: BroadcastChannel) -> None:
        ended = False
        try:
            ended = channel.end_calls()
        finally:
            with self._changed:
                self._ending, self._ended = False, ended
                self._changed.notify_all()

    def _post_calls(self, rendezvous: GroupRendezvous, host: str, backend: CollectiveBackend) -> None:
        try:
            self._channel = backend.open_channel(rendezvous, host, self._device)
            with _own_stream(self._device):
                while (pieces := self._requested.get()) is not None:
                    self._post(self._channel, pieces)
                    del pieces  # belong to others: hold none longer than needed
        except _Aborted:
            pass
        except Exception as error:
            self._fail(error)
        finally:
            self._receiving.put(None)

    def _post(self, channel: BroadcastChannel, pieces: Sequence[torch.Tensor]) -> None:
        parts = [part for piece in pieces for part in channel.split(piece)]
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            if channel.begins_with_sends:
                self._sending.put(_Sending(channel.send(part), last))
                continue
            with self._receipt():
                self._receiving.put(_Receiving(channel, channel.receive(part), part, last))

    def _await_receipts(self) -> None:
        with _own_stream(self._device) as stream:
            while (receiving := self._receiving.get()) is not None:
                channel, work, part, last = receiving
                sends = None
                try:
                    work.wait()
                    if stream is not None:
                        stream.synchronize()
                    sends = channel.send(part)
                except Exception as error:
                    self._fail(error)
                # Before the bucket is lent: views of it are counted then, and again when it is given back.
                del channel, work, part, receiving
                if sends is not None:
                    self._sending.put(_Sending(sends, last))
                self._end_receipt()
        self._sending.put(None)

    def _await_sends(self) -> None:
        while (sending := self._sending.get()) is not None:
            try:
                for work in sending.works:
                    work.wait()
                    del work
            except Exception as error:
                self._fail(error)
            else:
                if sending.last and not self._failed:
                    self._on_done(self, None)
            del sending
        # Destroyed here, with no call pending: its destructor waits for calls while it holds the GIL.
        self._channel = None

    @contextlib.contextmanager
    def _receipt(self) -> Iterator[None]:
        """Count a receive as posted until `_end_receipt`, unless posting it raises."""
        with self._changed:
            if self._aborted:
                raise _Aborted
            self._receipts += 1
        try:
            yield
        except BaseException:
            self._end_receipt()
            raise

    def _end_receipt(self) -> None:
        with self._changed:
            self._receipts -= 1
            self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            first, self._failed = not self._failed, True
        if first:
            self._on_done(self, error)


class _Receiving(NamedTuple):
    channel: BroadcastChannel
    work: Any
    part: torch.Tensor
    last: bool  # of a broadcast


class _Sending(NamedTuple):
    works: list[Any]
    last: bool


class _Aborted(Exception):
    """The group was abandoned before the call was posted."""


def host_store(host: str, shared: bool = False) -> dist.TCPStore:
    """A rendezvous store that listens on ``host`` only; by default torch listens on every interface.

    ``shared``: a later store of this process at this address, as an ``init_method`` creates, shares this one.
    """
    listener = listen(host)
    port, fd = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, multi_tenant=shared)


def listen(host: str, port: int = 0) -> socket.socket:
    """A socket listening on a port of ``host``, by default a free one. Raises OSError if that is not an address of this
    machine."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as e:
        raise OSError(f"cannot listen on {host} ({e}); it must be an address of this machine that others reach") from e


def synchronize(device: torch.device) -> None:
    """Wait for this thread's work on the device, so that other streams may use its buffers."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def make_buffers(capacity: int, device: torch.device) -> list[torch.Tensor]:
    """`BUFFERS` buffers, uint8 [capacity], written once so that the transfer causes no page faults."""
    return [torch.empty(capacity, dtype=torch.uint8, device=device).zero_() for _ in range(BUFFERS)]


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    if device.type != "cuda":
        yield None
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield stream
