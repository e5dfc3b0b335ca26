"""The sinks: metrics.jsonl, the console, sampled trajectories, the timeline, and the hub that feeds them."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter

import numpy as np
import pytest

from asyncrl.observability.number_format import short_number, short_seconds
from asyncrl.observability.sinks.base import Sink
from asyncrl.observability.sinks.console import ConsoleSink
from asyncrl.observability.sinks.hub import Hub
from asyncrl.observability.sinks.jsonl import METRICS_FILE, JsonlFile, JsonlSink, read_jsonl
from asyncrl.observability.sinks.timeline import PREVIOUS_SPANS_FILE, SPANS_FILE, TimelineSink, merge_short, read_spans
from asyncrl.observability.sinks.trajectories import TrajectorySink
from asyncrl.observability.telemetry.recorder import Batch, Span
from asyncrl.observability.trajectories import sampled_rows
from asyncrl.observability.trajectory_files import read
from asyncrl.trainer.actors import draw
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan


class Kept(Sink):
    """Records its calls."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict]] = []
        self.batches: list[Batch] = []
        self.closed: list[tuple[str | None, str | None]] = []

    def metrics(self, step, values):
        self.steps.append((step, dict(values)))

    def spans(self, batch):
        self.batches.append(batch)

    def close(self, failed, stopped=None):
        self.closed.append((failed, stopped))


class Broken(Kept):
    """Raises as if its service were gone."""

    def metrics(self, step, values):
        super().metrics(step, values)
        raise ConnectionError("no route to the metrics service")

    def close(self, failed, stopped=None):
        super().close(failed, stopped)
        raise ConnectionError("still none")


# -- hub ---------------------------------------------------------------------------------------------------------------


def test_a_failing_sink_is_reported_once_and_switched_off_while_the_others_continue(caplog):
    before, broken, after = Kept(), Broken(), Kept()
    hub = Hub([before, broken, after])
    for step in (1, 2, 3):
        hub.metrics(step, {"critic/rewards/mean": 0.5})
        hub.spans(Batch("trainer/0"))
    hub.close("out of memory", "SIGTERM")
    hub.close(None)
    assert [step for step, _ in before.steps] == [step for step, _ in after.steps] == [1, 2, 3]
    assert len(before.batches) == len(after.batches) == 3
    assert [step for step, _ in broken.steps] == [1]
    assert before.closed == broken.closed == after.closed == [("out of memory", "SIGTERM")]
    assert hub.failures == {"Broken": "ConnectionError: no route to the metrics service"}
    assert caplog.text.count("Broken failed in metrics") == 1
    assert before.steps[0][1] == {"critic/rewards/mean": 0.5}
    assert before.steps[2][1] == {"critic/rewards/mean": 0.5, "reporting/failed_sinks": 1}


def test_an_interrupt_within_a_sink_is_not_its_failure():
    class Interrupted(Kept):
        def spans(self, batch):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub([Interrupted()]).spans(Batch("trainer/0"))


def test_a_sink_need_not_consume_trajectories(tmp_path):
    hub = Hub([Kept(), TrajectorySink(tmp_path)])
    hub.trajectories([{"step": 1, "prompt": "p"}])
    hub.close(None)
    assert hub.failures == {}
    assert [(row["step"], row["prompt"]) for row in read(tmp_path).rows()] == [(1, "p")]


# -- metrics.jsonl -----------------------------------------------------------------------------------------------------


def test_metrics_are_one_json_object_per_step_on_disk_at_once(tmp_path):
    sink = JsonlSink(tmp_path / "run")
    sink.metrics(1, {"a": 1, "b": np.float32(0.5), "c": float("nan"), "d": np.inf, "e": np.int64(7), "f": True})
    sink.metrics(2, {"a": np.array(2.5), "histogram": np.ones(3), "text": "no number"})
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    times = [row.pop("time") for row in rows]
    assert rows == [{"step": 1, "a": 1, "b": 0.5, "c": None, "d": None, "e": 7, "f": 1}, {"step": 2, "a": 2.5}]
    assert times == sorted(times)
    sink.close(None)


