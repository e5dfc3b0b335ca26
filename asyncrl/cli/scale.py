"""Changes the number of replicas of a run while it goes on: ``asyncrl scale RUN_DIR replicas=12``.

Works wherever the run's folder is. Exit status: 0, 1 if the run could not be scaled, 2 for an argument that is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.run.scaling import NotScaled, ask


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl scale", description="Change the number of replicas of a run while it goes on."
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("replicas", metavar="replicas=N", type=_replicas, help="how many the run shall have")
    args = parser.parse_args(argv)
    try:
        for line in ask(args.run_dir, args.replicas):
            print(line, flush=True)
    except NotScaled as e:
        print(str(e), file=sys.stderr)
        return 1
    return 0


def _replicas(text: str) -> int:
    name, _, number = text.partition("=")
    if name != "replicas" or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"expected replicas=N with N of at least 1, found {text}")
    return int(number)


if __name__ == "__main__":
    sys.exit(main())
