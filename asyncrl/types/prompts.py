"""Prompt: one task instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One task instance, as read from the data source.

    ``uid`` is unique in a run (epoch and row); ``prompt_id`` identifies the row of its data set in every epoch;
    ``data_source`` names the data set, by which metrics are also reported."""

    uid: str
    prompt_id: str
    messages: tuple[Message, ...]
    answer: str
    epoch: int = 0
    data_source: str = ""
    text: str | None = None  # raw prompt, used verbatim; `messages` are then empty
    extra: Mapping[str, Any] = field(default_factory=dict)
