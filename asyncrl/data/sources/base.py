"""Data sources, which generate prompts: the interface, and the lookup by name.

``data.source`` is ``NAME:TASK,TASK…``: the name of a source, and what it is to make prompts of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from asyncrl.plugins.registry import Registry, UnknownPart, check_arguments


class Row(NamedTuple):
    """A prompt as a source gives it. ``columns`` reach the reward and the agent loop as ``Prompt.extra``, and
    ``data.curriculum`` may class prompts by them; they must pickle."""

    id: str
    question: str
    answer: str
    data_source: str
    columns: Mapping[str, Any]


class SourceError(ValueError):
    """A source cannot give the prompts; the message is one line that begins with an option."""


class Source(Protocol):
    """Gives the same rows for the same arguments in each process: rows are known by their positions, and the rollouter
    makes them again when it restarts."""

    def rows(self, tasks: Sequence[str], held_out: int = 64, **args: Any) -> tuple[list[Row], list[Row]]:
        """Training and held-out rows. ``held_out``: of each task; 0: none. ``args``: further ``data.source_args``.
        Raises SourceError."""
        ...


SOURCES: Registry[Source] = Registry(
    kind="data source",
    option="data.source",
    package="asyncrl.data.sources",
    attribute="SOURCE",
    entry_points="asyncrl.data_sources",
    interface=Source,
)


def generated(source: str, args: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows of ``data.source`` with ``data.source_args``. Raises SourceError."""
    name, _, tasks = source.partition(":")
    named = [task.strip() for task in tasks.split(",")]
    if name not in SOURCES.names() or not all(named) or len(set(named)) < len(named):
        raise SourceError(
            f"data.source: expected NAME:TASK, or several different tasks with commas between them, and a name among "
            f"{', '.join(SOURCES.names())}; found {source!r}"
        )
    try:
        found = SOURCES.find(name)
        check_arguments("data.source_args", found.rows, named, **args)
    except UnknownPart as e:
        raise SourceError(str(e)) from None
    return found.rows(named, **args)