def test_a_crash_costs_at_most_its_incomplete_line(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step":1,"a":1}\n{"step":2,"a":')
    file = JsonlFile(path)
    file.write([{"step": 3, "a": 3}])
    assert file.nbytes == path.stat().st_size
    assert [row["step"] for row in read_jsonl(path)] == [1, 3]
    assert read_jsonl(tmp_path / "missing.jsonl") == []


# -- console -----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


STEP = {
    "critic/rewards/mean": 0.53125,
    "rollout/accuracy": 0.48,
    "fully_async/staleness/mean": 0.75,
    "fully_async/staleness/max": 1,
    "fully_async/queue/depth": 3,
    "fully_async/in_flight": 32,
    "fully_async/trainer/idle_ratio": 0.12,
    "fully_async/rollouter/idle_ratio": 0.04,
    "perf/trainer_tokens_per_s": 1240.0,
    "perf/rollout_tokens_per_s": 3391.0,
    "fully_async/version": 12,
    "param_sync/transfer_s": 0.25,
    "param_sync/commit_s": 0.06,
    "param_sync/gb_per_s": 99.0,
}


def test_a_step_is_one_aligned_line_with_the_main_figures():
    clock, out = Clock(), io.StringIO()
    console = ConsoleSink(total_steps=100, stream=out, clock=clock)
    for step in (11, 12):
        clock.s = 5.0 * step
        console.metrics(step, STEP)
    header, first, second = out.getvalue().splitlines()
    assert len(header) == len(first) == len(second) <= 130
    assert " ".join(second.split()) == "12/100 0.531 0.480 0.75/1 3 32 12%/4% 1.24k/3.39k 12 0.31s 7m20s"  # 88 × 5 s
    assert "\x1b" not in out.getvalue()


def test_an_unknown_figure_is_a_dash_in_its_column():
    out = io.StringIO()
    console = ConsoleSink(total_steps=100, stream=out, clock=Clock())
    console.metrics(1, STEP)
    console.metrics(2, {"critic/rewards/mean": float("nan")})
    _, full, bare = out.getvalue().splitlines()
    assert len(full) == len(bare)
    assert bare.split()[1:-1] == ["–", "–", "–/–", "–", "–", "–/–", "–/–", "12", "0.31s"]  # of the last sync


def test_late_metrics_of_a_step_print_no_second_line():
    out = io.StringIO()
    console = ConsoleSink(total_steps=100, stream=out, clock=Clock())
    console.metrics(1, {"critic/rewards/mean": 0.5})
    console.metrics(1, {"param_sync/transfer_s": 0.25, "fully_async/version": 7})
    console.metrics(2, {"critic/rewards/mean": 0.6})
    _, first, second = out.getvalue().splitlines()
    assert first.split()[-3:] == ["–", "–", "–"]
    assert second.split()[-3:-1] == ["7", "0.25s"]


def test_validation_and_the_end_get_separate_lines():
    out = io.StringIO()
    console = ConsoleSink(total_steps=8, stream=out, clock=Clock())
    console.metrics(0, {"validation/accuracy": 0.125, "validation/valid_format": 0.9})
    console.metrics(8, STEP | {"validation/accuracy": 0.5})
    console.close("replica/1 is gone")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("validation: accuracy 0.125, valid format 0.900")
    assert lines[3].endswith("validation: accuracy 0.500")
    assert lines[4].startswith("FAILED after step 8/8")
    assert lines[4].endswith("replica/1 is gone")


@pytest.mark.parametrize(
    ("failed", "stopped", "line"),
    [
        (None, None, "finished: 3/8 steps in 10.0s"),
        (None, "SIGINT", "stopped after step 3/8, 10.0s: SIGINT"),
        ("replica/1 is gone", "SIGINT", "FAILED after step 3/8, 10.0s: replica/1 is gone"),
    ],
)
def test_the_last_line_says_how_the_run_ended(failed, stopped, line):
    clock, out = Clock(), io.StringIO()
    console = ConsoleSink(total_steps=8, stream=out, clock=clock)
    clock.s = 10.0
    console.metrics(3, STEP)
    console.close(failed, stopped)
    assert out.getvalue().splitlines()[-1] == line


def test_a_resumed_run_that_ends_before_its_first_step_counts_the_earlier_ones():
    clock, out = Clock(), io.StringIO()
    console = ConsoleSink(total_steps=8, stream=out, clock=clock)
    hub = Hub([console])
    hub.begin(5)
    clock.s = 10.0
    hub.close(stopped="the prompts ended")
    assert out.getvalue() == "stopped after step 5/8, 10.0s: the prompts ended\n"


def test_a_long_step_prints_a_status_with_the_open_spans():
    clock, out = Clock(), io.StringIO()
    console = ConsoleSink(total_steps=100, every_s=10.0, stream=out, clock=clock)
    console.metrics(4, STEP)
    waiting = [
        Span("trainer/0", "trainer/step", 0.0, 12.0, {}),
        Span("trainer/0", "trainer/micro_batch", 8.0, 12.0, {}),
    ]
    for clock.s in (4.0, 8.0, 12.0, 16.0):
        console.spans(Batch("trainer/0", open_spans=waiting, gauges={"fully_async/in_flight": 31}))
    dropped = {"fully_async/dropped/zero_variance": 12, "fully_async/dropped/no_reward": 3, "fully_async/dropped/x": 0}
    console.spans(Batch("driver", gauges=dropped))
    clock.s = 26.0
    console.spans(Batch("trainer/0"))
    lines = [line.split("…")[1].strip() for line in out.getvalue().splitlines()[2:]]
    assert lines == [
        "12.0s after step 4 · in flight 31 · trainer/0: trainer/step 12.0s",
        "26.0s after step 4 · in flight 31 · dropped 3 no reward, 12 zero variance",
    ]


def test_the_progress_line_is_made_once_for_the_batches_of_a_drain(terminal, monkeypatch):
    """However many actors there are."""
    clock, made = Clock(), []
    console = ConsoleSink(8, stream=terminal, clock=clock)
    monkeypatch.setattr(console, "_status", lambda: made.append(clock.s) or "")
    for clock.s in (10.0, 12.0):
        for i in range(1000):
            console.spans(Batch(f"replica/{i}"))
    console.close(None)
    assert made == [10.0, 12.0]


class TerminalStream(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch) -> TerminalStream:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    return TerminalStream()


def test_a_terminal_has_a_progress_line_below_the_other_lines(terminal):
    clock, plain = Clock(), io.StringIO()
    sinks = [ConsoleSink(8, stream=stream, clock=clock) for stream in (plain, terminal)]
    waiting = [Span("trainer/0", "trainer/step", 0.0, 12.0, {})]
    for sink in sinks:
        for clock.s, step in ((0.0, 2), (4.0, 3)):
            sink.metrics(step, STEP | {"validation/accuracy": 0.5})
        for clock.s in (20.0, 40.0):
            sink.spans(Batch("trainer/0", open_spans=waiting, gauges={"fully_async/in_flight": 31}))
        sink.close(None, "SIGINT")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = [line for line in plain.getvalue().splitlines() if "…" not in line]
    assert len(lines) == 6
    assert [line for line in lines if line not in text] == []
    assert "3/8" in text
    assert "eta 20.0s" in text
    assert "36.0s after step 3 · in flight 31 · trainer/0: trainer/step 12.0s" in text
    assert "…" not in text
    assert text.rstrip().endswith("stopped after step 3/8, 40.0s: SIGINT")
    hidden, shown = (terminal.getvalue().rindex(code) for code in ("\x1b[?25l", "\x1b[?25h"))
    assert hidden < shown  # the cursor reappears


def test_output_of_other_code_goes_above_the_progress_line(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", TerminalStream())
    console = ConsoleSink(8)
    console.metrics(1, STEP)
    print("(trainer/0) loaded")
    print("a warning", file=sys.stderr)
    console.close(None)
    assert "\x1b[2K(trainer/0) loaded\n" in terminal.getvalue()
    assert "\x1b[2Ka warning\n" in terminal.getvalue()
    assert sys.stdout is terminal


def test_stderr_is_left_alone_if_it_is_not_the_terminal(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", log := io.StringIO())
    console = ConsoleSink(8)
    console.metrics(1, STEP)
    print("a warning", file=sys.stderr)
    console.close(None)
    assert log.getvalue() == "a warning\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_plain_lines(terminal, monkeypatch, name, value):
    coloured = ConsoleSink(10, stream=(stream := TerminalStream()))
    coloured.metrics(1, STEP)
    coloured.close(None)
    assert stream.getvalue().startswith("\x1b[2m")
    monkeypatch.setenv(name, value)
    ConsoleSink(10, stream=terminal).metrics(1, STEP)
    assert "\x1b" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.53125, "0.531"),
        (9.996, "10.0"),
        (84.25, "84.2"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (1240, "1.24k"),
        (-3.4e6, "-3.40M"),
        (2.1e9, "2.10G"),
    ],
)
def test_numbers_are_short(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.314, "0.31s"), (59.96, "1m00s"), (12.4, "12.4s"), (250, "4m10s"), (7500, "2h05m"), (273_600, "3d04h")],
)
def test_durations_are_short(seconds, text):
    assert short_seconds(seconds) == text


