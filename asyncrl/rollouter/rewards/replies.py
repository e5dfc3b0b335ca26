"""Replies of reward workers: JSON, of bounded size and checked field by field, for a reward's code may write anything.

A frame is an 8-byte length and that many bytes. The reply to a group is one outcome per response: an object of numbers,
one of them ``reward``, or a text that says why there are none.
"""

from __future__ import annotations

import json
import numbers
import struct
from collections.abc import Mapping
from typing import Any

FRAME = struct.Struct("<Q")

MAX_OUTCOME_BYTES = 64 * 1024  # more than the largest outcome within the limits below
MAX_METRICS = 64  # per response
MAX_NAME = 64  # characters of a metric's name
MAX_MESSAGE = 2000  # characters
LARGEST = 3.4028234663852886e38  # of the 32-bit numbers in which a group holds rewards and metrics

Outcome = dict[str, float] | str


class BadReply(ValueError):
    """What a worker sent is not a reply; the message completes a sentence that begins with the function."""


def decode(payload: bytes, asked: int) -> list[Outcome]:
    """The outcomes of ``asked`` responses. Raises BadReply."""
    outcomes = _json(payload)
    if not isinstance(outcomes, list) or len(outcomes) != asked:
        raise BadReply(f"sent a reply that is not a list of {asked} outcome(s)")
    return [_outcome(outcome) for outcome in outcomes]


def decode_start(payload: bytes) -> list[str] | str:
    """What the function takes besides prompt and response, or why it does not load. Raises BadReply."""
    started = _json(payload)
    if isinstance(started, list) and all(isinstance(name, str) for name in started):
        return started
    if not isinstance(started, str):
        raise BadReply("sent neither a list of texts nor a text")
    return one_line(started)


def _json(payload: bytes) -> Any:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        raise BadReply("sent a reply that is not JSON") from None


def _outcome(outcome: Any) -> Outcome:
    if isinstance(outcome, str):
        return one_line(outcome)
    if not isinstance(outcome, dict):
        raise BadReply("sent an outcome that is neither numbers nor a text")
    try:
        return checked(outcome)
    except (TypeError, ValueError, OverflowError) as e:
        raise BadReply(one_line(str(e))) from None


def checked(returned: Any) -> dict[str, float]:
    """``reward`` and metrics, from a reward function's result: a number, or a dict with ``reward`` and more numbers.

    Raises TypeError, ValueError or OverflowError for anything else: non-finite numbers, too many metrics, bad names."""
    values = returned if isinstance(returned, Mapping) else {"reward": returned}
    if len(values) > MAX_METRICS + 1:
        raise ValueError(f"returned {len(values)} numbers, expected a reward and at most {MAX_METRICS} metrics")
    if "reward" not in values:
        raise ValueError(f"returned a dict without 'reward', its keys are {sorted(map(str, values))}")
    numbers_by_name = {str(name): _number(name, value) for name, value in values.items()}
    for name in numbers_by_name:
        if not (0 < len(name) <= MAX_NAME and name.isprintable()):
            raise ValueError(f"returned a metric {name!r}, expected a name of 1 to {MAX_NAME} printable characters")
    return numbers_by_name


def _number(name: Any, value: Any) -> float:
    if not isinstance(value, (float, numbers.Real)):  # float first, because an abstract class takes long
        raise TypeError(f"returned {name!r} = {value!r} ({type(value).__name__}), expected a number")
    number = float(value)
    if not -LARGEST <= number <= LARGEST:
        raise ValueError(f"returned {name!r} = {value}, expected a finite number of at most {LARGEST:.2g}")
    return number


def one_line(text: str) -> str:
    """``text`` for logs and tables: printable, and of bounded length."""
    cut = text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"
    return "".join(c if c.isprintable() else " " for c in cut)
