"""Whole runs with agents in processes of their own, any of which may die."""

import random

import pytest

from tests.support.faults import ENDPOINT, audit

pytestmark = [pytest.mark.timeout(300)]

OPTIONS = (
    "rollout.agent.path=tests.support.agents:dialogue",
    "rollout.max_response_tokens=48",
    "rollout.engine.max_context_tokens=96",
    "reward.function=none",
    "async_training.staleness_threshold=1",
)


@pytest.mark.faults
@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_with_agents_survives_the_death_of_each_process(start, tmp_path, shards):
    run = start("trainer.total_steps=12", f"rollout.shards={shards}", f"rollout.replicas={shards}")
    moment = random.Random(1)
    for number, kind in enumerate(["rollouter", ENDPOINT, "replica"], start=1):
        run.until_trained(3 * number)
        run.until(lambda: moment.random() < 0.05, "drew the moment")
        run.kill(kind)
    assert run.wait(240) == 0, run.text
    audit(tmp_path / "run", [2] * 12)
    assert run.column("rollout/agent/bridged")[-1] > 0
    assert set(run.column("rollout/turns")) == {3}
    assert max(run.column("mismatch/fresh_kl")) < 1e-4  # what is trained is what was sampled


@pytest.mark.slow
def test_agents_that_end_their_process_cost_retries(start, tmp_path):
    run = start("trainer.total_steps=4", "rollout.agent.args={die: 0.02}", "rollout.agent.retries=5")
    assert run.wait(240) == 0, run.text
    audit(tmp_path / "run", [2] * 4)


@pytest.mark.slow
def test_a_function_that_does_not_load_ends_the_run_in_one_line(start):
    run = start("rollout.agent.path=tests.support.agents:nothing_here")
    assert run.wait(120) != 0
    assert "rollout.agent.path: " in run.text
    assert "nothing_here" in run.text
