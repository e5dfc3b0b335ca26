"""Engines that write down all that they sample, in the run's folder: the engines' own log."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncrl.rollouter.engines.base import EngineSpec
from asyncrl.rollouter.engines.native.spec import NativeSpec
from asyncrl.rollouter.engines.vllm.spec import VLLMSpec
from asyncrl.types.versions import PolicyVersion

FOLDER = "engine_log"


class Sampled(NamedTuple):
    """Tokens int32 [C] that a replica sampled for a request after ``context`` (int32 [P]), with logprobs float32 [C]
    and the version of each. ``at_s``: when it was submitted, in seconds of the machine's clock."""

    replica: str
    request: str
    context: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: list[PolicyVersion]
    at_s: float


class LoggedEngine:
    """Another engine, and a log of the requests and tokens that pass."""

    def __init__(self, engine: Any, log_file: Path) -> None:
        self._engine, self._log_file = engine, log_file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _write(self, *record: object) -> None:
        with self._log_file.open("ab") as file:
            pickle.dump(record, file)

    async def submit(self, requests):
        self._write("submit", [(r.id, (r.tokens, time.monotonic())) for r in requests])
        await self._engine.submit(requests)

    async def events(self):
        batch = await self._engine.events()
        self._write("events", batch.ids, batch.offsets, batch.tokens, batch.logprobs, batch.versions)
        return batch


class _Logged(EngineSpec):
    """To be mixed with an engine's spec."""

    async def start(self, config, recorder):
        folder = Path(config.run_dir) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{recorder.actor.replace('/', '-')}_{os.getpid()}"
        return LoggedEngine(await super().start(config, recorder), file)


class _Native(_Logged, NativeSpec):
    pass


class _VLLM(_Logged, VLLMSpec):
    pass


NATIVE, VLLM = _Native(), _VLLM()


def read_log(run: Path) -> Iterator[Sampled]:
    """What the engines of a run sampled, by request."""
    for file in sorted((run / FOLDER).iterdir()):
        replica = file.name.split("_")[0].replace("-", "/")
        contexts: dict[str, tuple[np.ndarray, float]] = {}
        parts: dict[str, list[tuple[np.ndarray, np.ndarray, PolicyVersion]]] = {}
        for kind, *record in _records(file):
            if kind == "submit":
                contexts |= dict(record[0])
                continue
            ids, offsets, tokens, logprobs, versions = record
            for i, request in enumerate(ids):
                here = slice(offsets[i], offsets[i + 1])
                parts.setdefault(request, []).append((tokens[here], logprobs[here], versions[i]))
        for request, found in parts.items():
            columns = [np.concatenate([part[i] for part in found]) for i in (0, 1)]
            versions = [version for part, _, version in found for _ in part]
            context, at_s = contexts[request]
            yield Sampled(replica, request, context, *columns, versions, at_s)


def _records(file: Path) -> Iterator[tuple]:
    with file.open("rb") as log:
        while True:
            try:
                yield pickle.load(log)
            except (EOFError, pickle.UnpicklingError):  # the end, or a record that a death cut
                return
