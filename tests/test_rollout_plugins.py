"""Reward functions and agent loops are found by name or import path, and refused in one line before a run starts."""

import pytest

from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.agents.base import find_agent_loop
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.rewards import arithmetic
from asyncrl.rollouter.rewards.base import find_reward

not_callable = 1.0


class WithOptions:
    def __init__(self, tokenizer, max_response_tokens, tries=1) -> None: ...

    async def run(self, prompt, index, generate): ...


class WithoutRun:
    def __init__(self, tokenizer, max_response_tokens) -> None: ...


class WithPlainRun(WithoutRun):
    def run(self, prompt, index, generate): ...


def test_arguments_that_an_agent_loop_does_not_take_are_refused():
    assert find_agent_loop(f"{__name__}:WithOptions", {"tries": 2}) is WithOptions
    with pytest.raises(UnknownPart, match=r"^rollout.agent_loop_args: got an unexpected keyword argument 'trys'$"):
        find_agent_loop(f"{__name__}:WithOptions", {"trys": 2})


def test_parts_are_found_by_module_name_and_by_import_path():
    assert find_reward("arithmetic") is find_reward("asyncrl.rollouter.rewards.arithmetic:score") is arithmetic.score
    assert find_agent_loop("single_turn") is SingleTurn
    assert find_agent_loop("asyncrl.rollouter.agents.single_turn:SingleTurn") is SingleTurn


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (
            find_reward,
            "arithmetics",
            "reward.function: expected one of arithmetic, ",
        ),
        (find_reward, "no_such.module:f", "reward.function: no_such.module:f: module no_such.module does not import"),
        (find_reward, f"{__name__}:absent", f"reward.function: {__name__}:absent: module {__name__} has no absent"),
        (find_reward, f"{__name__}:not_callable", "reward.function: expected a function, found float at"),
        (find_agent_loop, "double_turn", "rollout.agent_loop: expected one of single_turn, or an import path such as"),
        (find_agent_loop, f"{__name__}:WithoutRun", f"rollout.agent_loop: {__name__}:WithoutRun lacks run"),
        (find_agent_loop, f"{__name__}:WithPlainRun", "rollout.agent_loop: expected a class with `async def run("),
    ],
)
def test_a_part_that_cannot_work_is_refused_in_one_line(find, name, message):
    with pytest.raises(UnknownPart) as refused:
        find(name)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
