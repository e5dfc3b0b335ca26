"""Tasks of the package reasoning-gym, with its verifiers: ``data.source: reasoning_gym:leg_counting,chain_sum``.

    data:
      source: reasoning_gym:leg_counting
      source_args: {size: 500, levels: 4}     # 500 items of each of the first four levels of the task's curriculum
      curriculum: {by: level}                 # they come by success: harder ones as easier ones are solved
    reward:
      function: reasoning_gym

A row's ``data_source`` is its task, so that ``data.mixture`` gives shares of tasks. Columns: ``task``, ``item``, which
the verifier gets, and with levels ``level`` and ``task_level``, such as leg_counting/2, for a curriculum over several
tasks.

Items are made in a process of their own with a fixed hash seed: some tasks depend on the order of sets and on the
global random state, and would differ from process to process.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from asyncrl.data.sources.base import Row, SourceError

PACKAGE = "reasoning-gym>=0.1.25,<0.2"
INSTRUCTION = "Reason step by step, and give the final answer between <answer> and </answer>."
TIMEOUT_S = 600.0  # to make all items; few tasks take seconds for each
SPAN = (
    10_000_000  # an item's seed is its position after that of its data set: those of training never meet held-out ones
)
MAX_SEED = 99  # NumPy's seeds have 32 bits


class ReasoningGym:
    def rows(
        self,
        tasks: Sequence[str],
        held_out: int = 64,
        size: int = 500,
        levels: int = 0,
        seed: int = 0,
        instruction: str = INSTRUCTION,
        config: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> tuple[list[Row], list[Row]]:
        """``size``, ``held_out``: items of each task, or of each of its levels. ``levels``: the first so many of its
        curriculum; 0: none, the task as its configuration makes it. ``config``: options of a task's configuration, by
        its name. A held-out question that is also one of training is left out."""
        for name, value, least, most in (
            ("size", size, 1, SPAN),
            ("held_out", held_out, 0, SPAN),
            ("levels", levels, 0, 100),
            ("seed", seed, 0, MAX_SEED),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise SourceError(f"data.source_args.{name}: expected {least} to {most}, found {value!r}")
        if unknown := sorted(set(config or {}) - set(tasks)):
            raise SourceError(f"data.source_args.config: expected tasks of data.source, found {', '.join(unknown)}")
        if importlib.util.find_spec("reasoning_gym") is None:
            raise SourceError(
                "data.source: reasoning_gym needs the package reasoning-gym, which is not installed; "
                f"`pip install '{PACKAGE}'` adds it (a part of it is compiled with a C compiler)"
            )
        wanted = {"tasks": list(tasks), "levels": levels, "config": dict(config or {})}
        asked = {"train": (2 * seed * SPAN, size), "held_out": ((2 * seed + 1) * SPAN, held_out)}
        made = _made(wanted | asked)
        train = [_row("", item, instruction) for item in made["train"]]
        known = {row.question for row in train}
        others = [_row("held_out/", item, instruction) for item in made["held_out"]]
        others = [row for row in others if row.question not in known]
        for task in tasks if held_out else ():
            if not any(row.data_source == task for row in others):
                raise SourceError(
                    f"data.source_args.held_out: each of the {held_out} held-out questions of {task} is also one of "
                    f"training; expected fewer than {size} of training, or 0"
                )
        return train, others


def _row(prefix: str, made: Mapping[str, Any], instruction: str) -> Row:
    task, level, number, item = made["task"], made["level"], made["number"], made["item"]
    name = task if level is None else f"{task}/{level}"
    columns = {"task": task, "item": item} | ({} if level is None else {"level": level, "task_level": name})
    question = f"{item['question'].strip()}\n\n{instruction}".strip()
    # some tasks have many right answers and give none
    return Row(f"{prefix}{name}/{number}", question, str(item["answer"] or ""), task, columns)


def _made(wanted: Mapping[str, Any]) -> Any:
    """What `main` makes of ``wanted``. Raises SourceError."""
    command = [sys.executable, "-P", "-m", __name__, json.dumps(wanted)]
    path = os.pathsep.join(dict.fromkeys([os.getcwd(), *map(os.path.abspath, filter(None, sys.path))]))
    env = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": path}
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SourceError(
            f"data.source_args: reasoning-gym made no {', '.join(wanted['tasks'])} within {TIMEOUT_S:g} s; expected a "
            "smaller size, fewer levels, or other tasks"
        ) from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SourceError(last if last.startswith("data.") else f"data.source: reasoning-gym failed: {last}")
    return pickle.loads(done.stdout)


def main() -> None:
    """``python -m asyncrl.data.sources.reasoning_gym JSON``: pickles items to standard output; or says in the last line
    of standard error what is wrong."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # some tasks print
    wanted = json.loads(sys.argv[1])
    try:
        made = {key: list(_items(wanted, *wanted[key])) for key in ("train", "held_out")}
    except SourceError as e:
        sys.exit(f"\n{e}")
    with output:
        pickle.dump(made, output)


def _items(wanted: Mapping[str, Any], seed: int, size: int) -> Iterator[dict[str, Any]]:
    for task in wanted["tasks"]:
        for level in range(wanted["levels"]) if wanted["levels"] else (None,):
            random.seed(seed)
            try:
                dataset = _dataset(task, level, dict(wanted["config"].get(task, {}), seed=seed, size=max(size, 1)))
                for number in range(size):
                    yield {"task": task, "level": level, "number": number, "item": dataset[number]}
            except SourceError:
                raise
            except Exception as e:  # a task may raise anything
                which = task if level is None else f"{task} at level {level}"
                raise SourceError(
                    f"data.source_args: {which}: {type(e).__name__}: {' '.join(str(e).split())}"
                ) from None


def _dataset(task: str, level: int | None, options: dict[str, Any]) -> Any:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset

    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)
        raise SourceError(f"data.source: expected a task of reasoning-gym such as {', '.join(close)}; found {task!r}")
    if level is None:
        return create_dataset(task, **options)
    curriculum = create_curriculum(task) if task in CURRICULA else None
    most = max((len(a.levels) for a in curriculum.attributes.values()), default=0) if curriculum else 0
    if curriculum is None or level >= most:
        raise SourceError(f"data.source_args.levels: expected at most {most} for {task}, found more")
    curriculum.set_global_level(level)
    return DATASETS[task][0](config=curriculum.generate_configuration(options))


SOURCE = ReasoningGym()

if __name__ == "__main__":
    main()
