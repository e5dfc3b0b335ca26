"""What a process has to say: to people on stderr, and as JSON lines in a file of its own in the run folder.

Modules use Python's logging, ``log = logging.getLogger(__name__)``; ``extra={...}`` becomes fields of the line. Until
`start_log` was called, as in tests and scripts, warnings go to stderr and the rest nowhere.
"""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NamedTuple

LOGS = "logs"  # the folder in a run's folder
MAX_BYTES = 16 * 1024 * 1024  # of a file; at that it becomes FILE.1, and the one before is let go

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LogTo(NamedTuple):
    """Where the log of a run goes. ``level``: debug | info | warning | error, from which on asyncrl's own is kept."""

    folder: str
    level: str


def start_log(actor: str, to: LogTo) -> None:
    """This process is ``actor`` (``trainer/0``, …) and logs to ``to``; what libraries say counts from warnings on.

    The file is on the machine where the process is, and goes on when an actor is started again."""
    path = log_file(Path(to.folder), actor)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")
    file.setFormatter(_Lines(actor))
    people = logging.StreamHandler(sys.stderr)
    people.setFormatter(_Plain())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.handlers = [people, file]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncrl").setLevel(to.level.upper())


def log_file(folder: Path, actor: str) -> Path:
    return folder / f"{actor.replace('/', '-')}.jsonl"


class _Lines(logging.Formatter):
    """``{"time": Unix seconds, "level", "actor", "logger", "message", …}``, with ``traceback`` where there is one."""

    def __init__(self, actor: str) -> None:
        super().__init__()
        self._actor = actor

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "actor": self._actor,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        return json.dumps(line, ensure_ascii=False, default=str)


class _Plain(logging.Formatter):
    """The message alone; Ray puts the actor's name before it. Of libraries, also which one says it."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        ours = record.name.split(".")[0] == "asyncrl" or record.name == "__main__"
        return text if ours else f"{record.name}: {text}"
