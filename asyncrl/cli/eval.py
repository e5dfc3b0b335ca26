"""Evaluates checkpoints on prompt files: ``asyncrl eval PATH … [--config FILE] [key=value …]``.

PATH is a run's folder (all of its checkpoints), one of its checkpoints, or a Hugging Face folder. Prompts, reward,
engine and sampling are those of the run or of FILE: `data.validation_files`, `reward`, `rollout`, `validation`. The
last line is a JSON object with all figures.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if an evaluation failed, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="asyncrl eval", description="Evaluates checkpoints on the prompts of data.validation_files."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="run folder, checkpoint of a run, Hugging Face folder")
    parser.add_argument("--config", help="YAML file of options; default: that of the run")
    parser.add_argument("--out", type=Path, help="folder for answers and figures; default: eval/ in the run's folder")
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_intermixed_args(arguments)
    # Path.exists raises for an override that is longer than a file's name may be
    overrides = [path for path in args.paths if "=" in path and not os.path.exists(path)]
    paths = [Path(path) for path in args.paths if path not in overrides]
    from asyncrl.evaluation.evaluate import evaluate, in_the_engines_environment, plan  # heavy

    try:
        config, models, out = plan(paths, args.config, args.out, overrides)
        in_the_engines_environment(config, [__spec__.name, *arguments])
        return evaluate(config, models, out)
    except ConfigError as e:
        for problem in e.problems:
            print(f"config: {problem}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