# -- trajectories ------------------------------------------------------------------------------------------------------


def group(uid: str, n: int = 4) -> Group:
    samples = [
        Sample.single(
            index=s,
            tokens=np.array([65 + s, 66, 67]),
            logprobs=np.array([-0.25, -0.75, 0], np.float32),
            loss_mask=np.array([True, True, False]),
            spans=[VersionSpan(0, PolicyVersion(1, 4)), VersionSpan(2, PolicyVersion(1, 5), True)],
            finish=FinishReason.LENGTH,
            reward=s / 4,
            metrics={"accuracy": 1.0} if s else {},
        )
        for s in range(n)
    ]
    return Group.from_samples(uid, "add/7", 2, np.array([63, 63]), samples, data_source="sums")


def decode(tokens) -> str:
    return "".join(map(chr, tokens))


def test_a_trajectory_row_has_prompt_response_reward_and_versions(tmp_path):
    rows = sampled_rows(9, [group("2/7")], decode, k=10)
    row = sorted(rows, key=lambda row: row["sample"])[1]
    part = {"sequence": 0, "mixed_kv": False, "replica": None, "reward": None}
    assert row == {
        "step": 9,
        "uid": "2/7",
        "prompt_id": "add/7",
        "data_source": "sums",
        "epoch": 2,
        "sample": 1,
        "prompt": "??",
        "response": "BBC",
        "reward": 0.25,
        "metrics": {"accuracy": 1.0},
        "prompt_tokens": 2,
        "response_tokens": 3,
        "trained_tokens": 2,
        "finish": "length",
        "versions": ["1.4"],
        "parts": [
            part | {"start": 0, "tokens": 2, "kind": "trained", "text": "BB", "version": "1.4", "logprob": -0.5},
            part | {"start": 2, "tokens": 1, "kind": "read", "text": "C", "version": None, "logprob": None},
        ],
    }
    sink = TrajectorySink(tmp_path)
    sink.trajectories(rows)
    assert [{name: row[name] for name in rows[0]} for row in read(tmp_path).rows()] == rows
    assert rows[[r["sample"] for r in rows].index(0)]["metrics"] == {"accuracy": None}


