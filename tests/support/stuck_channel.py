"""A broadcast channel whose calls do not end, as NCCL's may not when a peer is gone."""

from __future__ import annotations

import threading
from types import SimpleNamespace


class StuckChannel:
    """Implements `BroadcastChannel`. Every call, even the one that ends the others, blocks until ``released``."""

    begins_with_sends = False

    def __init__(self):
        self.receiving, self.released = threading.Event(), threading.Event()

    def split(self, piece):
        return [piece]

    def receive(self, part):
        self.receiving.set()
        return SimpleNamespace(wait=self.released.wait)

    def send(self, part):
        return []

    def end_calls(self):
        self.released.wait()
        return False


class StuckBackend:
    """Implements `CollectiveBackend`."""

    name = "stuck"

    def __init__(self):
        self.channel = StuckChannel()

    def device_for(self, device):
        return device

    def open_channel(self, rendezvous, host, device):
        return self.channel
