"""Tasks of reasoning-gym with the package itself: its items, levels and verifiers, and a whole run."""

import re

import numpy as np
import pytest

from asyncrl.config.schema import CurriculumConfig, DataConfig, RewardConfig
from asyncrl.data.load import load_run_prompts
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import DataError
from asyncrl.data.sources.base import generated
from asyncrl.rollouter.rewards.base import Answer
from asyncrl.rollouter.rewards.pool import RewardPool
from tests.support.faults import audit, starting
from tests.support.rewards import PROMPT
from tests.support.tiny import make_inputs

pytestmark = [pytest.mark.gym, pytest.mark.timeout(600)]


def load(tasks, **args):
    return load_run_prompts(DataConfig(source=f"reasoning_gym:{tasks}", source_args=args))


async def scored(*answers):
    pool = RewardPool(RewardConfig(function="reasoning_gym", timeout_s=120))
    await pool.start()
    try:
        return [(await pool.score([answer]))[0] for answer in answers]
    finally:
        await pool.close()


def test_each_task_gives_the_same_items_in_each_process_and_takes_its_own_answers():
    from reasoning_gym.factory import DATASETS, get_score_answer_fn

    tasks = sorted(set(DATASETS) - {"composite"})  # which needs a configuration
    rows, _ = generated(f"reasoning_gym:{','.join(tasks)}", {"size": 2, "held_out": 0})
    again, _ = generated(f"reasoning_gym:{','.join(tasks)}", {"size": 2, "held_out": 0})
    assert len(tasks) > 100
    assert [row[:4] for row in rows] == [row[:4] for row in again]
    scores = {
        row.data_source: get_score_answer_fn(row.data_source)(row.answer, row.columns["item"])
        for row in rows
        if row.columns["item"]["answer"] is not None
    }
    assert len(scores) > 95
    assert {task: score for task, score in scores.items() if score != 1.0} == {}


def test_training_and_held_out_questions_differ_and_depend_on_the_seed():
    (train, held_out), (other, _) = (load("leg_counting", size=30, held_out=20, seed=seed) for seed in (0, 1))
    questions = [{p.messages[0]["content"] for p in prompts} for prompts in (train, held_out, other)]
    assert [len(found) for found in questions] == [30, 20, 30]
    assert len(set.union(*questions)) == 80


def test_levels_are_those_of_the_task_s_curriculum():
    train, held_out = load("spell_backward,leg_counting", size=20, held_out=2, levels=3)
    assert len(train) == 2 * 3 * 20
    assert {p.extra["task_level"] for p in train} >= {
        p.extra["task_level"] for p in held_out
    }  # some may be in training
    length = {
        key: np.mean([len(p.messages[0]["content"]) for p in train if p.extra["task_level"] == key])
        for key in ("leg_counting/0", "leg_counting/1", "leg_counting/2")
    }
    assert length["leg_counting/0"] < length["leg_counting/1"] < length["leg_counting/2"]


def test_harder_levels_come_more_often_as_easier_ones_are_solved():
    """The policy solves a level with a probability that rises as it learns, later for a harder one."""
    train, _ = load("leg_counting", size=50, held_out=0, levels=4)
    order = PromptOrder(train, seed=0, curriculum=CurriculumConfig(by="level", window=16))
    rng, drawn = np.random.default_rng(0), []
    for version in range(150):
        order.version = version
        prompts = [next(order) for _ in range(4)]
        for prompt in prompts:
            skill = version / 30
            solved = rng.random(8) < 1 / (1 + np.exp(4 * (prompt.extra["level"] + 0.5 - skill)))
            order.ended(prompt.uid, float(solved.mean()))
            drawn.append(prompt.extra["level"])
    easy, middle, hard = (np.mean(part) for part in (drawn[40:120], drawn[240:320], drawn[400:480]))
    assert easy + 0.5 < middle
    assert middle + 0.5 < hard