def test_k_trajectories_are_drawn_from_all_groups_with_the_step_as_seed():
    groups = [group(f"0/{i}") for i in range(8)]
    picks = [sampled_rows(step, groups, decode, k=2) for step in range(30)]
    assert all(len(rows) == 2 for rows in picks)
    assert picks[3] == sampled_rows(3, groups, decode, k=2)
    assert len({row["uid"] for rows in picks for row in rows}) == 8
    assert sampled_rows(3, groups, decode, k=0) == []


def test_groups_are_drawn_uniformly_from_a_batch_that_comes_in_parts():
    """Short answers come first."""
    chosen = Counter[bytes]()
    for step in range(600):
        drawn = []
        for part, groups in enumerate((b"ab", b"cdef", b"", b"gh")):
            drawn = draw(drawn, [bytes([group]) for group in groups], 2, f"{step}.{part}")
        assert len({group for _, group in drawn}) == 2
        chosen.update(group for _, group in drawn)
    assert len(chosen) == 8
    assert min(chosen.values()) > 110  # of 150 on average, with a deviation of 11


def test_a_lone_surrogate_can_be_written(tmp_path):
    sink = TrajectorySink(tmp_path)
    sink.trajectories([{"step": 1, "response": "cut \ud83d"}, {"step": 1, "response": "whole 🙂"}])
    assert [row["response"] for row in read(tmp_path).rows()] == ["cut ?", "whole 🙂"]


