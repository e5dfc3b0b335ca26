"""Chooses how many tokens to draft, possibly none, from measured step times and acceptance.

Pure logic, without a clock: the core calls `choose` before a step and reports the result to `observe`. The rate is
tokens per second of generation steps::

    rate(k) = rows · (1 + A₁ + … + A_k) / seconds(k)

with A_j the share of verifications that yield more than j tokens (tokens accepted after a sample's end do not count)
and seconds(k) the median step time. Costs depend on the number of rows, so each power of two of rows has its own k. Now
and then a probe runs a few steps with another k (0 and the neighbours take turns), which is adopted if its rate beats
that of the preceding steps by the hysteresis. The time between probes doubles while they change nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

PROBE_STEPS = 8  # minimum; more if fewer than PROBE_ROWS rows would be verified
PROBE_ROWS = 48
FIRST_WAIT, LONGEST_WAIT = 4, 64  # between two probes, in probe lengths
HYSTERESIS = 0.03
_MEMORY = 1000.0  # verified rows after which a measurement counts for 1/e
_STALE = 8.0  # rows that older acceptance counts for when speculation is probed again


@dataclass
class _Rows:
    """State for one power of two of rows."""

    k: int
    wait: float = FIRST_WAIT
    steps: int = 0  # with k since the last probe
    probing: int | None = None
    turn: int = 0
    own_s: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    probe_s: list[float] = field(default_factory=list)


class Guard:
    """Drafts at most ``most`` tokens, always that many unless ``active``. ``switches`` collects a log line for each
    time that speculation stops or restarts."""

    def __init__(self, most: int, active: bool = True) -> None:
        self._most, self._active = most, active
        self._by_rows: dict[int, _Rows] = {}
        # by place j, decaying: rows that took more than j tokens, rows verified
        self._gave, self._seen = [0.0] * most, [0.0] * most
        self._before: int | None = None
        self.latest = most  # k of the last choice that was not a probe
        self.switches: list[str] = []

    def choose(self, rows: int) -> int:
        """Number of tokens to draft in the next step, for ``rows`` sequences."""
        if not self._active:
            return self._most
        state = self._state(rows)
        if state.probing is None:
            self.latest = state.k
            if state.steps >= state.wait * self._length(rows):
                self._begin_probe(state)
        return state.k if state.probing is None else state.probing

    def observe(self, k: int, rows: int, gained: Sequence[int], seconds: float) -> None:
        """Report a step of ``k`` drafted tokens per row: its ``seconds``, and how many tokens beyond one each row
        ``gained``."""
        if not self._active:
            return
        state = self._state(rows)
        self._learn(k, gained)
        same, self._before = self._before == k, k
        if k != (state.k if state.probing is None else state.probing):
            return
        if state.probing is None:
            state.steps += 1
            if same:  # the first step after a change also catches up and meets new shapes
                state.own_s.append(seconds)
        elif same:
            state.probe_s.append(seconds)
            if len(state.probe_s) >= self._length(rows):
                self._judge(state, rows)

    def tokens(self, k: int) -> float:
        """Measured tokens per row and step: 1 … k + 1."""
        share, total = 1.0, 1.0
        for j in range(k):
            if self._seen[j]:
                share = min(share, self._gave[j] / self._seen[j])
            total += share
        return total

    def _state(self, rows: int) -> _Rows:
        size = rows.bit_length()
        if size not in self._by_rows:
            self._by_rows[size] = _Rows(self._most)
        return self._by_rows[size]

    def _length(self, rows: int) -> int:
        return max(PROBE_STEPS, -(-PROBE_ROWS // rows))

    def _begin_probe(self, state: _Rows) -> None:
        others = sorted({0, state.k - 1, state.k + 1} & set(range(self._most + 1)) - {state.k})
        state.probing, state.probe_s, state.steps = others[state.turn % len(others)], [], 0
        state.turn += 1
        if state.k == 0:  # the draft may have been trained meanwhile
            for j, seen in enumerate(self._seen):
                if seen > _STALE:
                    self._gave[j], self._seen[j] = self._gave[j] * _STALE / seen, _STALE

    def _judge(self, state: _Rows, rows: int) -> None:
        other, state.probing = state.probing, None
        assert other is not None
        if not state.own_s:
            return
        now = self.tokens(state.k) * rows / statistics.median(state.own_s)
        then = self.tokens(other) * rows / statistics.median(state.probe_s)
        if then <= now * (1 + HYSTERESIS):
            state.wait = min(2 * state.wait, LONGEST_WAIT)
            return
        if not (other and state.k):
            self.switches.append(
                f"speculation {'on' if other else 'off'} at {rows} rows: {then:.0f} tokens/s with {other} drafted "
                f"tokens a step, {now:.0f} with {state.k}; {self.tokens(max(other, state.k)):.2f} tokens a verification"
            )
        state.k, state.wait, state.own_s = other, FIRST_WAIT, deque(state.probe_s, maxlen=64)

    def _learn(self, k: int, gained: Sequence[int]) -> None:
        keep = 1.0 - min(len(gained) / _MEMORY, 0.5)
        for j in range(k):
            self._gave[j] = self._gave[j] * keep + sum(count > j for count in gained)
            self._seen[j] = self._seen[j] * keep + len(gained)
