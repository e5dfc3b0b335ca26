"""Schedule of validations: blocking before and after training, concurrent with it in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Protocol

from asyncrl.config.schema import Config
from asyncrl.observability.telemetry.clock import now_s
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.checkpoints import CheckpointStore
from asyncrl.trainer.progress import Progress

REPEAT_EVERY_S = 1.0  # interval of the request for priority, which a restarted rollouter has not received


class ValidatingRollouter(Protocol):
    async def validate(self) -> Mapping[str, float]: ...
    async def set_validation_first(self, first: bool) -> None: ...


class ValidationSchedule:
    """One per run. ``run()`` runs beside the training loop and raises the failures of concurrent validations.

    ``report(progress, metrics, when)`` receives every result, measured at ``progress``; ``when`` is "before" or
    "after" training, or None. Results also rate the checkpoint of the same weights."""

    def __init__(
        self,
        config: Config,
        rollouter: ValidatingRollouter,
        checkpoints: CheckpointStore,
        recorder: Recorder,
        report: Callable[[Progress, Mapping[str, float], str | None], None],
    ) -> None:
        self._has_prompts, self._options = config.data.validates, config.validation
        self._rollouter, self._checkpoints, self._recorder, self._report = rollouter, checkpoints, recorder, report
        self._training = False  # True once the first validation is over
        self._concurrent: asyncio.Task[None] | None = None
        self._passed: asyncio.Task[None] | None = None  # for which no further sync waits
        self._scheduled: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._usual_order: asyncio.Task[None] | None = None  # resets the priority after a sync that waited

    async def run(self) -> None:
        while True:
            validation = await self._scheduled.get()
            await validation
            if self._concurrent is validation:
                self._concurrent = None

    async def finished(self) -> None:
        """Wait ``validation.hold_s`` for the concurrent validation, so that it sees one version; meanwhile the
        rollouter serves its requests before those of training. It goes on if this wait ends first."""
        if (validation := self._concurrent) in (None, self._passed) or not self._options.hold_s:
            return
        until_s = now_s() + self._options.hold_s
        with self._recorder.span("validation/holds_sync"):
            try:
                while not validation.done() and (left_s := until_s - now_s()) > 0:
                    with contextlib.suppress(TimeoutError):  # a rollouter is being restarted
                        await asyncio.wait_for(self._rollouter.set_validation_first(True), left_s)
                    left_s = max(0.0, until_s - now_s())
                    await asyncio.wait([validation], timeout=min(left_s, REPEAT_EVERY_S))
                self._passed = validation
            finally:  # not awaited: a dead rollouter would block a cancelled caller
                self._usual_order = asyncio.ensure_future(self._rollouter.set_validation_first(False))
                # the supervisor reports the rollouter's failures
                self._usual_order.add_done_callback(lambda asked: asked.cancelled() or asked.exception())

    async def validate(self, progress: Progress) -> None:
        """Validate ``progress.version`` if it is the first, the last, or one of every ``validation.every_versions``.
        Waits for the first validation of this driver and for the last; others run concurrently with training, one at a
        time: the next is left out if the one before has not ended."""
        every = self._options.every_versions
        due = bool(every) and progress.version.number % every == 0
        if not self._has_prompts:
            return
        if progress.last or not self._training:
            first = progress.step == 0  # else this driver has resumed the run
            await self._validate(progress, "after" if progress.last else "before" if first else None)
            self._training = True
        elif due and self._concurrent is not None and not self._concurrent.done():
            self._recorder.count("validation/left_out")
        elif due:
            self._checkpoints.await_rating(progress.taken)
            self._concurrent = asyncio.create_task(self._validate(progress))
            self._scheduled.put_nowait(self._concurrent)

    async def _validate(self, progress: Progress, when: str | None = None) -> None:
        metrics = await self._rollouter.validate()
        self._report(progress, metrics, when)
        # answers may be of later versions
        measured = metrics.get("validation/lineage"), metrics.get("validation/version")
        rating = metrics if measured == progress.version and "validation/oldest_version" not in metrics else {}
        await asyncio.to_thread(self._checkpoints.rate, progress.taken, rating)
