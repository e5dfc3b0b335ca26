"""Writes the report of a run: ``asyncrl report RUN_DIR``, or ``python -m asyncrl.report RUN_DIR``.

It only reads files, so it also works during the run, after a crash, and on an incomplete run folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.observability.report.report import write_report
from asyncrl.observability.report.trace import write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 if there is no run folder, or it cannot be read and written."""
    parser = argparse.ArgumentParser(prog="asyncrl report", description="Writes report.html and trace.json.gz.")
    parser.add_argument("run_dir", type=Path, help="run folder, to which both files are written")
    run_dir = parser.parse_args(argv).run_dir
    try:
        print(write_report(run_dir))
        print(write_trace(run_dir))
    except OSError as e:
        print(f"report: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
