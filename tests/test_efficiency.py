"""Efficiency of a run: the ideal speed of two pools, the fraction reached, and the split that balances them."""

import pytest

from asyncrl.observability.efficiency import EfficiencyTracker


def test_pools_that_never_wait_are_as_fast_as_the_slower_one():
    tracker = EfficiencyTracker(1, 1, "CPU")
    figures = tracker.step(
        2.0, trained=1000, training_s=2.0, generated=1000, generating_s=1.0, rewarding_s=0.0, unthrottled=True
    )
    assert figures == {
        "perf/trainer_alone_tokens_per_s": 500,
        "perf/rollout_alone_tokens_per_s": 1000,
        "perf/ideal_step_s": 2.0,
        "perf/fraction_of_ideal": 1.0,
    }


def test_waiting_lowers_the_fraction():
    waiting = EfficiencyTracker(1, 1, "CPU")
    waiting.step(4.0, trained=1000, training_s=2.0, generated=1000, generating_s=2.0, rewarding_s=0.0, unthrottled=True)
    assert waiting.figures()["fraction_of_ideal"] == 0.5


def test_a_run_that_trains_what_its_queue_held_is_no_faster_than_ideal():
    resumed = EfficiencyTracker(1, 1, "CPU")
    resumed.step(2.0, trained=3000, training_s=1.5, generated=1000, generating_s=2.0, rewarding_s=0.0, unthrottled=True)
    assert resumed.figures()["fraction_of_ideal"] == 1.0


def test_groups_that_are_dropped_are_work_of_the_rollouter():
    """Half of them are: it is always busy, and generates twice what is trained."""
    tracker = EfficiencyTracker(1, 1, "CPU")
    for dropped in (4, 4, 4, 4):
        tracker.step(2.0, 500, 0.5, 1000, 2.0, rewarding_s=0.0, unthrottled=True, ended=8, dropped=dropped)
    assert tracker.figures()["fraction_of_ideal"] == pytest.approx(1)
    assert tracker.balance() == pytest.approx(4)
    assert "of 2 CPUs, 0.4 for training and 1.6 for generation" in tracker.advice()


def test_a_throttled_rollouter_does_not_count_as_slow():
    tracker = EfficiencyTracker(1, 1, "CPU")
    tracker.step(2.0, trained=1000, training_s=1.0, generated=1000, generating_s=1.0, rewarding_s=0.0, unthrottled=True)
    narrow = tracker.step(
        2.0, trained=1000, training_s=1.0, generated=1000, generating_s=2.0, rewarding_s=0.0, unthrottled=False
    )
    assert narrow["perf/rollout_alone_tokens_per_s"] == 1000
    assert narrow["perf/fraction_of_ideal"] == 0.5


@pytest.mark.parametrize(
    ("pools", "training_s", "generating_s", "advice"),
    [
        (
            (4, 4, "GPU"),
            3.0,
            1.0,
            "training is the bottleneck, generation could do 3 times as much: training takes 100% of",
        ),
        ((4, 4, "GPU"), 3.0, 1.0, "of 8 GPUs, 6 for training and 2 for generation would balance them (now 4 and 4)"),
        ((1, 1, "CPU"), 1.5, 3.0, "of 2 CPUs, 0.67 for training and 1.3 for generation"),
        ((1, 1, "CPU"), 2.8, 3.0, "the pools are balanced: training takes 93% of the time, generation 100%"),
    ],
)
def test_the_advice_names_the_bottleneck_and_a_balanced_split(pools, training_s, generating_s, advice):
    tracker = EfficiencyTracker(*pools)
    tracker.step(
        3.0,
        trained=100,
        training_s=training_s,
        generated=100,
        generating_s=generating_s,
        rewarding_s=0.0,
        unthrottled=True,
    )
    assert advice in tracker.advice()


@pytest.mark.parametrize(
    ("training_s", "rewarding_s", "advice"),
    [
        (3.0, 9.8, "the reward is the bottleneck, samples wait for it 98% of the time: training takes 30% of the time"),
        (3.0, 5.0, "the pools are balanced"),  # something else is
        (9.0, 9.8, "training is the bottleneck"),  # a slow reward, but enough of it at once
    ],
)
def test_the_advice_names_a_reward_for_which_both_pools_wait(training_s, rewarding_s, advice):
    tracker = EfficiencyTracker(1, 1, "CPU")
    tracker.step(
        10.0,
        trained=100,
        training_s=training_s,
        generated=100,
        generating_s=3.0,
        rewarding_s=rewarding_s,
        unthrottled=True,
    )
    assert tracker.advice().startswith(advice)


def test_a_run_that_trained_nothing_has_no_figures():
    tracker = EfficiencyTracker(1, 1, "CPU")
    assert (
        tracker.step(1.0, trained=0, training_s=0, generated=0, generating_s=0, rewarding_s=0.0, unthrottled=True) == {}
    )
    assert tracker.figures() == {}
