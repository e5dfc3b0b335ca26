"""Guessing task: disjoint splits, demonstrations of which some play well, in the very text of the chat template."""

import ast
import re
from itertools import islice
from pathlib import Path

import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data import generated
from asyncrl.data.guess import CALL, CALLED, GUESS, Problem, answer, demonstrations, main, turn
from asyncrl.data.prompts import load_prompts
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.agent_processes.pool import AgentOutcome
from asyncrl.rollouter.tokenizer import PromptTokenizer
from tests.support.endpoint import EndpointSystem, chat, made, writing


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    task = {"demonstrations": "asyncrl.data.guess:demonstrations", "tokens": "asyncrl.data.guess:TOKENS"}
    return make_checkpoint(tmp_path_factory.mktemp("guess-mimo"), warm_start_steps=0, **task)


def played(text):
    """(bounds or None, guess) of each turn, and what the tool answered."""
    turns = re.findall(r'(?:(\d+)\.\.(\d+))?<tool_call>{"name": "guess", "arguments": {"n": (\d+)}}', text)
    guesses = [((int(low), int(high)) if low else None, int(n)) for low, high, n in turns]
    return guesses, re.findall(r"tool\n(.*?)<", text)


def test_careful_demonstrations_heed_each_answer_and_careless_ones_seldom():
    def share_heeding(careful):
        heeding = []
        for messages, text, _ in islice(demonstrations(0, careful), 1000):
            low, high = map(int, re.findall(r"\d+", messages[0]["content"]))
            turns, answers = played(text)
            heeding.append(turns[0][0] is not None)
            for (bounds, n), said in zip(turns, [*answers, None]):
                assert low < n < high
                assert bounds == ((low, high) if heeding[-1] else None)
                if heeding[-1]:
                    low, high = (n, high) if said == f"higher than {n}" else (low, n)
        return sum(heeding) / len(heeding)

    assert share_heeding(careful=True) == 1.0
    assert 0.1 < share_heeding(careful=False) < 0.2


def test_the_tool_says_where_the_number_is():
    problem = Problem(22, 43, 30)
    assert [answer(problem, n) for n in (29, 30, 31)] == ["higher than 29", "correct", "lower than 31"]
    agent = (Path(__file__).parent.parent / "docs/examples/guess_agent.py").read_text()
    assert repr(GUESS) == repr(ast.literal_eval(agent.partition("GUESS = ")[2].partition("\n\n\n")[0]))


def test_written_files_are_disjoint_and_determined_by_the_seed(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        main(["--out", str(tmp_path / name), "--train", "400", "--heldout", "100", "--seed", str(seed)])
    files = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*.jsonl")}
    assert files["a/train.jsonl"] == files["b/train.jsonl"] != files["c/train.jsonl"]
    problems = {name: text.splitlines() for name, text in files.items()}
    heldout = {line for name, lines in problems.items() if "heldout" in name for line in lines}
    assert not heldout & {line for name, lines in problems.items() if "train" in name for line in lines}
    assert len(set(problems["a/train.jsonl"])) == 400
    assert len(set(problems["a/heldout.jsonl"])) == 100
    for prompt in load_prompts([tmp_path / "a/heldout.jsonl"], DataConfig()):
        low, high = map(int, re.findall(r"\d+", prompt.messages[0]["content"]))
        assert Problem(low, high, int(prompt.answer)).heldout


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_more_problems_than_there_are_is_one_line(tmp_path, capsys, monkeypatch, name):
    monkeypatch.setattr(generated, "MOST_DRAWS", 4000)
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(tmp_path), f"--{name}", "3000"])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"--{name}: expected at most \d+ different problems, found 3000", line)
    assert not (tmp_path / f"{name}.jsonl").exists()


async def test_the_endpoint_finds_the_calls_and_bridges_to_the_text_of_a_demonstration(model):
    messages, text, tools = next(d for d in demonstrations(3, careful=True) if d[1].count("tool\n") == 2)
    turns, answers = played(text)

    async def agent(task, http):
        said = list(messages)
        for result in (*answers, None):
            message = await chat(task, http, said, tools=tools)
            (call,) = message["tool_calls"]
            said += [message, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        return AgentOutcome(1.0, {})

    async with EndpointSystem(model, agent, writing(*(turn(n, bounds) for bounds, n in turns))) as system:
        sample = await made(system)
        assert sample.reward == 1.0
        assert system.counted() == {"rendered": 1, "bridged": 2}
        prompt, sampled = system.policy.log[-1]
        assert system.tokenizer.hf.decode([*prompt, *sampled[:-1]]).endswith(text)


def test_a_turn_is_few_tokens_with_one_for_each_number(model):
    tokens = PromptTokenizer(model).hf.tokenize(turn(30, (22, 43)))
    assert tokens == ["22", "..", "43", "<tool_call>", CALL, "30", CALLED, "</tool_call>"]
