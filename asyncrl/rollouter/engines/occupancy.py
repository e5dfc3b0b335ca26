"""Slot occupancy as spans: ``rollout/generate`` while any request is unfinished, ``rollout/half_busy`` while at least
half of the slots generate."""

from __future__ import annotations

from asyncrl.observability.telemetry.recorder import Recorder


class Occupancy:
    def __init__(self, recorder: Recorder, slots: int) -> None:
        self._recorder, self._slots = recorder, slots
        self._open: dict[str, int] = {}

    def observe(self, generating: int, active: int) -> None:
        """Record that ``generating`` sequences take part in the next step and ``active`` requests are unfinished; (0,
        0) if the engine pauses or is idle."""
        self._hold("rollout/generate", active > 0)
        self._hold("rollout/half_busy", 2 * generating >= self._slots)

    def _hold(self, name: str, wanted: bool) -> None:
        if wanted and name not in self._open:
            self._open[name] = self._recorder.begin(name)
        elif not wanted and name in self._open:
            self._recorder.end(self._open.pop(name))
