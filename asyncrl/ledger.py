"""``python -m asyncrl.ledger RUN_DIR``: the same as ``asyncrl ledger``."""

import sys

from asyncrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["ledger", *sys.argv[1:]]))
