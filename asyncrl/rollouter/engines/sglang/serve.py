"""SGLang's server in a process of its own, which ends with the one that started it.

``python -m asyncrl.rollouter.engines.sglang.serve PARENT`` reads its arguments from standard input, a JSON list of
words: the API key is among them, and a command line can be read by everyone on the machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
#: set where LoRA runs without an accelerator
UNPINNED = "ASYNCRL_SGLANG_UNPINNED"


def end_with_parent() -> None:
    """However the parent ends, also by ``kill -9``, this process is killed then."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before it could be watched
        sys.exit(1)
    words = json.load(sys.stdin)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(words))


if __name__ == "__mp_main__":  # as SGLang's children import this module
    end_with_parent()  # they see to it themselves, but only when they have imported all that they need
    if os.getsid(os.getppid()) != os.getsid(0):  # it ended before that: whoever takes orphans is of another session
        os._exit(1)
if os.environ.get(UNPINNED):
    from asyncrl.rollouter.engines.sglang.cpu_defects import correct_cpu_build

    correct_cpu_build()
if __name__ == "__main__":
    main()
