"""Terminal output of the console sink: lines that scroll, above a progress line that updates in place."""

from __future__ import annotations

import atexit
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

REFRESH_PER_SECOND = 1


class Terminal:
    """Prints lines above a progress line, where other code's output to stdout and stderr scrolls too."""

    def __init__(self, stream: TextIO, total_steps: int) -> None:
        self._console = Console(file=stream)
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}", style="bold", table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[status]}", style="dim", markup=False, table_column=Column(ratio=1)),
            console=self._console,
            refresh_per_second=REFRESH_PER_SECOND,
            transient=True,
            expand=True,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout and sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("steps", total=total_steps, eta="", status="")

    def line(self, text: str, style: str) -> None:
        """Prints a line without wrapping or cropping it to the terminal's width."""
        self._console.print(Text(text, style), soft_wrap=True)

    def show(self, step: int, eta: str, status: str) -> None:
        self._progress.update(self._task, completed=step, eta=eta, status=status)
        if not self._progress.live.is_started:
            atexit.register(self.close)  # restores the cursor
            self._progress.start()

    def close(self) -> None:
        """Removes the progress line. Idempotent."""
        self._progress.stop()
        atexit.unregister(self.close)
