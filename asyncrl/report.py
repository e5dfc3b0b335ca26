"""``python -m asyncrl.report RUN_DIR``: the same as ``asyncrl report``."""

import sys

from asyncrl.cli.report import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
