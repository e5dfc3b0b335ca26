"""Group timelines in the report and the trace, read from a real ledger."""

import gzip
import json

import pytest

from asyncrl.observability.report.group_timeline import group_timeline_chart, read_group_timelines
from asyncrl.observability.report.report import write_report
from asyncrl.observability.report.trace import write_trace
from asyncrl.observability.sinks.jsonl import JsonlFile
from asyncrl.observability.sinks.timeline import SPANS_FILE, TimelineSink, read_spans
from asyncrl.observability.telemetry.recorder import Batch, Span
from asyncrl.types.versions import PolicyVersion
from tests.support.browser import CHROMIUM, browser
from tests.support.durable import DurableTable, drop, finish, lease, publish, train
from tests.test_ledger import issued, payload


async def ledger(folder) -> None:
    """Group 1 is trained, 2 queued, 3 dropped, 4 in flight; events are one second apart, from 101 s on."""
    now = iter(range(101, 200))
    table = DurableTable(folder, {"run": "a"}, clock=lambda: float(next(now)))
    await table.write(publish(PolicyVersion(0, 3), 0))
    await table.write(*issued(1, 4, PolicyVersion(0, 3)))  # at 102
    for uid in ("1", "2"):
        times = {"issued_s": 102.0, "started_s": 102.25, "generated_s": 102.5, "finished_s": 103.0}
        await table.write(finish(payload(uid, spans=((0, 3),), times=times)))
    await table.write(drop("3", "reward_error"))
    await table.write(lease(["1"], 4))
    await table.write(train(4))
    await table.close()


async def test_a_group_s_timeline_has_its_phases(tmp_path):
    await ledger(tmp_path)
    first, second, third, fourth = read_group_timelines(tmp_path, 10)
    assert (first.uid, first.state, first.version, first.step) == ("1", "trained", "0.3", 4)
    assert [name for name, _, _ in first.phases] == [
        "waiting for a slot",
        "generating",
        "scoring",
        "queued",
        "training",
    ]
    edges = [start for _, start, _ in first.phases] + [first.phases[-1][2]]
    assert edges == [102, 102.25, 102.5, 103, 106, 107]
    assert second.phases[-1] == ("queued", 104, 107)  # not over: lasts until the newest event
    assert third.phases[-1][0] == "dropped: reward_error"
    assert fourth.phases == [("waiting for a slot", 102, 107)]
    assert [group.uid for group in read_group_timelines(tmp_path, 2)] == ["3", "4"]
    bars = {bar.name: bar for bar in group_timeline_chart([first, second, third, fourth]).data}
    assert list(bars["training"].y) == [0]
    assert "1 of version 0.3, trained in step 4<br>training 1.000 s" in bars["training"].text[0]


async def test_the_trace_has_spans_by_actor_and_phases_by_group(tmp_path):
    await ledger(tmp_path)
    rows = [{"actor": "trainer/0", "name": "trainer/step", "start": 106.0, "end": 107.0, "args": {"step": 4}}]
    JsonlFile(tmp_path / SPANS_FILE).write(
        [*rows, {"actor": "replica/0", "name": "rollout/generate", "start": 1, "end": 2}]
    )
    with gzip.open(write_trace(tmp_path)) as file:
        events = json.load(file)["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["replica/0", "trainer/0"]
    (step,) = [e for e in events if e["name"] == "trainer/step"]
    assert (step["ph"], step["ts"], step["dur"], step["args"]) == ("X", 106e6, 1e6, {"step": 4})
    assert lanes[step["pid"], step["tid"]] == "trainer/0"
    phases = [(e["ph"], e["name"], e["ts"] / 1e6) for e in events if e.get("id") == "1"]
    assert phases[-2:] == [("b", "training", 106), ("e", "training", 107)]
    opened, closed = ([e for e in events if e["ph"] == mark] for mark in "be")
    assert len(opened) == len(closed) > 4


def test_a_report_needs_no_ledger_and_survives_a_broken_one(tmp_path):
    assert read_group_timelines(tmp_path, 5) == []
    (tmp_path / "ledger.sqlite").write_bytes(b"SQLite format 3\0 and then nothing")
    assert read_group_timelines(tmp_path, 5) == []
    assert "Group timelines" not in write_report(tmp_path).read_text()
    write_trace(tmp_path)


def test_a_trace_is_bounded_like_the_timeline(tmp_path):
    timeline = TimelineSink(tmp_path, max_bytes=64 * 1024)
    for i in range(5_000):
        timeline.spans(Batch("trainer/0", [Span("trainer/0", "trainer/step", i, i + 0.9, {"step": i})]))
    timeline.close(None)
    kept = len(read_spans(tmp_path))
    assert 100 < kept < 1_000
    with gzip.open(write_trace(tmp_path)) as file:
        assert len(json.load(file)["traceEvents"]) == kept + 3


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 390])
async def test_a_browser_draws_the_whole_report(tmp_path, width):
    await ledger(tmp_path)
    rows = [
        {"step": i, "time": i, "critic/rewards/mean": i / 9, "fully_async/trainer/idle_ratio": 0.1} for i in range(9)
    ]
    JsonlFile(tmp_path / "metrics.jsonl").write(rows)
    JsonlFile(tmp_path / SPANS_FILE).write([{"actor": "trainer/0", "name": "trainer/step", "start": 1, "end": 2}])
    async with browser(tmp_path / "profile") as page:
        await page.show(write_report(tmp_path).as_uri(), width)
        assert page.errors == []
        plots = "[...document.querySelectorAll('.js-plotly-plot')]"
        assert await page.value(f"{plots}.length") == 4
        assert await page.value(
            f"{plots}.every(p => p.querySelector('.plot path, .barlayer path, .scatterlayer path'))"
        )
        assert await page.value("document.documentElement.scrollWidth") <= width
        inside = "(p => { const r = p.getBoundingClientRect(); return r.left >= 0 && r.right <= innerWidth })"
        assert await page.value(f"{plots}.every{inside}")
