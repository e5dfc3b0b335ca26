"""The pacer's limit follows the trainer's pace."""

import asyncio

from asyncrl.rollouter.pacing import MIN_SHARE, GenerationPacer, run_pacer


def test_waiting_for_budget_narrows_and_a_waiting_trainer_widens():
    pacer = GenerationPacer(20)
    assert pacer.limit is None  # no limit: requests wait at the engine for free slots
    assert pacer.observe(blocked=0.4, starved=0.0) == 19
    assert pacer.observe(blocked=0.1, starved=0.02) == 19  # both within bounds
    assert pacer.observe(blocked=0.4, starved=0.2) is None  # a starving trainer widens it
    for _ in range(30):
        pacer.observe(blocked=0.9, starved=0.0)
    assert pacer.limit == round(MIN_SHARE * 20)
    pacer.observe(blocked=0.0, starved=0.5)
    pacer.observe(blocked=0.0, starved=0.5)
    assert pacer.limit is None  # no limit: requests wait at the engine for free slots


def test_synchronous_training_never_narrows():
    pacer = GenerationPacer(20)
    for _ in range(9):
        assert pacer.observe(blocked=0.5, starved=0.5) is None


async def test_the_limit_settles_where_two_pools_are_balanced():
    """Generation of a version takes 16 / limit seconds, training 1: the balance is a limit of 16."""
    limit, limits = 20.0, []
    pacer = GenerationPacer(20)
    for _ in range(40):
        generating = 16 / limit
        version_s = max(1.0, generating)
        limit = pacer.observe((version_s - generating) / version_s, (version_s - 1.0) / version_s) or 20
        limits.append(limit)
    assert all(16 < x <= 18 for x in limits[-10:])  # generation is slightly faster than training


async def test_the_limit_is_adjusted_at_each_version(monkeypatch):
    monkeypatch.setattr("asyncrl.rollouter.pacing.POLL_EVERY_S", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr("asyncrl.rollouter.pacing.now_s", lambda: float(next(clock)))
    held, limits = [0.0], []

    class Queue:
        calls = 0

        async def stats(self):
            self.calls += 1
            held[0] += 0.25
            return {"fully_async/version": self.calls // 4, "fully_async/queue/starved_s": 0.0}

    task = asyncio.create_task(run_pacer(GenerationPacer(20), Queue(), lambda: held[0], limits.append))
    while len(limits) < 3:
        await asyncio.sleep(0)
    task.cancel()
    assert limits == sorted(limits, reverse=True)
    assert limits[0] < 20
