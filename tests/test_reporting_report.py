"""The HTML report: its content, its tolerance of incomplete run folders, and its escaping."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.observability import charts
from asyncrl.observability.report import swimlanes
from asyncrl.observability.report.report import MAX_FAILED, MAX_TRAJECTORIES, REPORT_FILE, write_report
from asyncrl.observability.report.trace import TRACE_FILE
from asyncrl.observability.series import read_series, totals
from asyncrl.observability.sinks.jsonl import METRICS_FILE, JsonlFile
from asyncrl.observability.sinks.timeline import SPANS_FILE
from asyncrl.observability.trajectory_files import write_failed, write_step

PHASES = ("plan", "pause", "unload", "transfer", "verify", "commit", "reload", "resume")
EVIL = "</script><img src=x onerror=alert(1)>"


def metrics_of(run_dir: Path, names: list[str], steps: int = 3) -> dict[str, list[float]]:
    """Write metrics.jsonl with values that are unique to each name; returns them."""
    values = {name: [i + step / 1000 + 0.123 for step in range(1, steps + 1)] for i, name in enumerate(names)}
    file = JsonlFile(run_dir / METRICS_FILE)
    for row in range(steps):
        file.write([{"step": row + 1, "time": 1e9 + row} | {name: column[row] for name, column in values.items()}])
    return values


def plots(html: str) -> list[dict]:
    """Plotly traces of all plots in the page."""
    decoder, traces = json.JSONDecoder(), []
    for call in re.finditer(r"Plotly\.newPlot\(\s*\"[0-9a-f-]+\",\s*", html):
        traces += decoder.raw_decode(html, call.end())[0]
    return traces


def body_of(html: str) -> str:
    """The page without plotly's own source."""
    return html[html.index("<body>") :]


def test_every_expected_metric_is_drawn_with_its_values(tmp_path):
    names = [line.metric for section in charts.SECTIONS.values() for chart in section for line in chart.lines]
    names += [f"param_sync/{phase}_s" for phase in PHASES]
    names += ["param_sync/paused_s", "fully_async/dropped/overdue", "fully_async/dropped/zero_variance"]
    assert len(set(names)) == len(names)
    values = metrics_of(tmp_path, names)
    drawn = [trace["y"] for trace in plots(write_report(tmp_path).read_text())]
    missing = [name for name in names if values[name] not in drawn]
    assert missing == []
    assert len(drawn) == len(names)


def test_a_gap_in_a_metric_stays_a_gap_and_a_repeated_step_counts_once(tmp_path):
    JsonlFile(tmp_path / METRICS_FILE).write(
        [
            {"step": 1, "time": 10, "actor/entropy": 2.0},
            {"step": 2, "time": 11, "actor/entropy": 1.9},
            {"step": 2, "time": 25, "actor/entropy": None, "validation/accuracy": 0.5},
            {"step": 3, "time": 26, "actor/entropy": 1.5},
        ]
    )
    series, times = read_series(tmp_path)
    assert series == {"actor/entropy": ([1, 2, 3], [2.0, None, 1.5]), "validation/accuracy": ([2], [0.5])}
    assert times == [10, 26]


def test_the_last_of_an_odd_number_of_charts_is_as_wide_as_the_page(tmp_path):
    metrics_of(tmp_path, ["actor/entropy", "actor/kl_behaviour", "actor/loss", "perf/step_s", "param_sync/gb_per_s"])
    html = body_of(write_report(tmp_path).read_text())
    cards = re.findall(r'<div class="card( wide)?">\s*<h3>(.*?)</h3>', html)
    narrow = ["Step time", "Parameter sync speed", "Entropy", "KL divergence"]
    assert cards == [*(("", title) for title in narrow), (" wide", "Loss")]


def test_the_key_figures_are_at_the_top(tmp_path):
    file = JsonlFile(tmp_path / METRICS_FILE)
    file.write([{"step": 0, "time": 0, "validation/accuracy": 0.031}])
    file.write([{"step": 90, "time": 300, "fully_async/staleness/max": 2, "fully_async/staleness/bound": 2}])
    file.write([{"step": 100, "time": 600, "validation/accuracy": 0.884, "fully_async/staleness/max": 1}])
    (tmp_path / "config.yaml").write_text("name: sums\ntrainer:\n  total_steps: 100\nmodel:\n  path: /models/tiny\n")
    html = body_of(write_report(tmp_path).read_text())
    for text in ("<h1>sums</h1>", "3.1% → 88.4%", "100/100", "10m00s", "2 / 2", "tiny"):
        assert text in html
    (tmp_path / "summary.json").write_text(json.dumps({"failed": None, "accuracy_after": 0.9}))
    html = body_of(write_report(tmp_path).read_text())
    for text in ("3.1% → 90.0%", "finished"):
        assert text in html


