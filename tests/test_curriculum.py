"""The curriculum: classes of prompts come as often as they teach, and a resumed run draws what it would have drawn."""

import asyncio
import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import CurriculumConfig
from asyncrl.data.curriculum import Curriculum
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.sample_queue.journal import Journal
from asyncrl.simulation.records import InMemoryRecords
from asyncrl.types.prompts import Prompt
from asyncrl.types.versions import PolicyVersion
from tests.support.rollout import System, broken, fine

LEVELS = ("easy", "hard", "medium")


def order_of(by="level", seed=0, rows=12, floor=0.1, **options):
    """Over ``rows`` prompts of three levels in turn."""
    prompts = [
        Prompt(
            f"row:{i}", f"row:{i}", (), "", data_source="ab"[i % 2], text=str(i), extra={"level": LEVELS[i % 3], "n": i}
        )
        for i in range(rows)
    ]
    return PromptOrder(prompts, seed, curriculum=CurriculumConfig(by=by, window=4, floor=floor), **options)


FIRST = PolicyVersion(0, 0)


def level(prompt) -> str:
    return prompt.extra["level"]


def shares(order, count=600) -> Counter:
    return Counter(level(p) for p in islice(order, count))


def test_without_outcomes_all_classes_come_alike():
    found = shares(order_of())
    assert all(abs(found[name] - 200) < 50 for name in LEVELS)


def test_a_class_that_half_succeeds_comes_most_and_those_that_always_or_never_do_keep_the_floor():
    order, success = order_of(), {"easy": 1.0, "hard": 0.0, "medium": 0.5}
    for prompt in islice(order, 30):
        order.ended(prompt.uid, success[level(prompt)])
    order.version = 1
    assert order.figures() == pytest.approx(
        {"easy/share": 0.1 / 1.2, "hard/share": 0.1 / 1.2, "medium/share": 1 / 1.2}
        | {f"{name}/success": value for name, value in success.items()}
    )
    found = shares(order)
    assert found["medium"] > 450
    assert min(found["easy"], found["hard"]) > 25


def test_the_last_groups_count_and_only_those_of_earlier_versions():
    curriculum = Curriculum([1.0, 1.0], seed=0, window=2, floor=0.1)
    for place, (version, success) in enumerate([(0, 1.0), (0, 0.0), (0, 0.5), (1, 0.0)]):
        curriculum.issued(str(place), 0, version)
        curriculum.ended(str(place), success)
    curriculum.issued("open", 1, 0)
    assert curriculum.success(0) == [None, None]
    assert curriculum.success(1) == [0.25, None]
    assert curriculum.success(2) == [0.25, None]
    curriculum.ended("open", None)
    assert curriculum.success(2) == [0.25, 0.0]


def test_a_group_that_is_sampled_again_counts_as_it_ended_last():
    curriculum = Curriculum([1.0], seed=0, window=4, floor=0.1)
    for uid in ("first", "again", "poison"):
        curriculum.issued(uid, 0, 0)
        curriculum.ended(uid, 1.0)
    curriculum.ended("again", 0.5)
    curriculum.ended("poison", None)
    assert curriculum.success(1) == [0.5]


def test_a_class_whose_groups_end_without_samples_keeps_the_floor_and_takes_no_room():
    curriculum = Curriculum([1.0, 1.0], seed=0, window=2, floor=0.1)
    for place in range(50):
        curriculum.issued(str(place), 0, place)
        curriculum.ended(str(place), None)
        curriculum.draw(place + 1)
    assert curriculum.weights(50).tolist() == [0.1, 1.0]
    assert len(curriculum._groups[0]) == 2


def test_each_class_has_epochs_of_its_own():
    issued = list(islice(order_of(), 60))
    for name in LEVELS:
        of_level = [p for p in issued if level(p) == name]
        assert [p.epoch for p in of_level] == [i // 4 for i in range(len(of_level))]
    assert len({p.uid for p in issued}) == 60


def test_with_data_sources_as_classes_the_mixture_weighs():
    order = order_of(by="data_source", mixture={"a": 3, "b": 1})
    found = Counter(p.data_source for p in islice(order, 800))
    assert abs(found["a"] - 600) < 60


@given(
    seed=st.integers(0, 3),
    ends=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 0.0, 0.25, 0.5, 1.0])), min_size=1, max_size=40),
    cut=st.integers(0, 39),
)
def test_an_order_rebuilt_from_the_run_s_groups_draws_what_the_first_would_have_drawn(seed, ends, cut):
    """Groups end in any order, some of them after the cut."""
    order, rebuilt = order_of(seed=seed), order_of(seed=seed)
    history, success, waiting = [], {}, []
    for i, (late, value) in enumerate(ends):
        order.version = i // 4
        prompt = next(order)
        history.append((prompt.uid, order.version))
        waiting.append((i + late, prompt.uid, value))
        for _, uid, ended in [entry for entry in waiting if entry[0] <= i]:
            order.ended(uid, ended)
            success[uid] = ended or 0.0  # as the ledger has it
        waiting = [entry for entry in waiting if entry[0] > i]
        if i == min(cut, len(ends) - 1):
            break
    rebuilt.continue_from([(uid, version, success.get(uid)) for uid, version in history])
    for made in (order, rebuilt):
        made.version = 99
        for _, uid, value in waiting:
            made.ended(uid, value)
    assert [p.uid for p in islice(rebuilt, 20)] == [p.uid for p in islice(order, 20)]


