"""Interval arithmetic, the activity from which idle shares are computed, and the recorder's batches."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.observability.telemetry.intervals import Activity, clip, intersect, length, share, union
from asyncrl.observability.telemetry.recorder import Batch, Recorder, Span

# Whole seconds, so that every property can be checked second by second.
intervals = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair))))


def seconds_of(spans) -> set[int]:
    return {second for start, end in spans for second in range(int(start), int(end))}


def is_normal(spans) -> bool:
    return all(start < end for start, end in spans) and all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def batch(actor: str, *spans: tuple[str, float, float], still_open: tuple[tuple[str, float, float], ...] = ()) -> Batch:
    return Batch(actor, [Span(actor, *s, {}) for s in spans], [Span(actor, *s, {}) for s in still_open])


@given(intervals)
def test_a_union_covers_the_same_seconds_in_disjoint_sorted_intervals(spans):
    joined = union(spans)
    assert seconds_of(joined) == seconds_of(spans)
    assert is_normal(joined)
    assert length(joined) == len(seconds_of(spans))
    assert union(joined) == joined


@given(intervals, intervals)
def test_an_intersection_covers_the_seconds_of_both(a, b):
    both = intersect(union(a), union(b))
    assert seconds_of(both) == seconds_of(a) & seconds_of(b)
    assert all(start < end for start, end in both)
    assert both == intersect(union(b), union(a))


@given(intervals, st.integers(0, 40), st.integers(0, 40))
def test_a_share_is_the_covered_part_of_the_window(spans, since, until):
    inside = seconds_of(spans) & set(range(since, until))
    assert seconds_of(clip(union(spans), since, until)) == inside
    if until <= since:
        assert math.isnan(share(union(spans), since, until))
    else:
        assert share(union(spans), since, until) == pytest.approx(len(inside) / (until - since))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), intervals), max_size=6), st.integers(0, 39))
def test_activity_added_in_batches_equals_all_spans_at_once(batches, since):
    activity = Activity()
    for actor, name, spans in batches:
        activity.add(batch(actor, *((name, start, end) for start, end in spans)))
    for names in (["x"], ["y"], ["x", "y"]):
        covered = seconds_of([i for _, name, spans in batches if name in names for i in spans])
        recent = covered & set(range(since, 40))
        assert seconds_of(activity.intervals(names, 0, 40)) == covered
        assert activity.share(names, since, 40) == pytest.approx(len(recent) / (40 - since))


def test_a_long_span_joins_the_short_ones_within_it():
    activity = Activity()
    activity.add(batch("trainer/0", ("step", 0.0, 1.0), ("step", 4.0, 5.0), ("step", 6.0, 7.0)))
    activity.add(batch("trainer/0", ("step", 10.0, 11.0), ("step", 3.0, 12.0)))
    assert activity.intervals(["step"], 0.0, 20.0) == [(0.0, 1.0), (3.0, 12.0)]
    assert activity.share(["step"], 2.0, 4.0) == pytest.approx(0.5)


def test_an_open_span_counts_up_to_the_drain_and_is_replaced_later():
    activity = Activity()
    activity.add(batch("trainer/0", still_open=(("trainer/step", 2.0, 6.0),)))
    assert activity.share(["trainer/step"], 0.0, 10.0) == pytest.approx(0.4)
    activity.add(batch("trainer/0", still_open=(("trainer/step", 2.0, 7.0),)))
    assert activity.share(["trainer/step"], 0.0, 10.0) == pytest.approx(0.5)
    activity.add(batch("trainer/0", ("trainer/step", 2.0, 8.0)))
    assert activity.share(["trainer/step"], 0.0, 10.0) == pytest.approx(0.6)


def test_a_pool_is_as_busy_as_its_actors_on_average():
    activity = Activity()
    activity.add(batch("replica/0", ("generate", 0.0, 10.0)))
    activity.add(batch("replica/1", ("generate", 0.0, 5.0)))
    assert activity.share(["generate"], 0.0, 10.0) == pytest.approx(1.0)
    pool = ["replica/0", "replica/1", "replica/2"]
    assert activity.share(["generate"], 0.0, 10.0, actors=pool) == pytest.approx(0.5)


def test_memory_is_bounded_and_dropped_intervals_do_not_read_as_idle():
    activity = Activity(max_intervals=100)
    for i in range(1_000):
        activity.add(batch("trainer/0", ("step", 2.0 * i, 2.0 * i + 1)))
    assert len(activity.intervals(["step"], 0.0, math.inf)) <= 100
    assert 1_700 < activity.complete_since_s < 2_000
    assert activity.share(["step"], 0.0, 2_000.0) == pytest.approx(0.5, abs=0.02)


@given(intervals, st.integers(0, 40))
def test_forgetting_the_past_changes_nothing_after_it(spans, before):
    activity = Activity()
    activity.add(batch("trainer/0", *(("step", start, end) for start, end in spans)))
    later, busy = activity.intervals(["step"], before, 40), activity.share(["step"], before, 40)
    activity.forget(before)
    assert activity.intervals(["step"], before, 40) == later
    assert activity.share(["step"], 0, 40) == pytest.approx(busy, nan_ok=True)
    assert all(end >= before for _, end in activity.intervals(["step"], 0, 40))


def test_a_recorder_drains_each_span_and_count_once_and_keeps_gauges():
    recorder = Recorder("trainer/0")
    with recorder.span("forward", tokens=4) as args:
        args["rows"] = 2
    token = recorder.begin("sync")
    recorder.count("tokens", 3)
    recorder.count("tokens", 4)
    recorder.gauge("depth", 5)
    first = recorder.drain()
    assert [(s.name, s.args) for s in first.spans] == [("forward", {"tokens": 4, "rows": 2})]
    assert [s.name for s in first.open_spans] == ["sync"]
    assert first.counters == {"tokens": 7}
    recorder.end(token)
    second = recorder.drain()
    assert [s.name for s in second.spans] == ["sync"]
    assert second.spans[0].end_s >= first.open_spans[0].end_s
    assert not second.open_spans
    assert second.counters == {}
    assert second.gauges == {"depth": 5}


def test_an_undrained_recorder_keeps_the_newest_spans_and_counts_the_dropped():
    recorder = Recorder("trainer/0", max_spans=100)
    for i in range(150):
        recorder.add_span("x", i, i + 1)
    drained = recorder.drain()
    assert len(drained.spans) <= 100
    assert drained.spans[-1].start_s == 149
    assert drained.counters["telemetry/spans_lost"] == 150 - len(drained.spans)


def test_a_span_is_recorded_when_its_block_raises():
    recorder = Recorder("trainer/0")
    with pytest.raises(ZeroDivisionError), recorder.span("step"):
        _ = 1 / 0
    drained = recorder.drain()
    assert [s.name for s in drained.spans] == ["step"]
    assert not drained.open_spans