def test_the_totals_are_of_all_drivers_of_a_run_and_of_the_steps_that_count(tmp_path):
    """Killed after step 5, resumed from step 2."""
    steps = [(1, 10.0, 0.5), (2, 20.0, 1.0), (3, 600.0, 0.0), (5, 50.0, 0.0), (3, 30.0, 1.0), (4, 40.0, 0.75)]
    JsonlFile(tmp_path / METRICS_FILE).write(
        {
            "step": step,
            "perf/step_s": seconds,
            "fully_async/overlap": overlap,
            "rollout/samples": 3_200,
            "perf/rollout_tokens_per_s": 32_000.0,
        }
        for step, seconds, overlap in steps
    )
    found = totals(read_series(tmp_path)[0])
    assert found == pytest.approx({"duration_s": 100.0, "overlap": 0.85, "samples": 12_800, "tokens": 3.2e6})
    html = body_of(write_report(tmp_path).read_text())
    for text in ("12,800", "3.20M", "85%", "1m40s"):
        assert text in html
    assert totals({"perf/step_s": ([1], [5.0])}) == {"duration_s": 5.0}
    assert totals({}) == {}


@pytest.mark.parametrize(
    ("summary", "badge", "banner"),
    [
        ({"status": "finished", "reason": None, "failed": None}, '"badge ok">finished<', None),
        ({"status": "finished", "reason": "the prompts ended"}, '"badge ok">finished<', "step: the prompts ended"),
        ({"status": "interrupted", "reason": "SIGINT", "failed": None}, '"badge cut">interrupted<', "step: SIGINT"),
        ({"status": "failed", "reason": "SIGINT", "failed": "no memory"}, '"badge bad">failed<', ">no memory<"),
        ({"failed": "no memory"}, '"badge bad">failed<', ">no memory<"),  # without a status
        ({"failed": None, "steps": 3}, '"badge ok">finished<', None),
    ],
)
def test_the_top_of_the_page_says_how_the_run_ended(tmp_path, summary, badge, banner):
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    html = body_of(write_report(tmp_path).read_text())
    assert badge in html
    assert ('<p class="banner' in html) == (banner is not None)
    assert banner is None or banner in html[: html.index("<h2>")]


def test_a_trajectory_is_shown_turn_by_turn(tmp_path):
    read = {"sequence": 0, "start": 3, "tokens": 2, "kind": "read", "text": "tool: 4"}
    drawn = {
        "sequence": 0,
        "start": 0,
        "tokens": 3,
        "kind": "trained",
        "text": "add",
        "version": "1.4",
        "logprob": -0.5,
    }
    last = drawn | {"start": 5, "text": "it is 4", "version": "1.5", "mixed_kv": True, "reward": 1.0}
    row = {"step": 3, "prompt": "2+2?", "reward": 0.5, "metrics": {"accuracy": 1.0}, "finish": "length", "sample": 2}
    row |= {"response_tokens": 9, "trained_tokens": 6, "prompt_id": "add:1", "data_source": "add"}
    failed = {"prompt": "3+3?", "failure": "agent_error", "error": "KeyError: 'tool'", "parts": []}
    write_step(tmp_path, 3, [row | {"parts": [drawn, read, last]}, failed])
    html = body_of(write_report(tmp_path).read_text())
    for text in ("step 3", "reward 0.5", "accuracy 1", "length", "9 tokens, 6 trained", "add: add:1, sample 2"):
        assert f">{text}</span>" in html
    for part in (
        '<div class="part trained"><h4>sequence 1: trained, 3 tokens, version 1.4, mean logprob -0.5</h4>',
        "<pre>add</pre>",
        '<div class="part read"><h4>sequence 1: read, 2 tokens</h4><pre>tool: 4</pre>',
        "version 1.5 over mixed KV, mean logprob -0.5, reward 1</h4><pre>it is 4</pre>",
        '<div class="part read"><h4>Prompt</h4><pre>2+2?</pre>',
    ):
        assert part in html
    assert '<span class="poor">agent_error</span>' in html
    assert '<pre class="error">KeyError: &#39;tool&#39;</pre>' in html


