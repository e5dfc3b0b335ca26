"""Parts of a run that fail while their processes live, and a request that kills its engine.

Environment variables: ``BROKEN_MARKS`` is a folder with a mark for each fault that has happened, ``BROKEN_PROMPT`` the
uid of the group whose requests kill their engine, ``BROKEN_TOOL`` of the one whose agent loop raises."""

import itertools
import os
from pathlib import Path

from asyncrl.algorithms.advantages import grpo
from asyncrl.algorithms.items import Advantage
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.native.spec import NativeSpec


def happens(fault: str) -> bool:
    """True once."""
    mark = Path(os.environ["BROKEN_MARKS"]) / fault
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class BrokenEngine(NativeEngine):
    """Its events raise after some calls, in one replica of a run. One prompt's requests kill its process."""

    calls = 0

    async def submit(self, requests):
        if any(request.group.startswith(os.environ["BROKEN_PROMPT"]) for request in requests):
            os._exit(1)
        await super().submit(requests)

    async def events(self):
        self.calls += 1
        if self.calls > 3 and happens("engine"):
            raise ValueError("the engine is confused")
        return await super().events()


class Spec(NativeSpec):
    async def start(self, config, recorder):
        return BrokenEngine(config.model.path, config.rollout.engine, recorder=recorder)


_batches = itertools.count(1)


def loses_the_device(batch, options):
    """In the process's third batch."""
    if next(_batches) == 3 and happens("device"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return grpo.compute(batch, options)


class Raises(SingleTurn):
    """For one prompt."""

    async def run(self, prompt, index, generate):
        if prompt.uid == os.environ["BROKEN_TOOL"]:
            raise KeyError("no such tool")
        return await super().run(prompt, index, generate)


ENGINE = Spec()
ADVANTAGE = Advantage(loses_the_device, grpo.GRPOOptions)
