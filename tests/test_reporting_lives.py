"""The lives of groups as the report and the trace show them: read from a real ledger."""

import gzip
import json

import pytest

from asyncrl.reporting.jsonl import LineFile
from asyncrl.reporting.lives import lives_chart, read_lives
from asyncrl.reporting.report import write_report
from asyncrl.reporting.timeline import SPANS_FILE, Timeline, read_spans
from asyncrl.reporting.trace import write_trace
from asyncrl.sample import PolicyVersion
from asyncrl.sample_queue.journal import Journal
from asyncrl.sample_queue.life import Dropped, Finished, Leased, Published, Trained
from asyncrl.telemetry.recorder import Batch, Span
from tests.support.browser import CHROMIUM, browser
from tests.test_ledger import issued, payload


async def ledger(folder) -> None:
    """Group 1 is trained, 2 is queued, 3 is dropped, 4 is being generated; events are a second apart, from 101 s on."""
    now = iter(range(101, 200))
    journal = Journal(folder, {"run": "a"}, clock=lambda: float(next(now)))
    await journal.write([Published(PolicyVersion(0, 3), 0)])
    await journal.write(issued(1, 4, PolicyVersion(0, 3)))  # at 102
    for uid in ("1", "2"):
        times = {"issued_s": 102.0, "started_s": 102.25, "generated_s": 102.5, "finished_s": 103.0}
        await journal.write([Finished(payload(uid, spans=((0, 3),), times=times))])
    await journal.write([Dropped("3", "reward_error")])
    await journal.write([Leased(["1"], 4)])
    await journal.write([Trained(["1"], 4)])
    await journal.close()


async def test_each_group_s_time_is_told_by_what_it_waited_for(tmp_path):
    await ledger(tmp_path)
    first, second, third, fourth = read_lives(tmp_path, 10)
    assert (first.uid, first.state, first.version, first.step) == ("1", "trained", "0.3", 4)
    assert [name for name, _, _ in first.phases] == [
        "waits for a slot",
        "generates",
        "is rewarded",
        "is queued",
        "is trained",
    ]
    edges = [start for _, start, _ in first.phases] + [first.phases[-1][2]]
    assert edges == [102, 102.25, 102.5, 103, 106, 107]
    assert second.phases[-1] == ("is queued", 104, 107)  # still, up to the newest thing known
    assert third.phases[-1][0] == "dropped: reward_error"
    assert fourth.phases == [("waits for a slot", 102, 107)]
    assert [life.uid for life in read_lives(tmp_path, 2)] == ["3", "4"]
    bars = {bar.name: bar for bar in lives_chart([first, second, third, fourth]).data}
    assert list(bars["is trained"].y) == [0]
    assert "1 of version 0.3, trained in step 4<br>is trained 1.000 s" in bars["is trained"].text[0]


async def test_the_trace_holds_spans_by_actor_and_lives_by_group(tmp_path):
    await ledger(tmp_path)
    rows = [{"actor": "trainer/0", "name": "trainer/step", "start": 106.0, "end": 107.0, "args": {"step": 4}}]
    LineFile(tmp_path / SPANS_FILE).write(
        [*rows, {"actor": "replica/0", "name": "rollout/generate", "start": 1, "end": 2}]
    )
    with gzip.open(write_trace(tmp_path)) as file:
        events = json.load(file)["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["replica/0", "trainer/0"]
    (step,) = [e for e in events if e["name"] == "trainer/step"]
    assert (step["ph"], step["ts"], step["dur"], step["args"]) == ("X", 106e6, 1e6, {"step": 4})
    assert lanes[step["pid"], step["tid"]] == "trainer/0"
    life = [(e["ph"], e["name"], e["ts"] / 1e6) for e in events if e.get("id") == "1"]
    assert life[-2:] == [("b", "is trained", 106), ("e", "is trained", 107)]
    opened, closed = ([e for e in events if e["ph"] == mark] for mark in "be")
    assert len(opened) == len(closed) > 4


def test_without_a_ledger_or_with_half_of_one_there_is_a_report_all_the_same(tmp_path):
    assert read_lives(tmp_path, 5) == []
    (tmp_path / "ledger.sqlite").write_bytes(b"SQLite format 3\0 and then nothing")
    assert read_lives(tmp_path, 5) == []
    assert "Lives of groups" not in write_report(tmp_path).read_text()
    write_trace(tmp_path)


def test_a_trace_stays_as_small_as_the_spans_that_are_kept(tmp_path):
    timeline = Timeline(tmp_path, max_bytes=64 * 1024)
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
async def test_the_report_is_whole_in_a_browser(tmp_path, width):
    await ledger(tmp_path)
    rows = [
        {"step": i, "time": i, "critic/rewards/mean": i / 9, "fully_async/trainer/idle_ratio": 0.1} for i in range(9)
    ]
    LineFile(tmp_path / "metrics.jsonl").write(rows)
    LineFile(tmp_path / SPANS_FILE).write([{"actor": "trainer/0", "name": "trainer/step", "start": 1, "end": 2}])
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
