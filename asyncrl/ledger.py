"""``python -m asyncrl.ledger RUN_DIR``: the same as ``asyncrl ledger``."""

import sys

from asyncrl.cli.ledger import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
