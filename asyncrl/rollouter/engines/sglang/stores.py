"""Patch of SGLang's processes: a rendezvous store listens on the address that its members connect to.

torch's own listens on every interface, and serves whoever connects.
"""

from __future__ import annotations

import importlib
from typing import Any


def listen_only_at_their_address() -> None:
    """Apply the patch. Call in each of SGLang's processes before it joins a process group."""
    from torch.distributed import TCPStore

    from asyncrl.param_sync.transports.process_group import listen

    listening: set[int] = set()  # ports; later stores of this process at the same port share the first one

    def store(host_name: str, port: int, **options: Any) -> TCPStore:
        if options["is_master"] and port not in listening:
            options["master_listen_fd"] = listen(host_name, port).detach()
            listening.add(port)
        return TCPStore(host_name, port, **options)

    # by its path: `torch.distributed.rendezvous` is also the name of a function
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    rendezvous.TCPStore = store
