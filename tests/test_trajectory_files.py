"""Samples for people: their rows, the Parquet files, the filters, and `asyncrl trajectories`."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.algorithms.rewards import RewardOptions
from asyncrl.cli.trajectories import main
from asyncrl.observability.sinks.trajectories import MAX_FAILED, TrajectorySink
from asyncrl.observability.telemetry.recorder import MAX_FAILURES, Batch, Failure, Recorder
from asyncrl.observability.trajectories import trajectory_row
from asyncrl.observability.trajectory_files import Filter, read, write_step
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.trainer.batches import as_trained
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan


def decode(tokens) -> str:
    return "".join(map(chr, tokens))


def drawn(text: str, *spans: VersionSpan) -> Completion:
    tokens = np.array([ord(c) for c in text], np.int32)
    logprobs = np.full(len(tokens), -0.5, np.float32)
    return Completion(tokens, logprobs, list(spans) or [VersionSpan(0, PolicyVersion(0, 3))], FinishReason.STOP)


def test_a_row_has_its_turns_with_masks_versions_and_rewards():
    turns = TrajectoryBuilder()
    turns.append(drawn("add"))
    turns.reward(0.25)
    turns.append([ord("="), ord("4")])
    branch = turns.branch()
    turns.append(drawn("four", VersionSpan(0, PolicyVersion(0, 3)), VersionSpan(3, PolicyVersion(0, 4), True, "r/1")))
    branch.append(drawn("4!"))
    sample = turns.sample(5, FinishReason.STOP, 1.0)
    row = trajectory_row(2, Group.from_samples("u", "p", 0, np.array([63]), [sample]), 0, decode)
    shown = [(p["sequence"], p["start"], p["kind"], p["text"], p["version"], p["reward"]) for p in row["parts"]]
    assert shown == [
        (0, 0, "trained", "add", "0.3", 0.25),
        (0, 3, "read", "=4", None, None),
        (0, 5, "trained", "fou", "0.3", None),
        (0, 8, "trained", "r", "0.4", 1.0),
        (1, 0, "masked", "add", "0.3", None),
        (1, 3, "read", "=4", None, None),
        (1, 5, "trained", "4!", "0.3", None),
    ]
    assert [p["mixed_kv"] for p in row["parts"]] == [False, False, False, True, False, False, False]
    assert [p["logprob"] for p in row["parts"]] == [-0.5, None, -0.5, -0.5, -0.5, None, -0.5]
    assert (row["trained_tokens"], row["response_tokens"]) == (9, 16)
    assert row["versions"] == ["0.3", "0.4"]


def failed(sample: int, reason: str, error: str = "") -> Failure:
    return Failure("e0-9", "words:9", "words", 0, sample, "why", reason, error, [(2, "so")])


@pytest.fixture
def run(tmp_path):
    """Three steps of a run with two data sources, and two failed samples."""
    sink = TrajectorySink(tmp_path)
    for step in (1, 2, 3):
        rows = [
            {
                "step": step,
                "uid": f"e0-{step}",
                "prompt_id": f"{source}:1",
                "data_source": source,
                "sample": 0,
                "prompt": "question",
                "reward": reward,
                "metrics": {"accuracy": reward},
                "response_tokens": 10 * step,
                "trained_tokens": 5,
                "finish": "stop" if reward else "length",
                "parts": [{"sequence": 0, "start": 0, "tokens": 3, "kind": "trained", "text": f"answer {step}"}],
            }
            for source, reward in (("sums", 1.0), ("words", 0.0))
        ]
        sink.trajectories(rows)
    failures = [("agent_error", "KeyError: 'x'"), ("agent_timeout", "too long")]
    sink.spans(Batch("rollouter", failures=[failed(i, *failure) for i, failure in enumerate(failures)]))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["0", "1", "1 sums", "1 words", "2 sums", "2 words", "3 sums", "3 words"]),
        (["--reward", "0.5:"], ["1 sums", "2 sums", "3 sums"]),
        (["--reward", ":0", "--tokens", "20:"], ["2 words", "3 words"]),
        (["--step", "2"], ["2 sums", "2 words"]),
        (["--source", "words", "--finish", "length", "--step", "1:2"], ["1 words", "2 words"]),
        (["--failed"], ["0", "1"]),
        (["--reward", "-1:0", "--step", "3"], ["3 words"]),
        (["--failure", "agent_timeout"], ["1"]),
        (["--uid", "e0-3"], ["3 sums", "3 words"]),
        (["--limit", "1"], ["3 words"]),
        (["--source", "nowhere"], []),
    ],
)
def test_filters_select_samples(run, capsys, options, expected):
    assert main([str(run), "--json", *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [str(r["sample"]) if r["failure"] else f"{r['step']} {r['data_source']}" for r in rows]
    assert found == expected


def test_of_the_last_samples_those_before_are_only_counted(run):
    every = read(run)
    for last in range(10):
        found = read(run, last=last)
        assert (found.rows(), found.selected) == (every.rows()[max(0, 8 - last) :], 8)
    step = Filter(source="sums")
    assert [row["step"] for row in read(run, step, last=2).rows()] == [2, 3]
    assert read(run, step, last=2).selected == 3


def test_samples_are_printed_turn_by_turn(run, capsys):
    assert main([str(run), "--step", "2:2", "--source", "sums"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "── group e0-2 sample 0 · sums: sums:1 · step 2 · reward 1 · accuracy 1 · stop",
        "[prompt]",
        "question",
        "[sequence 1: trained, 3 tokens]",
        "answer 2",
        "",
        "1 of 1 sample",
    ]
    assert main([str(run), "--failure", "agent_error"]) == 0
    assert "failed: agent_error: KeyError: 'x'" in capsys.readouterr().out


def test_nonsense_is_answered_in_a_line(run, tmp_path, capsys):
    assert main([str(tmp_path / "nothing")]) == 2
    assert "expected a run folder with trajectories/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), "--reward", "high"])
    assert "expected MIN:MAX, found 'high'" in capsys.readouterr().err
    (run / "trajectories" / "step-00000001.parquet").write_bytes(b"PAR1")
    assert main([str(run), "--step", "1:2"]) == 1
    shown = capsys.readouterr()
    assert "step-00000001.parquet cannot be read and is left out" in shown.err
    assert "2 of 2 samples" in shown.out


def test_a_pipe_that_nobody_reads_any_more_ends_it_without_a_word(run):
    gone, pipe = os.pipe()
    os.close(gone)  # as `head` does
    command = [sys.executable, "-m", "asyncrl.cli.main", "trajectories", str(run)]
    ended = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(pipe)
    assert (ended.stderr, ended.returncode) == ("", 128 + signal.SIGPIPE)


def test_any_reader_of_parquet_reads_the_files(run):
    table = pq.read_table(run / "trajectories")
    assert table.num_rows == 8
    assert table.filter(table["reward"].is_valid()).num_rows == 6


def test_a_step_that_a_rollback_repeats_replaces_its_samples(run):
    write_step(run, 2, [{"step": 2, "prompt": "again"}])
    assert [row["prompt"] for row in read(run, Filter(step=(2, 2))).rows()] == ["again"]


def test_failed_samples_are_bounded_and_survive_a_restart(run):
    recorder = Recorder("rollouter")
    for i in range(10):
        if recorder.wants_failures:
            recorder.failed(failed(i, "again"))
    batch = recorder.drain()
    assert [failure.sample for failure in batch.failures] == list(range(MAX_FAILURES))
    assert recorder.drain().failures == []
    for _ in range(MAX_FAILED // MAX_FAILURES):
        TrajectorySink(run).spans(batch)  # as after restarts
    assert len(read(run, Filter(failure="again"))) == MAX_FAILED - 2
    assert len(read(run, Filter(failure="agent_error"))) == 1


def test_a_damaged_file_of_failed_samples_hides_no_others(run):
    (file,) = (run / "trajectories").glob("failed-*")
    file.write_bytes(file.read_bytes()[:-9])
    TrajectorySink(run).spans(Batch("rollouter", failures=[failed(7, "again")]))
    found = read(run)
    assert [row["sample"] for row in found.rows() if row["failure"]] == [7]
    assert (len(found), len(found.damaged)) == (7, 1)


def test_a_masked_turn_of_which_the_policy_was_certain_is_not_taken_for_read():
    turns = TrajectoryBuilder()
    turns.append([ord("?")])
    certain = drawn("ABCDE")
    certain.logprobs[[0, 2, 3]] = 0.0
    turns.append(certain)
    turns.append([ord("=")])
    branch = turns.branch()
    turns.append(drawn("F"))
    sure = drawn("GHI")
    sure.logprobs[:2] = 0.0
    branch.append(sure)
    again = branch.branch()
    again.append(drawn("J"))
    sample = turns.sample(0)
    row = trajectory_row(2, Group.from_samples("u", "p", 0, np.array([63]), [sample]), 0, decode)
    shown = [(p["kind"], p["text"]) for p in row["parts"] if p["sequence"] == 2]
    # the first span begins with what was read before, so its certain first token is taken for read
    assert shown == [("read", "?A"), ("masked", "BCDE"), ("read", "="), ("masked", "GHI"), ("trained", "J")]


def test_a_row_shows_what_the_step_really_trained():
    old, young = VersionSpan(0, PolicyVersion(0, 1)), VersionSpan(2, PolicyVersion(0, 2))
    samples = []
    for index, finish in enumerate((FinishReason.STOP, FinishReason.LENGTH)):
        turns = TrajectoryBuilder()
        turns.append(drawn("abcd", old, young))
        samples.append(turns.sample(index, finish))
    group = Group.from_samples("u", "p", 0, np.array([63]), samples)
    rows = [trajectory_row(2, as_trained(group, 2, RewardOptions(overlong="mask")), s, decode) for s in range(2)]
    assert [[(p["kind"], p["text"]) for p in row["parts"]] for row in rows] == [
        [("masked", "ab"), ("trained", "cd")],
        [("masked", "ab"), ("masked", "cd")],
    ]
    assert [row["trained_tokens"] for row in rows] == [2, 0]
    assert as_trained(group, None, RewardOptions(overlong="penalize")).loss_mask.all()
