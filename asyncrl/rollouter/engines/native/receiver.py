"""Weights for the native engine arrive straight in its live parameters."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.param_sync.live_receiver import LiveViewReceiver
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.sample import PolicyVersion


class NativeReceiver(LiveViewReceiver):
    """Writes into the model's named views, target and draft alike, so a committed version is whole by construction."""

    def __init__(self, model: NativeModel, on_commit: Callable[[PolicyVersion], None]) -> None:
        super().__init__(model.named_views(), model.tied(), on_commit)