@pytest.mark.parametrize(
    ("tasks", "args", "problem"),
    [
        ("leg_count", {}, "data.source: expected a task of reasoning-gym such as leg_counting"),
        ("leg_counting", {"levels": 99}, "data.source_args.levels: expected at most 36 for leg_counting, found more"),
        ("acre", {"levels": 1}, "data.source_args.levels: expected at most 0 for acre, found more"),
        (
            "leg_counting",
            {"config": {"leg_counting": {"legs": 3}}},
            "data.source_args: leg_counting: TypeError: LegCountingConfig.__init__() got an unexpected",
        ),
        (
            "leg_counting",
            {"config": {"leg_counting": {"min_animals": 0}}},
            "data.source_args: leg_counting: AssertionError: min_animals must be positive",
        ),
    ],
)
def test_what_the_package_cannot_make_is_refused_in_one_line(tasks, args, problem):
    with pytest.raises(DataError) as refused:
        load(tasks, **args)
    assert str(refused.value).startswith(problem)
    assert "\n" not in str(refused.value)


async def test_the_verifier_scores_the_last_answer_in_tags():
    (prompt, other), _ = load("leg_counting", size=2, held_out=0)
    right, wrong = f"<answer>{prompt.answer}</answer>", "<answer>-1</answer>"
    results = await scored(
        Answer(prompt, f"{wrong} no: {right}"),
        Answer(prompt, f"{right} no: {wrong}"),
        Answer(prompt, prompt.answer),
        Answer(other, f"<answer>\n{other.answer} </answer>"),
        Answer(PROMPT, right),
    )
    assert [(r.reward, r.metrics) for r in results[:4]] == [
        (1.0, {"accuracy": 1.0, "answered": 1.0}),
        (0.0, {"accuracy": 0.0, "answered": 1.0}),
        (0.0, {"accuracy": 0.0, "answered": 0.0}),
        (1.0, {"accuracy": 1.0, "answered": 1.0}),
    ]
    assert "expected the columns task and item of data.source=reasoning_gym:TASK" in results[4].message


def test_a_run_trains_on_generated_prompts_and_has_the_same_after_a_death_and_when_resumed(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    options = (
        "data.train_files=[]",
        "data.source=reasoning_gym:chain_sum,spell_backward",
        "data.source_args={size: 20, held_out: 3, levels: 2, instruction: ''}",
        "data.mixture={chain_sum: 1, spell_backward: 3}",
        "reward.function=reasoning_gym",
        "reward.timeout_s=60",
        "rollout.engine.max_context_tokens=512",
        "async_training.staleness_threshold=0",
        "trainer.total_steps=24",
    )
    with starting(inputs, tmp_path / "run", *options) as start:
        run = start()
        run.until_trained(2)
        run.kill("rollouter")
        run.until_trained(6)
        run.close()
        run = start()
        assert run.wait(280) == 0, run.text
    audit(run.folder, [2] * 24, staleness_bound=0)
    for source in ("chain_sum", "spell_backward"):
        assert run.column(f"rollout/source/{source}/reward")
    assert run.column("rollout/answered")
    assert run.column("validation/answered")


@pytest.mark.slow
def test_a_run_with_a_curriculum_draws_from_all_levels_of_its_tasks(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    options = (
        "data.train_files=[]",
        "data.source=reasoning_gym:chain_sum,spell_backward",
        "data.source_args={size: 20, held_out: 0, levels: 2, instruction: ''}",
        "data.curriculum.by=task_level",
        "reward.function=reasoning_gym",
        "rollout.engine.max_context_tokens=512",
        "trainer.total_steps=2",
    )
    with starting(inputs, tmp_path / "run", *options) as start:
        run = start()
        assert run.wait(280) == 0, run.text
    found = re.findall(r"(?:chain_sum|spell_backward)/[01]/share", (run.folder / "metrics.jsonl").read_text())
    assert len(set(found)) == 4
    assert run.column("validation/answered") == []
