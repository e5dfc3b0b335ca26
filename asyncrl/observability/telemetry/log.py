"""Logging of a process: messages on stderr, and JSON lines in the run folder, one file per process.

Modules use Python's logging, ``log = logging.getLogger(__name__)``; ``extra={...}`` becomes fields of the JSON line.
Without `configure_logging`, as in tests and scripts, warnings go to stderr and other records are dropped.
"""

from __future__ import annotations

import json
import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, NamedTuple

LOGS = "logs"  # subfolder of the run folder
MAX_BYTES = 16 * 1024 * 1024  # per file; a full file is renamed to FILE.1, replacing the previous one

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class LogConfig(NamedTuple):
    """Log folder of a run, and asyncrl's log level: debug | info | warning | error."""

    folder: str
    level: str


def configure_logging(actor: str, to: LogConfig) -> None:
    """Configures logging of this process as ``actor`` (``trainer/0``, …); libraries log only warnings and errors.

    The file is on the process's own machine. A restarted actor appends to it."""
    path = log_file(Path(to.folder), actor)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", errors="replace")
    file.setFormatter(_JsonFormatter(actor))
    stderr = _StderrHandler()
    stderr.setFormatter(_MessageFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.handlers = [stderr, file]
    root.setLevel(logging.WARNING)
    logging.getLogger("asyncrl").setLevel(to.level.upper())


def log_file(folder: Path, actor: str) -> Path:
    return folder / f"{actor.replace('/', '-')}.jsonl"


class _StderrHandler(logging.StreamHandler):
    """Writes to the current `sys.stderr`: the console's progress line replaces it while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _JsonFormatter(logging.Formatter):
    """``{"time": Unix seconds, "level", "actor", "logger", "message", …}``, with ``traceback`` if there is one."""

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


class _MessageFormatter(logging.Formatter):
    """The message, prefixed with the logger's name for libraries; Ray adds the actor's name."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        ours = record.name.split(".")[0] == "asyncrl" or record.name == "__main__"
        return text if ours else f"{record.name}: {text}"
