"""Tests of code problems, in the one form that the column ``tests`` of a prompt file has, from the published ones.

``tests`` is the JSON text of a list. Each test is ``{"stdin": text, "stdout": text}``, of a program, or
``{"code": text}``, statements that run after the solution and raise where it is wrong. The optional column
``entry_point`` names the function that is tested.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PROGRAM = "Write a Python program that reads standard input and writes standard output. Put it in a ```python block."
FUNCTION = "Write it in Python, with the imports that it needs. Put it in a ```python block."

Test = dict[str, str]

_CALL = """\
def _plain(value):
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

_tested = Solution().{name} if "Solution" in globals() else {name}
_found = _plain(_tested(*{arguments!r}))
assert _found in {expected!r}, f"found {{_found!r}}"
"""


def tests_text(tests: Sequence[Mapping[str, str]]) -> str:
    return json.dumps(list(tests), ensure_ascii=False)


def mbpp_tests(row: Mapping[str, Any]) -> list[Test]:
    """``test_list``: assertions; ``test_setup_code`` or ``test_imports``: what they need."""
    needs = [row.get("test_setup_code") or "", *(row.get("test_imports") or ())]
    return [{"code": "\n".join([*filter(None, needs), test])} for test in row["test_list"]]


def human_eval_tests(row: Mapping[str, Any]) -> list[Test]:
    """``test``: a function ``check`` of the solution."""
    return [{"code": f"{row['test'].strip()}\n\ncheck({row['entry_point']})"}]


def tests_with_calls(published: Any) -> list[Test]:
    """``inputs`` and ``outputs`` side by side, of programs or of the function ``fn_name`` (TACO, APPS), or a list of
    tests with one each (DeepCoder), as JSON text or not. Raises ValueError, TypeError, KeyError or AttributeError for
    anything else."""
    found = _parsed(published)
    if isinstance(found, Mapping):
        name = found.get("fn_name")
        pairs = zip(found["inputs"], found["outputs"], strict=True)
        return [_call(name, i, o) if name else _program(i, o) for i, o in pairs]
    return list(map(_test, found))


def entry_point(published: Any) -> str | None:
    """The function that tests call by name."""
    found = _parsed(published)
    return next(_names([found] if isinstance(found, Mapping) else found), None)


def _parsed(published: Any) -> Any:
    return json.loads(published) if isinstance(published, str) else published


def _names(tests: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for test in tests:
        if name := test.get("fn_name") or (test.get("metadata") or {}).get("func_name"):
            yield name


def _test(test: Mapping[str, Any]) -> Test:
    if test.get("code") is not None:
        return {"code": test["code"]}
    if test.get("stdin") is not None:
        return _program(test["stdin"], test["stdout"])
    name = next(_names([test]), None)
    if name is None:
        return _program(test["input"], test["output"])
    arguments, expected = test["input"], test["output"]
    if isinstance(arguments, str):  # LiveCodeBench: an argument a line
        arguments, expected = [json.loads(line) for line in arguments.splitlines() if line], [json.loads(expected)]
    return _call(name, arguments, expected)


def _program(stdin: Any, stdout: Any) -> Test:
    return {"stdin": _lines(stdin), "stdout": _lines(stdout)}


def _lines(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(name: str, arguments: Sequence[Any], expected: Any) -> Test:
    """Published outputs are the result, or a list of it alone."""
    if not name.isidentifier() or not isinstance(arguments, list):
        raise ValueError(f"expected a function's name and its arguments, found {name!r} and {arguments!r}")
    results = [expected, expected[0]] if isinstance(expected, list) and len(expected) == 1 else [expected]
    return {"code": _CALL.format(name=name, arguments=arguments, expected=results)}
