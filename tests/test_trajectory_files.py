"""Samples for people: their rows, the Parquet files, the filters, and `asyncrl trajectories`."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from asyncrl.cli.trajectories import main
from asyncrl.observability.sinks.trajectories import MAX_FAILED, TrajectorySink
from asyncrl.observability.telemetry.recorder import MAX_FAILURES, Batch, Failure, Recorder
from asyncrl.observability.trajectories import trajectory_row
from asyncrl.observability.trajectory_files import Filter, read, write_step
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
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
    told = [(p["sequence"], p["start"], p["kind"], p["text"], p["version"], p["reward"]) for p in row["parts"]]
    assert told == [
        (0, 0, "trained", "add", "0.3", 0.25),
        (0, 3, "read", "=4", None, None),
        (0, 5, "trained", "fou", "0.3", None),
        (0, 8, "trained", "r", "0.4", None),
        (1, 0, "masked", "add", "0.3", None),
        (1, 3, "read", "=4", None, None),
        (1, 5, "trained", "4!", "0.3", 1.0),
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
        (["--failure"], ["0", "1"]),
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


def test_samples_are_printed_turn_by_turn(run, capsys):
    assert main([str(run), "--step", "2:2", "--source", "sums"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "── group e0-2 sample 0 · sums: sums:1 · step 2 · reward 1 · accuracy 1 · stop",
        "[prompt]",
        "question",
        "[sequence 1: trained, 3 tokens]",
        "answer 2",
        "",
        "1 samples",
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
    assert main([str(run)]) == 2
    assert "step-00000001.parquet cannot be read" in capsys.readouterr().err


def test_any_reader_of_parquet_reads_the_files(run):
    table = pq.read_table(run / "trajectories")
    assert table.num_rows == 8
    assert table.filter(table["reward"].is_valid()).num_rows == 6


def test_a_step_that_a_rollback_repeats_replaces_its_samples(run):
    write_step(run, 2, [{"step": 2, "prompt": "again"}])
    assert [row["prompt"] for row in read(run, Filter(step=(2, 2)))] == ["again"]


def test_failed_samples_are_bounded_and_survive_a_restart(run):
    recorder = Recorder("rollouter")
    for i in range(10):
        if recorder.wants_failures:
            recorder.failed(failed(i, "again"))
    batch = recorder.drain()
    assert [failure.sample for failure in batch.failures] == list(range(MAX_FAILURES))
    assert recorder.drain().failures == []
    sink = TrajectorySink(run)
    for _ in range(MAX_FAILED):
        sink.spans(batch)
    assert len(read(run, Filter(failure="again"))) <= MAX_FAILED
    assert len(read(run, Filter(failure="agent_error"))) == 1
