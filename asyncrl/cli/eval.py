"""Evaluates checkpoints on prompt files: ``asyncrl eval PATH … [--config FILE] [key=value …]``.

PATH is a run's folder (all of its checkpoints), one of its checkpoints, or a Hugging Face folder. Prompts, reward,
engine and sampling are those of the run or of FILE: `data.validation_files`, `reward`, `rollout`, `validation`. The
last line is a JSON object with all figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config


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
    overrides = [path for path in args.paths if "=" in path]
    try:
        return _evaluate(
            [Path(path) for path in args.paths if "=" not in path], args.config, args.out, overrides, arguments
        )
    except ConfigError as e:
        for problem in e.problems:
            print(f"config: {problem}", file=sys.stderr)
        return 2


def _evaluate(
    paths: Sequence[Path], config_file: str | None, out: Path | None, overrides: Sequence[str], arguments: Sequence[str]
) -> int:
    # heavy imports, after the arguments are known to be good
    from asyncrl.evaluation.checkpoints import CONFIG, export, find
    from asyncrl.models.config import CheckpointError

    models = [model for path in paths for model in find(path)]
    runs = list(dict.fromkeys(model.run for model in models))
    if config_file is None and (len(runs) != 1 or runs[0] is None):
        raise ConfigError(["--config: expected a file of options, as the paths are not all of one run"])
    config = load_config(config_file or runs[0] / CONFIG, overrides)  # type: ignore[operator]
    _check(config)
    _in_the_engines_environment(config, arguments)
    out = out or ((runs[0] / "eval") if len(runs) == 1 and runs[0] is not None else Path("eval"))
    out.mkdir(parents=True, exist_ok=True)
    figures, failed = {}, False
    for number, model in enumerate(models):
        with tempfile.TemporaryDirectory() as scratch:
            folder = model.folder
            try:
                if folder is None:
                    folder = Path(scratch) / model.name
                    export(model, folder)
                figures[model.name] = _answered(config, folder, model.name, out, first=number == 0)
            except CheckpointError as e:
                print(f"{model.name}: {e}", file=sys.stderr)
                failed = True
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"answers and figures: {out}", file=sys.stderr)
    print(json.dumps(figures))
    return 1 if failed else 0


def _answered(config: Config, folder: Path, name: str, out: Path, first: bool) -> dict[str, object]:
    """Figures of one model; prints its row and writes its answers."""
    from asyncrl.evaluation.evaluate import answer, by_source, estimates, evaluation_config, records
    from asyncrl.observability.telemetry.recorder import Recorder
    from asyncrl.rollouter.tokenizer import PromptTokenizer

    config = evaluation_config(config, folder)
    answers = asyncio.run(answer(config, Recorder("eval")))
    lines = records(name, answers, PromptTokenizer.of(config).hf.decode)
    with open(out / f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    samples = config.validation.samples
    rows = {name: estimates(answers, samples)}
    rows |= {f"  {source}": estimates(part, samples) for source, part in by_source(answers).items()}
    width = max(24, *map(len, rows))
    if first:
        print(f"{'':{width}} " + " ".join(f"{head:>16}" for head in rows[name]))
    for row, values in rows.items():
        print(f"{row:{width}} " + " ".join(f"{value!s:>16}" for value in values.values()), flush=True)
    failures = sum("failed" in line for line in lines)
    if failures:
        print(f"{name}: {failures} of {len(lines)} answers failed, see {out / name}.jsonl", file=sys.stderr)
    figures: dict[str, object] = {key: value.mean for key, value in rows[name].items()}
    figures |= {f"{key}_half_width": value.half_width for key, value in rows[name].items()}
    return figures | {"prompts": len(answers), "failed": failures}


def _check(config: Config) -> None:
    if not config.data.validates:
        raise ConfigError(["data.validation_files: expected the prompt files to evaluate on, found none"])


def _in_the_engines_environment(config: Config, arguments: Sequence[str]) -> None:
    """Continue in the interpreter of `rollout.engine.python`, if it is another one: the engine runs in this process."""
    from asyncrl.run.environments import interpreter

    python = interpreter(config.rollout.engine.python) if config.rollout.engine.python else sys.executable
    if python != sys.executable and os.environ.get("_ASYNCRL_EVAL") != python:
        environment = {**os.environ, "_ASYNCRL_EVAL": python}
        os.execve(python, [python, "-m", "asyncrl.cli.eval", *arguments], environment)


if __name__ == "__main__":
    sys.exit(main())
