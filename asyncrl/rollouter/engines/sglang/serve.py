"""SGLang's server as a child process that ends with its parent.

``python -m asyncrl.rollouter.engines.sglang.serve PARENT`` reads its arguments from standard input, as a JSON list of
words: they contain the API key, and every user of the machine can read a command line.
"""

from __future__ import annotations

import json
import os
import sys

from asyncrl.processes.parent import end_with_parent
from asyncrl.rollouter.engines.sglang.stops import applied, stop_at_own_tokens
from asyncrl.rollouter.engines.sglang.stores import listen_only_at_their_address

#: set if LoRA runs without an accelerator
UNPINNED = "ASYNCRL_SGLANG_UNPINNED"


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    words = json.load(sys.stdin)
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    stop_at_own_tokens()
    load_plugins()
    if not applied():
        sys.exit("asyncrl's stop-token hook does not apply to this SGLang release; use a tested release")
    run_server(prepare_server_args(words))


if __name__ == "__mp_main__":  # in SGLang's child processes, which import this module
    end_with_parent()  # SGLang does so too, but only after the child's slow imports
    if os.getsid(os.getppid()) != os.getsid(0):  # the parent ended before that: orphans get a parent in another session
        os._exit(1)
    stop_at_own_tokens()
    listen_only_at_their_address()
if os.environ.get(UNPINNED):
    from asyncrl.cpu.sglang import correct_cpu_build

    correct_cpu_build()
if __name__ == "__main__":
    main()