# -- timeline ----------------------------------------------------------------------------------------------------------


def test_short_close_spans_are_joined_and_long_ones_keep_their_edges():
    decode_steps = [Span("replica/0", "decode", 0.01 * i, 0.01 * i + 0.008, {"batch": 4}) for i in range(100)]
    train_steps = [Span("trainer/0", "step", float(i), i + 0.999, {"step": i}) for i in range(3)]
    other_actor = [Span("replica/1", "decode", 0.009, 0.012, {})]
    merged = merge_short(decode_steps + train_steps + other_actor, short_s=0.05, gap_s=0.01)
    assert [(s.actor, s.name, count) for s, count in merged] == [
        ("replica/0", "decode", 100),
        ("trainer/0", "step", 1),
        ("replica/1", "decode", 1),
        ("trainer/0", "step", 1),
        ("trainer/0", "step", 1),
    ]
    assert (merged[0][0].start_s, merged[0][0].end_s) == (0.0, pytest.approx(0.998))
    assert merged[1][0].args == {"step": 0}
    short_then_long = [Span("trainer/0", "step", 0.0, 0.01, {}), Span("trainer/0", "step", 0.01, 1.0, {})]
    assert len(merge_short(short_then_long, short_s=0.05, gap_s=0.01)) == 2


def test_the_timeline_keeps_long_spans_and_marks_open_ones(tmp_path):
    timeline = TimelineSink(tmp_path)
    timeline.spans(Batch("trainer/0", [Span("trainer/0", "step", 1.0, 2.0, {"loss": np.nan, "why": Ellipsis})]))
    timeline.spans(Batch("replica/0", [], [Span("replica/0", "pause", 1.5, 2.5, {})]))
    timeline.close("died")
    first, second = read_spans(tmp_path)
    assert (first["actor"], first["name"], first["args"]) == ("trainer/0", "step", {"loss": None, "why": "Ellipsis"})
    assert first["end"] - first["start"] == pytest.approx(1.0)
    assert second["open"] is True
    assert second["start"] - first["start"] == pytest.approx(0.5)


def test_the_timeline_stays_within_its_size_and_keeps_the_end(tmp_path):
    timeline = TimelineSink(tmp_path, max_bytes=20_000)
    for i in range(1_000):
        timeline.spans(Batch("trainer/0", [Span("trainer/0", "step", float(i), i + 0.9, {"step": i})]))
    timeline.close(None)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 20_500
    assert {path.name for path in tmp_path.iterdir()} == {SPANS_FILE, PREVIOUS_SPANS_FILE}
    steps = [row["args"]["step"] for row in read_spans(tmp_path)]
    assert steps == list(range(steps[0], 1_000))
    assert len(steps) > 80
    assert "older spans were deleted" in (tmp_path / SPANS_FILE).read_text().splitlines()[0]
