"""``python -m tests.support.other_machine``: a driver on what looks like another machine, where the locks of the run's
folder do not reach."""

import sys

from asyncrl.run import driver_epoch, run_folder

driver_epoch.machine = lambda: "another machine"
driver_epoch.SILENT_S = 2.0
run_folder._locked = lambda path, patience_s: -1

if __name__ == "__main__":
    from asyncrl.fully_async_main import main

    sys.exit(main())
