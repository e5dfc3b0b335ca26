"""Prompts that a data source generates, as far as that needs no package: rows become prompts, options are checked."""

import importlib.util
from dataclasses import replace

import pytest

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import DataConfig, RewardConfig
from asyncrl.data.load import load_run_prompts
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.data.sources import reasoning_gym
from asyncrl.run.preflight import preflight
from tests.support.rewards import import_problem
from tests.support.tiny import make_inputs, overrides


@pytest.fixture
def package(monkeypatch):
    """Stands for the process that makes the items, and keeps what it was asked for. Item n of a task asks for n, of
    training and held-out alike from 0."""
    asked = []

    def made(wanted):
        asked.append(wanted)
        tasks, levels = wanted["tasks"], wanted["levels"]
        which = [(task, level) for task in tasks for level in (range(levels) if levels else [None])]
        item = lambda task, n: {"question": f"{task}{n}? ", "answer": "a" if n else None}
        return {
            key: [
                {"task": task, "level": level, "number": n, "item": item(task, n)}
                for task, level in which
                for n in range(wanted[key][1])
            ]
            for key in ("train", "held_out")
        }

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(reasoning_gym, "_made", made)
    return asked


def data(source="reasoning_gym:legs", **args):
    return DataConfig(source=source, source_args=args)


def test_items_of_a_task_are_prompts_that_keep_what_its_verifier_needs(package):
    train, held_out = load_run_prompts(data(size=2, held_out=4, instruction="Go."))
    assert [(p.prompt_id, p.answer, p.data_source) for p in train] == [("legs/0", "", "legs"), ("legs/1", "a", "legs")]
    assert train[1].messages == ({"role": "user", "content": "legs1?\n\nGo."},)
    assert train[1].extra == {"task": "legs", "item": {"question": "legs1? ", "answer": "a"}}
    assert {p.prompt_id for p in held_out}.isdisjoint(p.prompt_id for p in train)
    (plain, _), _ = load_run_prompts(replace(data(size=2, held_out=4), apply_chat_template=False))
    assert (plain.messages, plain.text) == ((), f"legs0?\n\n{reasoning_gym.INSTRUCTION}")


def test_held_out_items_have_other_seeds_and_no_question_of_training(package):
    spans = set()
    for seed in (0, 1, 99):
        train, held_out = load_run_prompts(data(size=2, held_out=5, seed=seed))
        assert {p.messages[0]["content"] for p in train}.isdisjoint(p.messages[0]["content"] for p in held_out)
        for first, count in (package[-1]["train"], package[-1]["held_out"]):
            assert 0 <= first < first + count <= first + reasoning_gym.SPAN < 2**32
            spans.add(first // reasoning_gym.SPAN)
    assert len(spans) == 6  # no two meet
    with pytest.raises(DataError, match="held_out: each of the 1 held-out questions of legs is also one of training"):
        load_run_prompts(data(size=50, held_out=1))


def test_several_tasks_are_data_sources_and_their_levels_classes(package):
    config = data("reasoning_gym:legs, sums", size=3, held_out=9, levels=2)
    train, _ = load_run_prompts(config)
    assert {p.data_source for p in train} == {"legs", "sums"}
    assert train[3].prompt_id == "legs/1/0"
    assert {p.extra["level"] for p in train} == {0, 1}
    mixed = PromptOrder(train, seed=0, mixture={"legs": 1.0, "sums": 3.0})
    assert [next(mixed).data_source for _ in range(8)].count("sums") == 6
    by = replace(config.curriculum, by="task_level")
    assert PromptOrder(train, seed=0, curriculum=by).classes == ["legs/0", "legs/1", "sums/0", "sums/1"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"source": "reasoning_gym"}, "data.source: expected NAME:TASK, or several different tasks"),
        ({"source": "reasoning_gym:a,,b"}, "data.source: expected NAME:TASK"),
        ({"source": "reasoning_gym:a,a"}, "data.source: expected NAME:TASK"),
        ({"source": "gym:a"}, "a name among reasoning_gym; found 'gym:a'"),
        ({"sizes": 3}, "data.source_args: got an unexpected keyword argument 'sizes'"),
        ({"size": 0}, "data.source_args.size: expected 1 to 10000000, found 0"),
        ({"levels": 1.5}, "data.source_args.levels: expected 0 to 100, found 1.5"),
        ({"seed": 100}, "data.source_args.seed: expected 0 to 99, found 100"),
        ({"config": {"other": {}}}, "data.source_args.config: expected tasks of data.source, found other"),
    ],
)
def test_wrong_options_of_a_source_are_refused(package, options, problem):
    with pytest.raises(DataError) as refused:
        load_run_prompts(data(**options))
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


def test_prompts_come_from_files_or_a_source():
    options = ("model.path=m", "reward.function=arithmetic")
    with pytest.raises(ConfigError, match=r"data.source: expected either source or train_files, found both"):
        load_config(None, [*options, "data.source=reasoning_gym:legs", "data.train_files=[a.jsonl]"])
    with pytest.raises(ConfigError, match=r"data.source_args: expected none without data.source, found size"):
        load_config(None, [*options, "data.source_args.size=3"])


@pytest.mark.parametrize(
    ("args", "files", "validates"), [({}, [], True), ({"held_out": 0}, [], False), ({"held_out": 0}, ["a"], True)]
)
def test_a_source_s_held_out_prompts_are_validated_unless_there_are_none(args, files, validates):
    assert replace(data(**args), validation_files=files).validates == validates


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="tests what happens without it")
def test_without_the_package_source_and_reward_are_refused_with_the_command_that_installs_it(tmp_path):
    inputs = make_inputs(tmp_path)
    more = ("data.train_files=[]", "data.source=reasoning_gym:leg_counting", "reward.function=reasoning_gym")
    with pytest.raises(ConfigError) as refused:
        preflight(load_config(None, overrides(inputs, tmp_path / "run", *more)), 8)
    command = (
        r"needs the package reasoning-gym, which is not installed; `pip install 'reasoning-gym>=0.1.25,<0.2'` adds"
    )
    source, reward = str(refused.value).splitlines()
    assert source.startswith(f"data.source: reasoning_gym {command}")
    assert reward.startswith(f"reward.function: reasoning_gym {command}")
    assert reward == import_problem(RewardConfig(function="reasoning_gym"))
