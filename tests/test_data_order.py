"""Order of prompts: each once per epoch, reshuffled, resumable after any prompt."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import CurriculumConfig
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.types.prompts import Prompt


def prompts(count):
    return [Prompt(f"row:{i}", f"row:{i}", (), str(i), text=f"prompt {i}") for i in range(count)]


def test_each_epoch_has_every_prompt_once_in_a_different_order():
    issued = list(PromptOrder(prompts(50), seed=0, epochs=3))
    epochs = [issued[i : i + 50] for i in (0, 50, 100)]
    assert [sorted(p.answer for p in e) for e in epochs] == [sorted(map(str, range(50)))] * 3
    assert len({tuple(p.answer for p in e) for e in epochs}) == 3
    assert [{p.epoch for p in e} for e in epochs] == [{0}, {1}, {2}]
    assert len({p.uid for p in issued}) == 150
    assert all(p.uid == f"e{p.epoch}-{int(p.answer):06d}" for p in issued)


def test_unshuffled_prompts_come_in_file_order():
    assert [p.answer for p in PromptOrder(prompts(3), seed=0, shuffle=False, epochs=2)] == ["0", "1", "2"] * 2


def test_zero_epochs_never_end():
    assert len(list(islice(PromptOrder(prompts(3), seed=0), 100))) == 100


def test_the_seed_decides_the_order():
    orders = [[p.answer for p in PromptOrder(prompts(20), seed=s, epochs=1)] for s in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@given(count=st.integers(1, 9), seed=st.integers(0, 3), issued=st.integers(1, 27), shuffle=st.booleans())
def test_an_order_continued_after_a_prompt_issues_exactly_the_rest(count, seed, issued, shuffle):
    order = PromptOrder(prompts(count), seed, shuffle, epochs=3)
    before = list(islice(order, issued))
    resumed = PromptOrder(prompts(count), seed, shuffle, epochs=3)
    resumed.continue_after(before[-1].uid)
    after = list(resumed)
    assert after == list(order)
    assert before + after == list(PromptOrder(prompts(count), seed, shuffle, epochs=3))


def test_a_prompt_is_found_by_the_uid_it_was_issued_with():
    order = PromptOrder(prompts(20), seed=0, epochs=2)
    issued = list(PromptOrder(prompts(20), seed=0, epochs=2))
    assert [order.at(p.uid) for p in issued] == issued
    assert next(order) == issued[0]  # at() does not advance the order


@pytest.mark.parametrize("uid", ["e0-000005", "row:3", "", "e0-3", "e-000003"])
def test_an_unknown_uid_is_refused(uid):
    order = PromptOrder(prompts(5), seed=0)
    for ask in (order.at, order.continue_after):
        with pytest.raises(DataError, match="expected e<epoch>-<row> with a row below 5"):
            ask(uid)


def test_an_empty_order_is_refused():
    with pytest.raises(DataError, match="at least one prompt"):
        PromptOrder([], seed=0)


def mixed(counts=(3, 20, 7), **options):
    """Prompts of the sources a, b and c."""
    sources = [name for name, count in zip("abc", counts, strict=True) for _ in range(count)]
    rows = [Prompt(f"row:{i}", f"row:{i}", (), "", data_source=s, text=str(i)) for i, s in enumerate(sources)]
    return PromptOrder(rows, seed=0, curriculum=CurriculumConfig(), **options)


def test_a_mixture_has_its_shares_in_every_stretch():
    order = mixed(mixture={"a": 3, "b": 1, "c": 2})
    issued = [p.data_source for p in islice(order, 600)]
    for first in range(0, 600, 60):
        assert Counter(issued[first : first + 60]) == {"a": 30, "b": 10, "c": 20}
    assert all(abs(issued[:n].count("c") - n / 3) <= 1 for n in range(600))


def test_each_source_of_a_mixture_has_epochs_of_its_own():
    issued = list(islice(mixed(mixture={"a": 1, "b": 1, "c": 0}), 40))
    assert [p.epoch for p in issued if p.data_source == "a"] == [i // 3 for i in range(20)]
    assert {p.epoch for p in issued if p.data_source == "b"} == {0}
    assert len({p.uid for p in issued}) == 40
    assert len(list(mixed(mixture={"a": 1, "b": 1, "c": 0}, epochs=2))) == 12  # a has had two


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_mixture_continued_after_any_prompt_issues_exactly_the_rest(shuffle):
    options = {"mixture": {"a": 0.25, "b": 0.6, "c": 0.15}, "shuffle": shuffle, "epochs": 4}
    issued = list(mixed(**options))
    for count in range(1, len(issued) + 1):
        resumed = mixed(**options)
        resumed.continue_after(issued[count - 1].uid)
        assert list(resumed) == issued[count:]


@pytest.mark.parametrize(
    ("mixture", "problem"),
    [
        ({"a": 1, "b": 1}, "expected a share for each data source, a, b, c; found a, b"),
        ({"a": 1, "b": 1, "c": -1}, "expected shares of at least 0"),
        ({"a": 0, "b": 0, "c": 0}, "one of them above 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(mixture, problem):
    with pytest.raises(DataError, match=problem):
        mixed(mixture=mixture)


def test_a_prompt_of_a_source_that_is_left_out_is_refused():
    with pytest.raises(DataError, match=r"data\.mixture leaves out"):
        mixed(mixture={"a": 1, "b": 1, "c": 0}).continue_after("e0-000025")
