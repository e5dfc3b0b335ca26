"""The speculation guard with simulated costs, without engine and clock."""

import random

import pytest

from asyncrl.rollouter.engines.native.guard import Guard


class Machine:
    """Simulates steps of ``1 + k · (each + per_row · rows)`` seconds; each drafted token is accepted with probability
    ``hold``."""

    def __init__(self, guard: Guard, hold: float, each: float, per_row: float = 0.0, noise: float = 0.0) -> None:
        self.guard, self.hold, self.each, self.per_row, self.noise = guard, hold, each, per_row, noise
        self.random = random.Random(0)
        self.ks: list[int] = []

    def steps(self, count: int, rows: int = 4) -> list[int]:
        """The k of each step."""
        ks = []
        for _ in range(count):
            k = self.guard.choose(rows)
            accepted = [self._held(k) for _ in range(rows)]
            seconds = 1 + k * (self.each + self.per_row * rows)
            if self.random.random() < 0.05:
                seconds *= 1 + 10 * self.noise  # another process had the core
            self.guard.observe(k, rows, accepted, seconds * (1 + self.noise * self.random.uniform(-1, 1)))
            ks.append(k)
        return ks

    def _held(self, k: int) -> int:
        held = 0
        while held < k and self.random.random() < self.hold:
            held += 1
        return held


def share(ks: list[int], k: int) -> float:
    return ks.count(k) / len(ks)


def test_without_the_guard_the_maximum_is_always_drafted():
    assert set(Machine(Guard(3, active=False), hold=0.0, each=9.0).steps(500)) == {3}


def test_unprofitable_speculation_stops_and_is_only_probed():
    guard = Guard(1)
    machine = Machine(guard, hold=0.05, each=0.5, noise=0.1)
    machine.steps(400)
    assert share(machine.steps(4000), 0) > 0.95
    assert guard.latest == 0
    assert len(guard.switches) == 1
    assert guard.switches[0].startswith("speculation off at 4 rows: ")
    assert "tokens/s" in guard.switches[0]


def test_profitable_speculation_continues_and_logs_nothing():
    guard = Guard(1)
    assert share(Machine(guard, hold=0.8, each=0.3, noise=0.1).steps(4000), 1) > 0.93
    assert guard.switches == []


def test_speculation_resumes_when_the_draft_improves():
    guard = Guard(1)
    machine = Machine(guard, hold=0.0, each=0.4)
    machine.steps(2000)
    assert guard.latest == 0
    machine.hold = 0.9
    machine.steps(3000)
    assert guard.latest == 1
    assert [line.split(" at ")[0] for line in guard.switches] == ["speculation off", "speculation on"]


@pytest.mark.parametrize(("hold", "each", "best"), [(0.95, 0.1, 4), (0.6, 0.4, 1), (0.75, 0.35, 2)])
def test_the_number_of_drafted_tokens_converges_to_the_fastest(hold, each, best):
    rates = [sum(hold**j for j in range(k + 1)) / (1 + each * k) for k in range(5)]
    assert max(range(5), key=rates.__getitem__) == best
    guard = Guard(4)
    machine = Machine(guard, hold=hold, each=each, noise=0.02)
    machine.steps(6000)
    assert guard.latest == best or rates[guard.latest] > 0.97 * rates[best]  # within the hysteresis


def test_batch_sizes_are_judged_separately():
    guard = Guard(1)
    machine = Machine(guard, hold=0.7, each=0.1, per_row=0.05)
    for _ in range(40):
        machine.steps(100, rows=2)
        machine.steps(100, rows=32)
    assert share(machine.steps(1000, rows=2), 1) > 0.9
    assert share(machine.steps(1000, rows=32), 0) > 0.9


def test_a_difference_within_the_hysteresis_changes_nothing():
    guard = Guard(1)
    machine = Machine(guard, hold=1.0, each=1.01)  # 2 tokens in 2.01 seconds against 1 in 1
    machine.steps(5000)
    assert guard.switches == []
    assert guard.latest == 1


def test_measured_tokens_follow_the_acceptance_rates():
    guard = Guard(2)
    for _ in range(300):
        guard.observe(2, 4, [0, 1, 2, 2], 1.0)
    assert guard.tokens(1) == pytest.approx(1.75)
    assert guard.tokens(2) == pytest.approx(2.25)
