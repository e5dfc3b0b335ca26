"""Reward of a program: 1 if it passes the prompt's tests, each run in a sandbox of the response's own.

The program is the last ```` ```python ```` block of the response, or else all of it. The column ``tests`` has the form
of `asyncrl.data.code_tests`: tests with standard input, whose output is compared outside, and statements that run after
the program in its own process. A program that looks for the latter's marker can fake them, and none of the former.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from asyncrl.plugins.registry import UnknownPart
from asyncrl.sandbox.base import Execution, Sandbox, Sandboxes, SandboxFailed
from asyncrl.types.prompts import Prompt

_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_LANGUAGES = ("python", "py", "python3", "")
_KIB = 1024  # at least so much output is kept
_PROGRAM, _STATEMENTS = "solution.py", "statements.py"
#: the marker comes with the statements, after the program has been read: it is in no file and no argument. What the
#: program prints is not kept, else it could fill the output before the marker, or follow it.
_RUN_STATEMENTS = """\
import json, os, sys
_given = json.loads(sys.stdin.read())
_names = {"__name__": "solution"}
_result = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
exec(compile(_given["program"], "solution.py", "exec"), _names)
exec(compile(_given["statements"], "test.py", "exec"), _names)
os.write(_result, _given["passed"].encode())
"""


class UnitTests:
    """``test_s``: time limit of a test. ``partial``: the reward is the share of tests that pass.

    Metrics: ``accuracy`` (all pass), ``tests_passed`` (the share that does; without ``partial`` up to the first that
    fails), ``tests_timed_out`` (1 if one did), ``no_code`` (1 if the response has no program)."""

    columns = ("tests",)

    def prepare(self, test_s: float = 4.0, partial: bool = False, timeout_s: float = 10.0) -> None:
        """Raises UnknownPart."""
        if isinstance(test_s, bool) or not isinstance(test_s, (int, float)) or not 0 < test_s <= timeout_s:
            limits = f"more than 0 and at most reward.timeout_s = {timeout_s:g}"
            raise UnknownPart(f"reward.args.test_s: expected {limits}, found {test_s!r}")
        if not isinstance(partial, bool):
            raise UnknownPart(f"reward.args.partial: expected true or false, found {partial!r}")

    async def __call__(
        self, prompt: Prompt, response: str, sandboxes: Sandboxes, test_s: float = 4.0, partial: bool = False
    ) -> dict[str, float]:
        """Raises ValueError for tests that are none, a fault of the data, and SandboxFailed for one of the sandbox."""
        tests = _tests(prompt)
        program = program_of(response)
        passed, timed_out = 0, False
        if program.strip():
            sandbox = await sandboxes.create()
            try:
                await sandbox.write(_PROGRAM, program.encode(errors="replace"))
                await sandbox.write(_STATEMENTS, _RUN_STATEMENTS.encode())
                for test in tests:
                    passes, ran = await _passes(sandbox, program, test, test_s)
                    passed, timed_out = passed + passes, timed_out or ran.ended == "timeout"
                    if not (partial or passes):
                        break
            except SandboxFailed as e:
                if e.kind != "model":  # which has broken its own sandbox: what has not passed fails
                    raise
            finally:
                await sandbox.close()
        share = passed / len(tests)
        accuracy = float(passed == len(tests))
        return {
            "reward": share if partial else accuracy,
            "accuracy": accuracy,
            "tests_passed": share,
            "tests_timed_out": float(timed_out),
            "no_code": float(not program.strip()),
        }


def program_of(response: str) -> str:
    """The last block of code; without any the whole text."""
    blocks = [code for language, code in _BLOCK.findall(response) if language.lower() in _LANGUAGES]
    return blocks[-1] if blocks else response


async def _passes(sandbox: Sandbox, program: str, test: dict[str, str], test_s: float) -> tuple[bool, Execution]:
    if "code" not in test:
        ran = await sandbox.exec(["python3", _PROGRAM], stdin=test["stdin"], timeout_s=test_s)
        equal = _lines(ran.stdout) == _lines(test["stdout"])
        cut = ran.truncated and len(ran.stdout) >= _KIB
        if cut and not equal and test["stdout"].startswith(ran.stdout.rstrip("\ufffd")):
            raise ValueError("a test expects more output than sandbox.output_kb keeps: raise it")
        return ran.ok and equal, ran
    marker = secrets.token_hex(16)
    given = json.dumps({"program": program, "statements": test["code"], "passed": marker})
    ran = await sandbox.exec(["python3", _STATEMENTS], stdin=given, timeout_s=test_s)
    return ran.ok and ran.stdout == marker, ran


def _lines(text: str) -> list[str]:
    """Spaces at the end of a line, and empty lines at the end, make no difference."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _tests(prompt: Prompt) -> list[dict[str, str]]:
    """Raises ValueError."""
    given: Any = prompt.extra.get("tests")
    try:
        tests = json.loads(given) if isinstance(given, str) else given
        for test in tests:
            if test.keys() == {"code"}:
                compile(test["code"], "test", "exec")
            elif test.keys() != {"stdin", "stdout"} or not all(isinstance(text, str) for text in test.values()):
                raise ValueError("expected stdin and stdout, or code")
        if not tests:
            raise ValueError("expected at least one")
    except (ValueError, TypeError, AttributeError, SyntaxError) as e:
        raise ValueError(f"the prompt's column tests has no tests that run: {e}; see docs/data.md") from None
    return tests


REWARD = UnitTests()
