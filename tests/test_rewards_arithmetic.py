"""The arithmetic reward: only the final answer counts, and the format is reported."""

import subprocess
import sys

import pytest

from asyncrl.rollouter.rewards.arithmetic import score
from asyncrl.types.prompts import Prompt

SEVEN = Prompt("e0-000000", "row", ({"role": "user", "content": "Compute 4+1+2"},), "7")


@pytest.mark.parametrize(
    ("response", "accuracy", "valid_format"),
    [
        ("4+1=5,+2\n5+2=7\nanswer: 7", 1, 1),
        ("4+1=5,+2\n5+2=7\nanswer: 7\n", 1, 1),
        ("4+1=3,+2\n3+2=5\nanswer: 7", 1, 1),  # only the final answer counts
        ("4+1=5,+2\n5+2=8\nanswer: 8", 0, 1),
        ("answer: 7", 1, 0),
        ("well: 7\nanswer: 7", 1, 0),
        ("4+1=5,+2\n5+2=7\nanswer: 7\nanswer: 8", 0, 0),
        ("4+1=5,+2\n5+2=7\nanswer: 77", 0, 1),
        ("4+1=5,+2\n5+2=7\nanswer: 7 or 8", 0, 0),
        ("4+1=5,+2\n5+2=7", 0, 0),
        ("4+1=5,+2\n5+2=7\nanswer: " + "7" * 9999, 0, 1),  # more digits than int() takes
        ("", 0, 0),
    ],
)
def test_the_last_line_decides(response, accuracy, valid_format):
    assert score(SEVEN, response) == {"reward": accuracy, "accuracy": accuracy, "valid_format": valid_format}


def test_a_share_of_the_reward_can_go_to_the_format():
    assert score(SEVEN, "4+1=5,+2\n5+2=8\nanswer: 8", format_share=0.25)["reward"] == 0.25
    assert score(SEVEN, "answer: 7", format_share=0.25)["reward"] == 0.75


def test_a_prompt_without_an_integer_answer_raises():
    with pytest.raises(ValueError, match="seven"):
        score(Prompt("e0-000000", "row", (), "seven"), "answer: 7")


def test_the_reward_imports_no_deep_learning_library():
    code = (
        "import sys, asyncrl.rollouter.rewards.arithmetic; print({'torch', 'transformers', 'ray'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
