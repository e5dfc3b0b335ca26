"""Published schemas of data sets that people train on, and what their rows are as rows of a prompt file.

A name has one or more schemas; the one whose columns a file has is used. `asyncrl.data.prepare` reads and writes files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.data.boxed import last_boxed
from asyncrl.data.code_tests import (
    FUNCTION,
    PROGRAM,
    entry_point,
    human_eval_tests,
    mbpp_tests,
    tests_text,
    tests_with_calls,
)

Row = Mapping[str, Any]

BOXED = "Reason step by step, and put the final answer in \\boxed{}."
HASHES = "Reason step by step, and write the final answer in a last line that begins with ####."


class Unusable(ValueError):
    """A row from which no prompt can be made; the message is the reason, the same for all rows of its kind."""


@dataclass(frozen=True)
class Schema:
    """``columns``: those that a row needs; ``reward_model.ground_truth`` is a field of a column. ``convert(row,
    instruction)``: the columns of a prompt file's row, or Unusable; ``instruction`` None stands for its own.
    ``instructed``: the published prompts end with an instruction, and take no other."""

    columns: tuple[str, ...]
    convert: Callable[[Row, str | None], dict[str, Any]]
    instructed: bool = False


def field_of(row: Row, path: str) -> Any:
    """The value at a dotted path; None if it is not there."""
    value: Any = row
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _asked(question: Any, instruction: str) -> list[dict[str, str]]:
    if not (isinstance(question, str) and question.strip()):
        raise Unusable("an empty problem")
    return [{"role": "user", "content": f"{question.strip()}\n\n{instruction}".strip()}]


def _gsm8k(row: Row, instruction: str | None) -> dict[str, Any]:
    found = re.search(r"####\s*(\S[^\n]*)\s*$", str(row["answer"]))
    if found is None:
        raise Unusable("no answer after ####")
    prompt = _asked(row["question"], HASHES if instruction is None else instruction)
    return {"prompt": prompt, "answer": found[1].strip().replace(",", "")}


def _math(row: Row, instruction: str | None) -> dict[str, Any]:
    answer = row.get("answer") or last_boxed(str(row["solution"]))
    if not answer:
        raise Unusable("no \\boxed{} in the solution")
    prepared = {"prompt": _asked(row["problem"], BOXED if instruction is None else instruction), "answer": str(answer)}
    if row.get("level") is not None:
        prepared["level"] = str(row["level"]).removeprefix("Level ")
    if subject := row.get("subject") or row.get("type"):
        prepared["subject"] = subject
    return prepared | _named(row.get("unique_id"))


def _dapo(row: Row, instruction: str | None) -> dict[str, Any]:
    prompt = row["prompt"]
    if not prompt:
        raise Unusable("an empty problem")
    answer = str(field_of(row, "reward_model.ground_truth"))
    source = {"data_source": row["data_source"]} if row.get("data_source") else {}
    return {"prompt": prompt, "answer": answer} | source | _named(field_of(row, "extra_info.index"))


def _mbpp(row: Row, instruction: str | None) -> dict[str, Any]:
    listed = row["test_list"]
    if not isinstance(listed, list) or not all(isinstance(test, str) for test in listed):
        raise Unusable("tests that cannot be read")
    tests = mbpp_tests(row)
    if not tests:
        raise Unusable("no tests")
    shown = f"It must pass this test:\n\n```python\n{row['test_list'][0]}\n```"
    question = f"{row.get('text') or row.get('prompt')}\n\n{shown}"
    return _code(question, FUNCTION if instruction is None else instruction, tests, row.get("task_id"))


def _human_eval(row: Row, instruction: str | None) -> dict[str, Any]:
    question = f"Complete this function:\n\n```python\n{str(row['prompt']).rstrip()}\n```"
    prepared = _code(question, FUNCTION if instruction is None else instruction, human_eval_tests(row), row["task_id"])
    return prepared | {"entry_point": row["entry_point"]}


def _with_tests(row: Row, instruction: str | None) -> dict[str, Any]:
    """TACO and APPS (``question``, ``input_output``), DeepCoder (``problem``, ``tests``), and our own form."""
    published = row["tests"] if row.get("tests") is not None else row.get("input_output")
    try:
        tests = tests_with_calls(published)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Unusable("tests that cannot be read") from None
    if not tests:
        raise Unusable("no tests")
    question = next((row[key] for key in ("problem", "question", "prompt") if row.get(key)), "")
    if isinstance(question, list):
        question = "\n\n".join(message["content"] for message in question)
    if starter := (row.get("starter_code") or "").strip():
        question = f"{question}\n\nBegin with:\n\n```python\n{starter}\n```"
    own = PROGRAM if "stdin" in tests[0] else FUNCTION
    prepared = _code(question, own if instruction is None else instruction, tests, row.get("id") or row.get("task_id"))
    if name := row.get("entry_point") or entry_point(published):
        prepared["entry_point"] = name
    if level := row.get("difficulty"):
        prepared["level"] = str(level)
    return prepared


def _code(question: str, instruction: str, tests: Sequence[Mapping[str, str]], id: Any) -> dict[str, Any]:
    return {"prompt": _asked(question, instruction), "answer": "", "tests": tests_text(tests)} | _named(id)


def _named(id: Any) -> dict[str, str]:
    return {} if id is None or id == "" else {"id": str(id)}


PUBLISHED: dict[str, tuple[Schema, ...]] = {
    "gsm8k": (Schema(("question", "answer"), _gsm8k),),
    "math": (Schema(("problem", "solution"), _math),),
    "dapo-17k": (Schema(("prompt", "reward_model.ground_truth"), _dapo, instructed=True),),
    "code": (
        Schema(("text", "test_list"), _mbpp),
        Schema(("prompt", "test_list"), _mbpp),
        Schema(("task_id", "prompt", "test", "entry_point"), _human_eval),
        Schema(("question", "input_output"), _with_tests),
        *(Schema((question, "tests"), _with_tests) for question in ("problem", "question", "prompt")),
    ),
}
