"""While a sync waits for a validation, the validation's requests run before those of training."""

import asyncio
import contextlib

import pytest

from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.checkpoints import CheckpointStore
from asyncrl.trainer.validation import ValidationSchedule
from asyncrl.types.versions import PolicyVersion
from tests.support.rollout import System, fine

#: four times as many samples in flight as the engine has slots: training requests wait until the prompts end
CROWDED = ("data.epochs=1", "async_training.staleness_threshold=50", "rollout.replicas=4", "rollout.engine.slots=2")


class Rollouter:
    """The rollouter actor's calls, for a system in this process."""

    def __init__(self, system) -> None:
        self._system = system

    async def set_validation_first(self, first):
        self._system.router.set_validation_first(first)


@contextlib.asynccontextmanager
async def validating(inputs, tmp_path):
    """A system during an epoch, with a concurrent validation."""
    async with System(inputs, lambda prompt, i: fine(float(i)), *CROWDED) as system:
        store = CheckpointStore(tmp_path / "checkpoints", system.config.checkpoint)
        recorder, report = Recorder("driver"), lambda progress, metrics, when: None
        schedule = ValidationSchedule(system.config, Rollouter(system), store, recorder, report)
        scheduler = system.engine._core._scheduler
        async with asyncio.timeout(60):
            while scheduler.waiting < 4:
                await asyncio.sleep(0.005)
        schedule._concurrent = asyncio.create_task(system.validation.run(system.prompts[:6]))
        yield system, schedule, scheduler
        async with asyncio.timeout(60):
            while scheduler.validation_first:
                await asyncio.sleep(0.005)
            await system.tasks[1]
        assert len(await system.groups(len(system.prompts))) == len(system.prompts)  # training lost nothing


async def test_a_sync_does_not_wait_for_training_requests_without_a_slot(inputs, tmp_path, monkeypatch):
    async with validating(inputs, tmp_path) as (system, schedule, scheduler):
        await system.engine.pause("keep", 10)
        finished = asyncio.create_task(schedule.finished())
        async with asyncio.timeout(60):
            while not scheduler.validation_first or len(scheduler._waiting[False]) < 6:
                await asyncio.sleep(0.005)
        assert len(scheduler._waiting[True]) >= 4
        place, trains = scheduler.place, []

        def recorded():
            placed = place()
            trains.extend(sequence.request.trains for sequence in placed)
            return placed

        monkeypatch.setattr(scheduler, "place", recorded)
        await system.engine.resume(PolicyVersion(0, 0))
        await asyncio.wait_for(finished, 60)
        assert schedule._concurrent.result()["validation/samples"] == 6
        assert trains[:6] == [False] * 6  # in the default order they come after waiting training requests


async def test_a_cancelled_wait_restores_the_default_order(inputs, tmp_path):
    async with validating(inputs, tmp_path) as (system, schedule, scheduler):
        await system.engine.pause("keep", 10)
        waiting = asyncio.create_task(schedule.finished())
        async with asyncio.timeout(60):
            while not scheduler.validation_first:
                await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        async with asyncio.timeout(60):
            while scheduler.validation_first:
                await asyncio.sleep(0)
        assert not schedule._concurrent.done()
        await system.engine.resume(PolicyVersion(0, 0))
        assert (await asyncio.wait_for(schedule._concurrent, 60))["validation/samples"] == 6


async def test_a_rollouter_that_starts_during_the_wait_serves_validation_first_too(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncrl.trainer.validation.REPEAT_EVERY_S", 0.005)
    async with validating(inputs, tmp_path) as (system, schedule, scheduler):
        await system.engine.pause("keep", 10)
        waiting = asyncio.create_task(schedule.finished())
        async with asyncio.timeout(60):
            while not scheduler.validation_first:
                await asyncio.sleep(0.005)
            system.router.set_validation_first(False)  # as in a new rollouter
            while not system.router._scheduling.validation_first:
                await asyncio.sleep(0.005)
        await system.engine.resume(PolicyVersion(0, 0))
        await asyncio.wait_for(waiting, 60)
