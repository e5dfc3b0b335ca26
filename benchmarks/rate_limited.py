"""A native engine with the speed of a larger model: its decode steps wait, so that several replicas share a core and
slow each other down little. And an agent loop with a tool that takes its time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import xxhash

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Generate
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.engines.base import Engine
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.native.spec import NativeSpec
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample
from benchmarks.long_tail import length

STEP_S, ROW_S = 0.04, 0.001  # of a decode step, and what each running request adds


class RateLimited(NativeEngine):
    """A step that would be over sooner waits for the rest of its time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._core.step = self._slowed(self._core)  # type: ignore[method-assign]

    @staticmethod
    def _slowed(core: Core) -> Any:
        whole = core.step

        def step() -> None:
            until_s = time.monotonic() + STEP_S + ROW_S * core.active
            whole()
            time.sleep(max(0.0, until_s - time.monotonic()))

        return step


class Spec(NativeSpec):
    async def start(self, config: Config, recorder: Recorder) -> Engine:
        return RateLimited(config.model.path, config.rollout.engine, recorder=recorder)


ENGINE = Spec()


class Waits:
    """An agent loop that asks a tool once, which takes ``wait_s``, and answers then; both turns have a length of their
    own, as in `benchmarks.long_tail`."""

    def __init__(self, tokenizer: Any, max_response_tokens: int, median: float, wait_s: float) -> None:
        self._median, self._wait_s = median, wait_s

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        turns = TrajectoryBuilder()
        first, second = turns_of(self._median, prompt.uid, index)
        turns.append(await generate(turns.response, first))
        await asyncio.sleep(waited_s(self._wait_s, prompt.uid, index))
        turns.append(np.full(8, 5, np.int32))
        turns.append(await generate(turns.response, second))
        return turns.sample(index)


def turns_of(median: float, group: str, index: int) -> tuple[int, int]:
    return length(median, f"{group}/first", index), length(median, f"{group}/second", index)


def waited_s(wait_s: float, group: str, index: int) -> float:
    """Between half and one and a half of ``wait_s``, fixed by the names."""
    return wait_s * (0.5 + xxhash.xxh3_64_intdigest(f"{group}/{index}/wait".encode()) / 2**64)
