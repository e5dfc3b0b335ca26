"""Order of prompts: each once per epoch, reshuffled, resumable after any prompt."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
