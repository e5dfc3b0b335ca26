"""Evaluates models one after the other: a table, a file of answers for each, and all figures."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.load import CONFIG_FILE, ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.disk.files import write_whole
from asyncrl.evaluation.answers import Answers, EvaluationFailed, answer, evaluation_config
from asyncrl.evaluation.checkpoints import DRIVER, Evaluated, export, find, verify
from asyncrl.evaluation.estimates import Estimate, pass_at_k
from asyncrl.models.overridden import overridden
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.actor_client import first_leaf
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.run.checks import check
from asyncrl.run.environments import interpreter
from asyncrl.types.samples import Sample

FIGURES = "figures.json"  #: in the folder for results


def plan(
    paths: Sequence[Path], config_file: str | None, out: Path | None, overrides: Sequence[str]
) -> tuple[Config, list[Evaluated], Path]:
    """Options, models under names of their own, and the folder for results. Raises ConfigError."""
    if not (models := list(dict.fromkeys(model for path in paths for model in find(path)))):
        raise ConfigError(["expected a run's folder, a checkpoint or a Hugging Face folder, found none"])
    run = models[0].run if len({model.run for model in models}) == 1 else None
    if config_file is None and run is None:
        raise ConfigError(["--config: expected a file of options, as the paths are not all of one run"])
    config = load_config(config_file or run / CONFIG_FILE, overrides)  # type: ignore[operator]
    if not config.data.validates:
        raise ConfigError(["data.validation_files: expected the prompt files to evaluate on, found none"])
    return config, _named_apart(models), out or (Path("eval") if run is None else run / "eval")


def _named_apart(models: Sequence[Evaluated]) -> list[Evaluated]:
    """Of equal names each gets that of the folder around it, too."""
    counts = Counter(model.name for model in models)
    where = lambda model: (model.run or model.folder.parent).name
    named = [replace(m, name=f"{where(m)}-{m.name}") if counts[m.name] > 1 else m for m in models]
    again = Counter(model.name for model in named)
    return [replace(m, name=f"{i}-{m.name}") if again[m.name] > 1 else m for i, m in enumerate(named)]


def in_the_engines_environment(config: Config, command: Sequence[str]) -> None:
    """Go on in the interpreter of `rollout.engine.python` if it is another one, as the engine runs in this process.
    ``command``: the module that runs, and its arguments. Raises ConfigError if there is none."""
    python = interpreter(config.rollout.engine.python)
    if not python or DRIVER in os.environ:  # the second time, whatever it calls itself
        return
    os.environ[DRIVER] = sys.executable
    sys.stdout.flush()
    try:
        os.execvp(python, [python, "-m", *command])
    except OSError as e:
        raise ConfigError([f"rollout.engine.python: {python} cannot be run ({e.strerror})"]) from None


def evaluate(config: Config, models: Sequence[Evaluated], out: Path) -> int:
    """Returns the exit status: 1 if a model could not be evaluated, or its answers not written; the others are. Figures
    are written after each. Raises ConfigError for options that suit none."""
    check(evaluation_config(config, models[0].folder or Path(config.model.path)))
    figures: dict[str, dict[str, Any]] = {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / FIGURES).open("a") as file:  # keeps those of an earlier evaluation until there are new ones
            if not file.tell():
                file.write("{}\n")
    except OSError as e:
        raise ConfigError([f"--out: expected a folder to write to, found {out} ({e.strerror}); name another"]) from None
    status = 0
    for model in models:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                verify(model)
                if (folder := model.folder) is None:
                    export(model, folder := Path(scratch) / model.name)
                elif model.run is None and config.model.overrides:  # a run's checkpoints have them already
                    folder = overridden(folder, config.model.overrides, Path(scratch) / model.name)
                _evaluate_one(config, folder, model.name, out, figures)
        except Exception as e:
            status, error = 1, first_leaf(e)
            problems = error.problems if isinstance(error, ConfigError) else [f"{type(error).__name__}: {error}"]
            print("\n".join(f"{model.name}: {problem}" for problem in problems), file=sys.stderr)
    print(f"answers and figures: {out}", file=sys.stderr)
    print(json.dumps(figures))
    return status


def _evaluate_one(config: Config, folder: Path, name: str, out: Path, figures: dict[str, dict[str, Any]]) -> None:
    """Adds one model's figures to ``figures``, prints its rows, and writes figures and answers. Raises EvaluationFailed
    if no prompt was answered."""
    config = evaluation_config(config, folder)
    answers = asyncio.run(answer(config, Recorder("eval")))
    lines = records(name, answers, PromptTokenizer.of(config).hf.decode)
    samples = config.validation.samples
    failed, left_out = sum("failed" in line for line in lines), len(answers) - len(_scored(answers, samples))
    if found := estimates(answers, samples):
        sources = {source: estimates(part, samples) for source, part in by_source(answers).items()}
        figures[name] = _figures(found) | {"prompts": len(answers), "left_out": left_out, "failed": failed}
        if sources:
            figures[name]["sources"] = {source: _figures(values) for source, values in sources.items()}
        _write_figures(out, figures)
        rows = {name: found} | {f"  {source}": values for source, values in sources.items()}
        _print_rows(rows, head=len(figures) == 1)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # a lone surrogate (half an emoji, decoded from a truncated response) is invalid UTF-8
    write_whole(out / f"{name}.jsonl", text.encode("utf-8", "replace").decode("utf-8"))
    if not found:
        raise EvaluationFailed(f"no prompt has {samples} scored answers, {failed} of {len(lines)} answers failed")
    if failed:
        print(
            f"{name}: {failed} of {len(lines)} answers failed, so {left_out} of {len(answers)} prompts are left out of "
            f"the figures, see {out / name}.jsonl",
            file=sys.stderr,
        )


def _print_rows(rows: Mapping[str, Mapping[str, Estimate]], head: bool) -> None:
    if head:
        print(f"{'':24} " + " ".join(f"{name:>16}" for name in next(iter(rows.values()))))
    for row, values in rows.items():
        print(f"{row:24} " + " ".join(f"{value!s:>16}" for value in values.values()), flush=True)


def _write_figures(out: Path, figures: Mapping[str, Any]) -> None:
    write_whole(out / FIGURES, json.dumps(figures, indent=2) + "\n")


def _figures(values: Mapping[str, Estimate]) -> dict[str, float | None]:
    """Means, and half widths of their intervals; null where there is none."""
    figures: dict[str, float | None] = {key: value.mean for key, value in values.items()}
    widths = {f"{key}_half_width": value.half_width for key, value in values.items()}
    return figures | {key: None if math.isnan(width) else width for key, width in widths.items()}


def records(name: str, answers: Answers, decode: Any) -> list[dict[str, Any]]:
    """One JSON object per answer."""
    found = []
    for prompt, samples in answers:
        for index, sample in enumerate(samples):
            record: dict[str, Any] = {
                "checkpoint": name,
                "prompt_id": prompt.prompt_id,
                "data_source": prompt.data_source,
                "prompt": prompt.text if prompt.text is not None else list(prompt.messages or ()),
                "answer": prompt.answer,
                "sample": index,
            }
            if isinstance(sample, Sample):
                record |= {
                    "response": [decode(sequence.tokens) for sequence in sample.sequences],
                    "response_tokens": sum(len(sequence.tokens) for sequence in sample.sequences),
                    "finish": sample.finish.name.lower(),
                    "success": sample.succeeded,
                    "reward": sample.reward,
                    "metrics": dict(sample.metrics),
                }
            else:
                record |= {"failed": sample.reason, "message": sample.message}
            found.append(record)
    return found


def estimates(answers: Answers, samples: int) -> dict[str, Estimate]:
    """Mean reward (``mean@n``), and ``pass@k`` for the powers of two up to ``samples``, over the prompts of which all
    answers were scored. Empty if there is none."""
    if not (whole := _scored(answers, samples)):
        return {}
    powers = [k for k in (2**i for i in range(samples.bit_length())) if k <= samples]
    ks = sorted({*powers, samples})
    found = {f"mean@{samples}": Estimate.of([sum(s.reward or 0.0 for s in made) / samples for made in whole])}
    for k in ks:
        successes = [sum(s.succeeded for s in made) for made in whole]
        found[f"pass@{k}"] = Estimate.of([pass_at_k(samples, count, k) for count in successes])
    return found


def _scored(answers: Answers, samples: int) -> list[list[Sample]]:
    """The answers to each prompt of which all were scored."""
    scored = [[s for s in made if isinstance(s, Sample)] for _, made in answers]
    return [made for made in scored if len(made) == samples]


def by_source(answers: Answers) -> Mapping[str, Answers]:
    """The answers of each data source, if there are several."""
    sources = list(dict.fromkeys(prompt.data_source for prompt, _ in answers))
    if len(sources) < 2:
        return {}
    return {source: [pair for pair in answers if pair[0].data_source == source] for source in sources}
