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


def end_with(parent: int) -> None:
    """However the parent ends, also by ``kill -9``, this process is killed then. SGLang's own children do the same."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)


def main() -> None:
    end_with(int(sys.argv[1]))
    words = json.load(sys.stdin)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(words))


if os.environ.get(UNPINNED):  # SGLang's children import this module again, under another name
    from asyncrl.rollouter.engines.sglang.cpu_defects import correct_cpu_build

    correct_cpu_build()
if __name__ == "__main__":
    main()
