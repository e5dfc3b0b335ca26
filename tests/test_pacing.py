"""The width of generation follows the trainer's pace, and engines keep to it."""

import asyncio

from asyncrl.rollouter.pacing import LEAST, Pace, keep_pace


def test_what_is_held_up_narrows_and_what_is_waited_for_widens():
    pace = Pace(20)
    assert pace.width is None  # no limit: the engine has requests for slots that become free
    assert pace.observe(held_up=0.4, waited_for=0.0) == 19
    assert pace.observe(held_up=0.1, waited_for=0.02) == 19  # neither is much
    assert pace.observe(held_up=0.4, waited_for=0.2) is None  # who is waited for must not slow down
    for _ in range(30):
        pace.observe(held_up=0.9, waited_for=0.0)
    assert pace.width == round(LEAST * 20)
    pace.observe(held_up=0.0, waited_for=0.5)
    pace.observe(held_up=0.0, waited_for=0.5)
    assert pace.width is None  # no limit: the engine has requests for slots that become free


def test_in_synchronous_training_the_trainer_waits_each_time_so_nothing_narrows():
    pace = Pace(20)
    for _ in range(9):
        assert pace.observe(held_up=0.5, waited_for=0.5) is None


async def test_it_settles_where_a_simple_pair_of_pools_is_balanced():
    """Generation of a version takes 16 / width seconds, training 1: the balance is a width of 16."""
    width, widths = 20.0, []
    pace = Pace(20)
    for _ in range(40):
        generating = 16 / width
        version_s = max(1.0, generating)
        width = pace.observe((version_s - generating) / version_s, (version_s - 1.0) / version_s) or 20
        widths.append(width)
    assert all(16 < w <= 18 for w in widths[-10:])  # a little too fast


async def test_the_width_is_adjusted_at_each_version(monkeypatch):
    monkeypatch.setattr("asyncrl.rollouter.pacing.LOOK_EVERY_S", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr("asyncrl.rollouter.pacing.now_s", lambda: float(next(clock)))
    held, told = [0.0], []

    class Queue:
        calls = 0

        async def stats(self):
            self.calls += 1
            held[0] += 0.25
            return {"fully_async/version": self.calls // 4, "fully_async/queue/starved_s": 0.0}

    task = asyncio.create_task(keep_pace(Pace(20), Queue(), lambda: held[0], told.append))
    while len(told) < 3:
        await asyncio.sleep(0)
    task.cancel()
    assert told == sorted(told, reverse=True)
    assert told[0] < 20
