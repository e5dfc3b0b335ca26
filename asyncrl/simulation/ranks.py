"""Trainer ranks that compute nothing: they know how long others would take, see `TrainerFigures`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

from asyncrl.observability.telemetry.measured import TRAINER
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.simulation.profile import Profile
from asyncrl.trainer.mismatch import SamplerKL
from asyncrl.types.groups import Group, computed_tokens

_MANIFEST = Manifest((TensorSpec("weights", "float32", (1,)),))


class SimulatedRanks:
    """Implements `asyncrl.trainer.protocols.Ranks` and `asyncrl.param_sync.session_protocol.SenderSession`."""

    def __init__(self, profile: Profile, ranks: int, recorder: Recorder) -> None:
        self._recorder = recorder
        self._figures, self._sync = profile.trainer, profile.sync
        self._token_s = profile.trainer.token_s * profile.trainer.ranks / ranks
        self.busy_s = 0.0  #: seconds in which they trained
        self.tokens = 0  #: of prompts and responses, trained

    async def train(
        self,
        step: int,
        payload: Sequence[bytes],
        mask_before: int | None,
        version: float,
        part: int = 0,
        parts: int = 1,
    ) -> tuple[dict[str, float], list[SamplerKL]]:
        tokens = self._computed(payload)
        seconds = self._token_s * tokens
        if part:
            seconds += self._figures.part_s
        if part == parts - 1:
            seconds += self._figures.step_s
        await asyncio.sleep(seconds)
        TRAINER.observe(self._recorder, seconds, part == parts - 1, part > 0, tokens)
        self.busy_s += seconds
        self.tokens += tokens
        return {}, []

    def _computed(self, payload: Sequence[bytes]) -> int:
        return computed_tokens([Group.from_buffer(data) for data in payload])

    async def stage(self) -> None:
        if not math.isnan(self._figures.stage_s):  # else only the last checkpoint is saved
            await asyncio.sleep(self._figures.stage_s)

    async def write(self, path: Path) -> None: ...
    async def load(self, path: Path) -> None: ...
    async def export_hf(self, path: Path) -> None: ...

    async def lost(self, error: BaseException) -> str | None:
        return None

    async def restart(self, why: str) -> None: ...

    # -- the sending side of a sync session ------------------------------------------------------------------------

    async def offer(self) -> Offer:
        return Offer(_MANIFEST, None)

    async def send(self, plan: SendPlan) -> SendReport:
        await asyncio.sleep(self._sync.transfer_s)
        return SendReport(self._sync.nbytes)

    async def abort(self, session: str) -> None: ...