@pytest.mark.parametrize(
    ("by", "problem"),
    [
        ("grade", "prompt row:0 has no column 'grade'; expected it in each row, or data_source"),
        ("n", "expected 2 to 32 different values in the column 'n', found 40"),
    ],
)
def test_columns_that_make_no_classes_are_refused(by, problem):
    with pytest.raises(DataError, match=problem):
        order_of(by=by, rows=40)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("data.epochs=2", "data.epochs: with data.curriculum.by=level each class has epochs of its own; expected 0"),
        ("data.mixture={a: 1}", "data.mixture: shares of data sources do not go with data.curriculum.by=level"),
    ],
)
def test_options_that_contradict_a_curriculum_are_refused(option, problem):
    with pytest.raises(ConfigError, match=problem):
        load_config(None, ["model.path=x", "reward.function=arithmetic", "data.curriculum.by=level", option])


# -- with queue and rollout loop ---------------------------------------------------------------------------------------


def judge(prompt, i):
    """Easy ones always succeed, so that their groups are dropped and replaced."""
    return fine(1.0 if prompt.extra["level"] == "easy" else float(i % 2))


def without_hard_ones(prompt, i):
    """Their samples have no rewards, so that their groups end without samples."""
    return broken("reward_error") if prompt.extra["level"] == "hard" else judge(prompt, i)


def system(inputs, folder, records, version=FIRST, judge=judge) -> System:
    rows = [
        {"prompt": [{"role": "user", "content": f"Compute {i}+1"}], "answer": str(i + 1), "level": LEVELS[i % 3]}
        for i in range(30)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("data.curriculum.by=level", "data.curriculum.window=4", "algorithm.filter_zero_variance=true")
    return System(
        inputs, judge, *options, f"data.train_files=[{folder / 'train.jsonl'}]", records=records, version=version
    )


async def steps(of: System, first: int, last: int) -> list[list[str]]:
    """Train steps ``first`` to ``last``, synchronously; the groups of each."""
    found = []
    for step in range(first, last + 1):
        lease, _ = await asyncio.wait_for(of.queue.lease(step, 2), 60)
        found.append([group.uid for group in lease.groups])
        await of.queue.trained(step)
        await of.engine.resume(PolicyVersion(0, step))
        await of.queue.announce(PolicyVersion(0, step))
        await of.queue.publish(PolicyVersion(0, step))
    return found


@pytest.mark.parametrize(("judge", "successes"), [(judge, {0.5, 1.0}), (without_hard_ones, {0.0, 0.5, 1.0})])
async def test_at_staleness_0_a_run_issues_the_same_groups_again_also_over_a_death(inputs, tmp_path, judge, successes):
    async with system(inputs, tmp_path, InMemoryRecords(), judge=judge) as whole:
        expected = await steps(whole, 1, 6)
        assert (await whole.queue.stats())["fully_async/dropped/zero_variance"] > 0
    records = Journal(tmp_path / "run")
    async with system(inputs, tmp_path, records, judge=judge) as first:
        found = await steps(first, 1, 3)
    async with system(inputs, tmp_path, records, PolicyVersion(0, 3), judge) as second:
        found += await steps(second, 4, 6)
    assert found == expected
    # of groups that were trained, and dropped
    assert {success for *_, success in records.history()} - {None} == successes
    await records.close()


async def test_shares_and_success_of_classes_are_metrics(inputs, tmp_path):
    async with system(inputs, tmp_path, InMemoryRecords()) as of:
        await steps(of, 1, 4)
        gauges = of.recorder.drain().gauges
    assert sum(gauges[f"rollout/curriculum/{name}/share"] for name in LEVELS) == pytest.approx(1)
    assert np.isclose(gauges["rollout/curriculum/hard/success"], 0.5)