def test_a_conversation_is_shown_as_messages_calls_and_results(tmp_path):
    opened, call = "<|im_start|>assistant\n", '<tool_call>{"name": "guess", "arguments": {"n": 30}}</tool_call>'
    user = f"<|im_start|>user\nBetween 22 and 43<|im_end|>\n{opened}"
    texts = [
        ("read", f"system\nguess(n)\n<|im_end|>\n{user}"),
        ("trained", f"22..43{call}<|im_end|>"),
        ("read", f"\n<|im_start|>tool\nhigher<|im_end|>\n{opened}"),
        ("trained", "<tool_call>{guess}"),
        ("masked", "</tool_call>"),  # malformed, and sampled by another version
    ]
    parts = [{"sequence": 0, "tokens": 9, "kind": kind, "text": text} for kind, text in texts]
    write_step(tmp_path, 1, [{"step": 1, "prompt": user, "parts": parts}])
    html = body_of(write_report(tmp_path).read_text())
    shown = re.findall(r'<div class="part (\w+)"><h4>(?:<b>(.*?)</b> )?(.*?)</h4><pre.*?>(.*?)</pre>', html)
    assert shown == [
        ("read", "system", "sequence 1: read, 9 tokens", "guess(n)"),
        ("read", "user", "", "Between 22 and 43"),
        ("trained", "assistant", "sequence 1: trained, 9 tokens", "22..43"),
        ("trained", "assistant calls", "", "guess(n=30)"),
        ("read", "tool", "sequence 1: read, 9 tokens", "higher"),
        ("trained", "assistant", "sequence 1: trained, 9 tokens", "&lt;tool_call&gt;{guess}"),
        ("masked", "assistant", "sequence 1: masked, 9 tokens", "&lt;/tool_call&gt;"),
    ]


def test_a_damaged_file_of_trajectories_is_named_in_the_report(tmp_path):
    write_step(tmp_path, 1, [{"step": 1, "prompt": "kept"}])
    (tmp_path / "trajectories" / "step-00000002.parquet").write_bytes(b"PAR1 cut")
    html = body_of(write_report(tmp_path).read_text())
    assert "step-00000002.parquet cannot be read" in html


def test_every_text_of_a_run_folder_is_escaped(tmp_path):
    texts = ("uid", "prompt_id", "data_source", "prompt", "response", "finish", "failure", "error")
    part = {name: EVIL for name in ("kind", "version", "replica")} | {"sequence": 0, "text": f"1 < 2 & {EVIL}"}
    row = dict.fromkeys(texts, EVIL) | {"step": 1, "reward": 1.0, "metrics": {EVIL: 1.0}, "parts": [part]}
    write_step(tmp_path, 1, [row])
    JsonlFile(tmp_path / METRICS_FILE).write([{"step": 1, f"fully_async/dropped/{EVIL}": 3}])
    JsonlFile(tmp_path / SPANS_FILE).write([{"actor": EVIL, "name": EVIL, "start": 0, "end": 1, "args": {EVIL: EVIL}}])
    (tmp_path / "config.yaml").write_text(json.dumps({"name": EVIL, "model": {"path": f"x{EVIL}"}}))
    (tmp_path / "summary.json").write_text(json.dumps({"failed": EVIL, "status": EVIL, EVIL: EVIL}))
    html = write_report(tmp_path).read_text()
    assert "<img" not in body_of(html)
    assert "1 &lt; 2 &amp; &lt;/script&gt;" in html
    assert html.count("</script>") == html.count("<script")


def test_the_page_loads_nothing_from_the_network(tmp_path):
    metrics_of(tmp_path, ["actor/entropy", "fully_async/version"])
    html = write_report(tmp_path).read_text()
    own = body_of(html) + html[: html.index("<script>")]
    assert re.findall(r"(?:src|href)=|url\(|@import|https?://", own) == []
    assert html.count("plotly.js v") == 1
    assert (tmp_path / REPORT_FILE).stat().st_size < 6_000_000


def test_the_timeline_is_limited_to_the_end_of_a_long_run(tmp_path):
    count = swimlanes.MAX_BARS + 500
    JsonlFile(tmp_path / SPANS_FILE).write(
        {"actor": "trainer/0", "name": "trainer/step", "start": 100.0 + i, "end": 100.9 + i} for i in range(count)
    )
    html = write_report(tmp_path).read_text()
    (trace,) = plots(html)
    assert len(trace["x"]) == swimlanes.MAX_BARS
    assert trace["base"][-1] == count - 1
    assert f"The last 1,500 of {count:,} recorded spans are drawn." in html


def test_many_replicas_leave_room_for_the_other_actors(tmp_path):
    names = [f"replica/{i}" for i in range(1000)] + ["trainer/0", "rollouter/0", "driver"]
    JsonlFile(tmp_path / SPANS_FILE).write(
        {"actor": name, "name": "span", "start": 100.0 + i, "end": 100.9 + i} for i in range(5) for name in names
    )
    html = write_report(tmp_path).read_text()
    (trace,) = plots(html)
    assert set(trace["y"]) == {*(f"replica/{i}" for i in range(8)), "trainer/0", "rollouter/0", "driver"}
    assert "Of each kind of actor the first 8 are drawn." in html


