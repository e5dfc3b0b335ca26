"""What passes to an agent and back: the task as JSON; an outcome, or a failure."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.rollouter.agent_processes.keeper import Report
from asyncrl.rollouter.agent_processes.options import OPTION, AgentOptions
from asyncrl.rollouter.agent_processes.tree import how_it_ended
from asyncrl.rollouter.rewards.replies import checked, one_line


class AgentFailed(Exception):
    """A sample's agent failed. ``reason``: agent_error (it raised), infra (what it needs has failed), bad_result,
    agent_exited, agent_blocked or agent_memory. ``retry``: the failure may be that of another sample in its process, of
    the process, or of a server."""

    def __init__(self, reason: str, message: str, retry: bool, traceback: str = "") -> None:
        super().__init__(message)
        self.reason, self.retry, self.traceback = reason, retry, traceback


@dataclass(frozen=True)
class AgentOutcome:
    """``reward``: None if the agent returned none."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def failure(report: Report, options: AgentOptions, name: str, fault: str = "") -> AgentFailed:
    """Of a process that has ended. ``fault``: why it was killed, if not for its memory."""
    if report.exceeded:
        more = f"more than {OPTION}.memory_mb = {options.memory_mb}"
        return AgentFailed("agent_memory", one_line(f"{name} {report.exceeded}, {more}"), retry=True)
    if fault == "blocked":
        how = (
            f"blocked its event loop for {OPTION}.unresponsive_s = {options.unresponsive_s:g} s; a coroutine "
            "must await what takes long; a plain function may block, since it runs in a thread"
        )
        return AgentFailed("agent_blocked", f"{name} {how}", retry=True)
    return AgentFailed("agent_exited", one_line(f"{name} {fault or how_it_ended(report)}"), retry=True)


def outcome(result: Any, name: str) -> AgentOutcome:
    """Raises AgentFailed unless ``result`` is None, a number, or a dict with a ``reward``, ``metrics``, or both."""
    values = result if isinstance(result, dict) else {"reward": result}
    reward, metrics = values.get("reward"), values.get("metrics") or {}
    if values.keys() - {"reward", "metrics"} or not isinstance(metrics, dict) or "reward" in metrics:
        expected = "None, a number, or a dict with a number 'reward', a dict of numbers 'metrics', or both"
        raise AgentFailed("bad_result", one_line(f"{name} returned {result!r:.500}, expected {expected}"), retry=False)
    try:
        numbers = checked({"reward": 0.0 if reward is None else reward, **metrics})
    except (TypeError, ValueError, OverflowError) as e:
        raise AgentFailed("bad_result", one_line(f"{name} {e}"), retry=False) from None
    first = numbers.pop("reward")
    return AgentOutcome(None if reward is None else first, numbers)


def to_json(value: Any) -> str:
    """Raises TypeError or ValueError."""
    return json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Columns of a Parquet file hold NumPy arrays, bytes and dates."""
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    for form in ("tolist", "isoformat"):
        if hasattr(value, form):
            return getattr(value, form)()
    raise TypeError(f"found a {type(value).__name__}")


def json_object(fields: Mapping[str, str]) -> str:
    """Of fields that are JSON already."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in fields.items()) + "}"
