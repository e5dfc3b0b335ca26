"""Make a run's report again, at any time: ``python -m asyncrl.report RUN_DIR`` writes report.html and trace.json.gz.

It reads files only, so that it can be made of a run still going, of one that died, and of a folder with half of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from asyncrl.reporting.report import write_report
from asyncrl.reporting.trace import write_trace


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m asyncrl.report RUN_DIR", file=sys.stderr)
        return 2
    try:
        print(write_report(argv[0]))
        print(write_trace(argv[0]))
    except FileNotFoundError as e:
        print(str(e), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
