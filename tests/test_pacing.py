"""The pacer's limit follows the trainer's pace."""

from asyncrl.rollouter.pacing import MIN_SHARE, GenerationPacer


def test_waiting_for_budget_narrows_and_a_waiting_trainer_widens():
    limits = []
    pacer = GenerationPacer(20, limits.append)
    pacer.observe(blocked=0.4, starved=0.0)
    pacer.observe(blocked=0.1, starved=0.02)  # both within bounds
    pacer.observe(blocked=0.4, starved=0.2)  # a starving trainer widens it
    assert limits == [None, 19, 19, None]  # no limit: requests wait at the engine for free slots
    for _ in range(30):
        pacer.observe(blocked=0.9, starved=0.0)
    assert limits[-1] == round(MIN_SHARE * 20)
    pacer.observe(blocked=0.0, starved=0.5)
    pacer.observe(blocked=0.0, starved=0.5)
    assert limits[-1] is None


def test_synchronous_training_never_narrows():
    limits = []
    pacer = GenerationPacer(20, limits.append)
    for _ in range(9):
        pacer.observe(blocked=0.5, starved=0.5)
    assert limits == [None] * 10


def test_the_limit_settles_where_two_pools_are_balanced():
    """Generation of a version takes 16 / limit seconds, training 1: the balance is a limit of 16."""
    limits = []
    pacer = GenerationPacer(20, limits.append)
    for _ in range(40):
        generating = 16 / (limits[-1] or 20)
        version_s = max(1.0, generating)
        pacer.observe((version_s - generating) / version_s, (version_s - 1.0) / version_s)
    assert all(16 < x <= 18 for x in limits[-10:])  # generation is slightly faster than training


def test_the_limit_is_adjusted_once_for_each_version_to_the_time_since_the_one_before(monkeypatch):
    clock, limits = [0.0], []
    monkeypatch.setattr("asyncrl.rollouter.pacing.now_s", lambda: clock[0])
    pacer = GenerationPacer(20, limits.append)
    pacer.note_version(None, blocked_s=7.0, starved_s=0.0)  # before the first version
    for second, number, blocked_s, starved_s in [
        (10, 0, 9.0, 9.0),
        (12, 0, 10.0, 9.0),
        (20, 1, 11.0, 9.1),  # 0.2 and 0.01 of its time
        (25, 1, 11.5, 9.1),
        (30, 2, 11.9, 9.1),  # 0.09: not blocked enough
        (40, 3, 13.0, 9.4),  # the trainer starved
    ]:
        clock[0] = float(second)
        pacer.note_version(number, blocked_s, starved_s)
    assert limits == [None, 19, 19, None]
