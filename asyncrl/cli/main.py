"""Command line: ``asyncrl train|scale|eval|simulate|report|ledger|trajectories|data|sandbox``."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from asyncrl import __version__

_COMMANDS = {
    "train": ("asyncrl.fully_async_main", "start a run, or resume one"),
    "scale": ("asyncrl.cli.scale", "change the number of replicas of a run while it goes on"),
    "eval": ("asyncrl.cli.eval", "evaluate checkpoints on prompt files: pass@k with confidence intervals"),
    "simulate": ("asyncrl.cli.simulate", "predict the speed of a configuration from a measured run"),
    "report": ("asyncrl.cli.report", "rebuild a run's report, at any time"),
    "ledger": ("asyncrl.cli.ledger", "account for every group of a run"),
    "trajectories": ("asyncrl.cli.trajectories", "show samples of a run, turn by turn"),
    "data": ("asyncrl.cli.data", "make prompt files of published data sets"),
    "sandbox": ("asyncrl.cli.sandbox", "which sandboxes serve here; serve them to others"),
}

_READERS = ("ledger", "trajectories")  # of files only: no other pipe of theirs can break


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit status."""
    parser = argparse.ArgumentParser(
        prog="asyncrl",
        description="Asynchronous RL post-training of language models.",
        epilog="\n".join(f"  {name:<14}{help}" for name, (_, help) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncrl {__version__}")
    parser.add_argument("command", choices=_COMMANDS, metavar="{" + ",".join(_COMMANDS) + "}")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own; see `asyncrl COMMAND --help`")
    args = parser.parse_args(argv)
    if (here := os.getcwd()) not in sys.path:  # as with `python -m`: parts may be modules of the working directory
        sys.path.insert(0, here)
    module, _ = _COMMANDS[args.command]
    command = importlib.import_module(module)  # imports the chosen command only
    if args.command not in _READERS:
        return command.main(args.arguments)
    try:
        status = command.main(args.arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has what it wants
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the interpreter's end
        return 128 + signal.SIGPIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
