"""Whole runs whose agents sometimes wait for a tool for many steps: who waits for them, and what becomes of them."""

import json

import pytest

from tests.support.faults import audit, dropped

pytestmark = [pytest.mark.timeout(300)]

SLOW_S = 8.0
OPTIONS = (
    "rollout.agent_loop=tests.support.tiny:SlowTool",
    f"rollout.agent_loop_args={{slow_s: {SLOW_S}}}",
    "async_training.staleness_threshold=1",
    "async_training.queue_policy=ready_first",
    "trainer.total_steps=10",
)


@pytest.mark.slow
@pytest.mark.parametrize("overdue", ["drop", "wait"])
def test_overdue_decides_about_groups_of_slow_agents(start, tmp_path, overdue):
    run = start(f"async_training.overdue={overdue}")
    assert run.wait(240) == 0, run.text
    folder = tmp_path / "run"
    audit(folder, [2] * 10, in_order=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/loss" in row]
    durations_s = sorted(row["perf/step_s"] for row in steps)
    longest_s = durations_s[-1]
    assert durations_s[len(steps) // 2] < SLOW_S / 2  # most groups have no slow agent, and wait for none
    late = dropped(folder, "overdue")
    assert steps[-1].get("fully_async/dropped/overdue", 0) == late
    if overdue == "drop":  # no step waits for a tool
        assert late > 0
        assert longest_s < SLOW_S / 2
    else:  # a step waits for each, once its deadline has come
        assert late == 0
        assert longest_s > SLOW_S / 2
