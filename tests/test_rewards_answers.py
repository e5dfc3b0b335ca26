"""Rewards that compare a response with the prompt's answer: as text, and as mathematics."""

import importlib.util
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import RewardConfig
from asyncrl.data.boxed import last_boxed
from asyncrl.rollouter.rewards import math_verify
from asyncrl.rollouter.rewards.base import Answer, find_reward
from asyncrl.rollouter.rewards.pool import RewardPool
from tests.support.rewards import PROMPT, import_problem


async def scored(answer, *responses, **options):
    """Results of a worker process, which the first response starts."""
    pool = RewardPool(RewardConfig(**options))
    await pool.start()
    try:
        prompt = replace(PROMPT, answer=answer)
        return await pool.score([Answer(prompt, response) for response in responses])
    finally:
        await pool.close()


def rewards(results):
    assert [r.error for r in results] == [None] * len(results)
    return [r.reward for r in results]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{1}, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"first \boxed{7}, then \boxed{8 is cut", "7"),
        (r"it is $\boxed 5$", "5"),
        (r"\fbox{ x }", "x"),
        ("no box", None),
    ],
)
def test_the_last_box_that_is_closed_holds_the_answer(text, content):
    assert last_boxed(text) == content


def box_by_box(text):
    """`last_boxed` by its definition: counts the braces after each box, from the last one on."""
    for box in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*", text))):
        rest, depth = text[box.end() :], 0
        if not rest.startswith("{"):
            if word := re.match(r"[^\s$.,;]+", rest):
                return word[0]
            continue
        for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if not depth:
                return rest[1 : brace.start()].strip()
    return None


PIECES = ("{", "}", "\\", "\\boxed", "\\fbox", "\\boxed{", "\\{", "x", " ", "\n", "$", ".")


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_one_pass_finds_the_box_that_counting_braces_finds(text):
    assert last_boxed(text) == box_by_box(text)


def test_a_response_full_of_boxes_that_never_close_takes_no_longer_than_its_length():
    assert last_boxed("\\boxed{1}" + "\\boxed{" * 100_000) == "1"


async def test_an_exact_match_is_one_but_for_spaces_and_case():
    results = await scored("New  York", "new york\n", "York", " NEW\tYORK ", function="exact_match")
    assert rewards(results) == [1.0, 0.0, 1.0]
    assert results[1].metrics == {"accuracy": 0.0, "answered": 1.0}


async def test_a_pattern_extracts_the_answer_from_its_last_match():
    responses = ["so\n#### 41\n#### 42", "#### 42\n#### 41", "42"]
    results = await scored("42", *responses, function="exact_match", args={"pattern": "#### (.*)"})
    assert rewards(results) == [1.0, 0.0, 0.0]
    assert [r.metrics["answered"] for r in results] == [1.0, 1.0, 0.0]


async def test_mathematical_answers_are_compared_as_expressions():
    responses = [
        r"so \boxed{0.5}",
        r"The answer is $\frac{2}{4}$.",
        r"first \boxed{1/2}, but then \boxed{1/3}",
        "it is 1/2",
        "I do not know",
    ]
    results = await scored(r"\frac{1}{2}", *responses, function="math_verify", timeout_s=60)
    assert rewards(results) == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert [r.metrics["boxed"] for r in results] == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert rewards(await scored("1000", r"\boxed{1,000}", "#### 1000", function="math_verify")) == [1.0, 1.0]
    assert rewards(await scored(r"x=3", r"\boxed{3}", r"\boxed{4}", function="math_verify")) == [1.0, 0.0]


async def test_an_expression_that_takes_long_is_wrong_and_its_group_is_scored():
    towers = r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(1+x)^{10000}-(1+y)^{10000}}", r"\boxed{3}"
    assert rewards(await scored("3", *towers, function="math_verify", timeout_s=60)) == [0.0, 0.0, 1.0]


async def test_a_prompt_whose_answer_is_no_expression_fails_the_sample():
    (result,) = await scored("", r"\boxed{3}", function="math_verify")
    assert result.error == "reward_error"
    assert "expected a mathematical expression as the prompt's answer, found ''" in result.message


def test_an_answer_that_once_took_too_long_to_parse_is_parsed_again(monkeypatch):
    math_verify._expected.cache_clear()
    monkeypatch.setattr(math_verify, "_parsed", lambda text: [])  # as after its time limit
    with pytest.raises(ValueError, match="expected a mathematical expression as the prompt's answer, found '7'"):
        math_verify._expected("7")
    monkeypatch.setattr(math_verify, "_parsed", lambda text: [text])
    assert math_verify._expected("7") == [r"\boxed{7}"]


def test_math_verify_without_its_package_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the package math-verify.*`pip install 'math-verify>=0.9,<0.10'` adds"):
        find_reward("math_verify").prepare()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"function": "exact_match", "args": {"pattern": "("}}, "reward.args.pattern: expected a regular expression"),
        ({"function": "exact_match", "args": {"pattern": "(a)(b)"}}, "expected at most one group"),
        ({"function": "exact_match", "args": {"patern": "a"}}, "reward.args: got an unexpected keyword argument 'pate"),
        ({"function": "math_verify", "args": {"x": 1}}, "reward.args: got an unexpected keyword argument 'x'"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(options, problem):
    found = import_problem(RewardConfig(**options))
    assert found is not None
    assert problem in found
