"""Makes prompt files: ``asyncrl data prepare NAME --from SOURCE``.

Exit status: 0, or 2 with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.data.prepare import prepare
from asyncrl.data.prompts import DataError
from asyncrl.data.published import PUBLISHED


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl data", description="Makes prompt files; see docs/data.md.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{prepare}")
    one = commands.add_parser("prepare", help="of a published data set", description="Writes OUT/SPLIT.jsonl.")
    one.add_argument("name", choices=PUBLISHED, help="whose schema the source has")
    one.add_argument("--from", dest="source", required=True, help="file, folder, or owner/name[/folder] on the hub")
    one.add_argument("--out", type=Path, help="output folder; default: data/NAME")
    one.add_argument("--split", help="the only one to write; default: all that the source has")
    one.add_argument("--instruction", help="sentence after each problem; default: how its reward finds the answer")
    args = parser.parse_args(argv)
    out = args.out or Path("data", args.name)
    try:
        for prepared in prepare(args.name, args.source, out, args.split, args.instruction):
            print(prepared)
    except (DataError, OSError) as e:
        print(f"data: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
