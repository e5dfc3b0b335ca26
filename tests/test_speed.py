"""The ideal of two pools, the fraction of it that a run has, and the split that would suit."""

import pytest

from asyncrl.speed import SpeedAccount


def test_pools_that_never_wait_run_at_the_slower_one_s_pace():
    account = SpeedAccount(1, 1, "CPU")
    figures = account.step(2.0, trained=1000, training_s=2.0, generated=1000, generating_s=1.0, full_width=True)
    assert figures == {
        "perf/trainer_alone_tokens_per_s": 500,
        "perf/rollout_alone_tokens_per_s": 1000,
        "perf/ideal_step_s": 2.0,
        "perf/fraction_of_ideal": 1.0,
    }


def test_waiting_and_tokens_that_are_never_trained_lower_the_fraction():
    waiting = SpeedAccount(1, 1, "CPU")
    waiting.step(4.0, trained=1000, training_s=2.0, generated=1000, generating_s=2.0, full_width=True)
    assert waiting.figures()["fraction_of_ideal"] == 0.5
    dropping = SpeedAccount(1, 1, "CPU")  # half of what is generated is dropped: the rollouter is busy all the time
    dropping.step(2.0, trained=500, training_s=0.5, generated=1000, generating_s=2.0, full_width=True)
    assert dropping.figures()["fraction_of_ideal"] == 0.5


def test_a_rollouter_narrowed_to_the_trainer_s_pace_does_not_count_as_slow():
    account = SpeedAccount(1, 1, "CPU")
    account.step(2.0, trained=1000, training_s=1.0, generated=1000, generating_s=1.0, full_width=True)
    narrow = account.step(2.0, trained=1000, training_s=1.0, generated=1000, generating_s=2.0, full_width=False)
    assert narrow["perf/rollout_alone_tokens_per_s"] == 1000
    assert narrow["perf/fraction_of_ideal"] == 0.5


@pytest.mark.parametrize(
    ("pools", "training_s", "generating_s", "advice"),
    [
        (
            (4, 4, "GPU"),
            3.0,
            1.0,
            "training binds, generation could do 3 times as much: training takes 100% of",
        ),
        ((4, 4, "GPU"), 3.0, 1.0, "of 8 GPUs, 6 for training and 2 for generation would balance them (now 4 and 4)"),
        ((1, 1, "CPU"), 1.5, 3.0, "of 2 CPUs, 0.67 for training and 1.3 for generation"),
        ((1, 1, "CPU"), 2.8, 3.0, "the pools are balanced: training takes 93% of the time, generation 100%"),
    ],
)
def test_the_advice_names_the_pool_that_binds_and_a_split_by_work(pools, training_s, generating_s, advice):
    account = SpeedAccount(*pools)
    account.step(3.0, trained=100, training_s=training_s, generated=100, generating_s=generating_s, full_width=True)
    assert advice in account.advice()


def test_a_run_that_trained_nothing_has_no_figures():
    account = SpeedAccount(1, 1, "CPU")
    assert account.step(1.0, trained=0, training_s=0, generated=0, generating_s=0, full_width=True) == {}
    assert account.figures() == {}