def test_nested_spans_are_drawn_inside_their_parents():
    rows = [
        {"actor": "trainer/0", "name": "micro_batch", "start": 1.0, "end": 2.0, "count": 3},
        {"actor": "trainer/0", "name": "step", "start": 0.0, "end": 4.0},
        {"actor": "replica/0", "name": "generate", "start": 0.5, "end": 3.0, "args": {"rows": 8}},
    ]
    traces = {trace.name: trace for trace in swimlanes.timeline_chart(rows).data}
    assert list(traces)[-1] == "micro_batch"  # painted last
    assert traces["micro_batch"].width[0] < traces["step"].width[0] == traces["generate"].width[0]
    assert "3 short spans joined" in traces["micro_batch"].text[0]
    assert "rows = 8" in traces["generate"].text[0]


@pytest.mark.parametrize(("highest", "top"), [(0.9, 1.04), (1.3, 1.352)])
def test_an_axis_of_percentages_holds_every_value(highest, top):
    (chart,) = [chart for charts_of in charts.SECTIONS.values() for chart in charts_of if chart.title == "Efficiency"]
    figure = charts.line_chart(chart, {"perf/fraction_of_ideal": ([1, 2], [0.2, highest])})
    assert figure.layout.yaxis.range == pytest.approx((0.0, top))


def test_a_long_line_keeps_its_spikes_and_both_ends():
    (chart,) = [chart for charts_of in charts.SECTIONS.values() for chart in charts_of if chart.title == "Loss"]
    values = [0.5] * 100_000
    values[51_234], values[77_777], values[-1] = 9.0, -3.0, 0.25
    (trace,) = charts.line_chart(chart, {"actor/loss": (range(100_000), values)}).data
    drawn = dict(zip(trace.x, trace.y, strict=True))
    assert (drawn[51_234], drawn[77_777], drawn[0], drawn[99_999]) == (9.0, -3.0, 0.5, 0.25)
    assert charts.MAX_POINTS // 2 < len(drawn) <= charts.MAX_POINTS
    assert list(drawn) == sorted(drawn)


def test_of_many_syncs_evenly_spaced_ones_are_drawn_and_the_last():
    figure = charts.sync_chart({"param_sync/paused_s": (range(1, 1002), [0.1] * 1001)})
    (trace,) = figure.data
    assert len(trace.x) <= charts.MAX_BARS
    assert trace.x[-1] == 1001
    assert len({after - before for before, after in itertools.pairwise(trace.x)}) == 1


def test_many_trajectories_are_thinned_evenly(tmp_path):
    for i in range(100):
        write_step(tmp_path, i, [{"step": i, "prompt": f"question-{i}."}])
    html = body_of(write_report(tmp_path).read_text())
    shown = [int(i) for i in re.findall(r"question-(\d+)\.", html)]
    assert len(shown) == MAX_TRAJECTORIES
    assert (shown[0], shown[-1]) == (0, 99)
    assert f"({MAX_TRAJECTORIES} of 100 kept)" in html
    for i in range(60):
        write_failed(tmp_path, i, [{"prompt": f"failure-{i}.", "failure": "agent_error", "error": "KeyError"}])
    html = body_of(write_report(tmp_path).read_text())
    assert len(re.findall(r"failure-(\d+)\.", html)) == MAX_FAILED
    assert len(re.findall(r"question-(\d+)\.", html)) == MAX_TRAJECTORIES - MAX_FAILED


def test_a_run_without_a_step_and_a_running_one_have_a_report(tmp_path):
    assert "No step has been reported yet." in write_report(tmp_path).read_text()
    (tmp_path / METRICS_FILE).write_bytes(b'{"step":1,"time":1,"actor/entropy":2.5}\n{"step":2,"ti')
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "summary.json").write_text('{"status": "fin')
    html = write_report(tmp_path).read_text()
    assert [trace["y"] for trace in plots(html)] == [[2.5]]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(("html", "tmp"))] == [REPORT_FILE]


def test_the_command_rewrites_the_report_and_prints_its_path(tmp_path):
    metrics_of(tmp_path, ["actor/entropy"])
    command = [sys.executable, "-m", "asyncrl.report"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(tmp_path / REPORT_FILE), str(tmp_path / TRACE_FILE)]
    assert (tmp_path / REPORT_FILE).exists()
    assert subprocess.run(command, capture_output=True, text=True).returncode == 2
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        write_report(tmp_path / "missing")


def test_figures_by_data_source_have_a_line_for_each(tmp_path):
    names = [f"rollout/source/{source}/reward" for source in ("openai/gsm8k", "words")]
    JsonlFile(tmp_path / METRICS_FILE).write(
        {"step": step, "actor/loss": 0.0} | dict.fromkeys(names, step / 2) for step in (1, 2)
    )
    html = body_of(write_report(tmp_path).read_text())
    assert "Reward by data source" in html
    assert '"name":"openai\\u002fgsm8k"' in html or '"name":"openai/gsm8k"' in html
    assert "Success by data source" not in html
