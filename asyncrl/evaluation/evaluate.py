"""Evaluates models one after the other: a table, a file of answers for each, and all figures."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.evaluation.answers import Answers, EvaluationFailed, answer, evaluation_config
from asyncrl.evaluation.checkpoints import CONFIG, Evaluated, export, find
from asyncrl.evaluation.estimates import Estimate, pass_at_k
from asyncrl.models.config import CheckpointError
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.run.environments import interpreter
from asyncrl.types.samples import Sample


def plan(
    paths: Sequence[Path], config_file: str | None, out: Path | None, overrides: Sequence[str]
) -> tuple[Config, list[Evaluated], Path]:
    """Options, models, and the folder for results. Raises ConfigError."""
    models = [model for path in paths for model in find(path)]
    run = models[0].run if models and len({model.run for model in models}) == 1 else None
    if config_file is None and run is None:
        raise ConfigError(["--config: expected a file of options, as the paths are not all of one run"])
    config = load_config(config_file or run / CONFIG, overrides)  # type: ignore[operator]
    if not config.data.validates:
        raise ConfigError(["data.validation_files: expected the prompt files to evaluate on, found none"])
    return config, models, out or (Path("eval") if run is None else run / "eval")


def in_the_engines_environment(config: Config, command: Sequence[str]) -> None:
    """Go on in the interpreter of `rollout.engine.python` if it is another one, as the engine runs in this process.
    ``command``: the module that runs, and its arguments."""
    python = interpreter(config.rollout.engine.python) if config.rollout.engine.python else sys.executable
    if python != sys.executable:
        sys.stdout.flush()
        os.execv(python, [python, "-m", *command])


def evaluate(config: Config, models: Sequence[Evaluated], out: Path) -> int:
    """Returns the exit status: 1 if a model could not be evaluated. Raises ConfigError."""
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, float]] = {}
    for model in models:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                if (folder := model.folder) is None:
                    export(model, folder := Path(scratch) / model.name)
                figures[model.name] = _evaluated(config, folder, model.name, out, first=not figures)
        except (CheckpointError, EvaluationFailed) as e:
            print(f"{model.name}: {e}", file=sys.stderr)
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"answers and figures: {out}", file=sys.stderr)
    print(json.dumps(figures))
    return 0 if len(figures) == len(models) else 1


def _evaluated(config: Config, folder: Path, name: str, out: Path, first: bool) -> dict[str, float]:
    """Figures of one model; prints its rows and writes its answers."""
    config = evaluation_config(config, folder)
    answers = asyncio.run(answer(config, Recorder("eval")))
    lines = records(name, answers, PromptTokenizer.of(config).hf.decode)
    with open(out / f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    samples = config.validation.samples
    rows = {name: estimates(answers, samples)}
    rows |= {f"  {source}": estimates(part, samples) for source, part in by_source(answers).items()}
    if first:
        print(f"{'':24} " + " ".join(f"{head:>16}" for head in rows[name]))
    for row, values in rows.items():
        print(f"{row:24} " + " ".join(f"{value!s:>16}" for value in values.values()), flush=True)
    if failed := sum("failed" in line for line in lines):
        print(f"{name}: {failed} of {len(lines)} answers failed, see {out / name}.jsonl", file=sys.stderr)
    figures = {key: value.mean for key, value in rows[name].items()}
    figures |= {f"{key}_half_width": value.half_width for key, value in rows[name].items()}
    return figures | {"prompts": len(answers), "failed": failed}


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
    scored = [[s for s in made if isinstance(s, Sample)] for _, made in answers]
    whole = [made for made in scored if len(made) == samples]
    if not whole:
        return {}
    powers = [k for k in (2**i for i in range(samples.bit_length())) if k <= samples]
    ks = sorted({*powers, samples})
    found = {f"mean@{samples}": Estimate.of([sum(s.reward or 0.0 for s in made) / samples for made in whole])}
    for k in ks:
        successes = [sum(s.succeeded for s in made) for made in whole]
        found[f"pass@{k}"] = Estimate.of([pass_at_k(samples, count, k) for count in successes])
    return found


def by_source(answers: Answers) -> Mapping[str, Answers]:
    """The answers of each data source, if there are several."""
    sources = list(dict.fromkeys(prompt.data_source for prompt, _ in answers))
    if len(sources) < 2:
        return {}
    return {source: [pair for pair in answers if pair[0].data_source == source] for source in sources}
