"""The agent's quickstart: two steps of it with the openai client, from an untrained model."""

import sys
from pathlib import Path

import pytest

from asyncrl.data.guess import main as write_prompts
from asyncrl.models.make_checkpoint import make_checkpoint
from tests.support.faults import FaultyRun
from tests.support.token_audit import audit_tokens

pytestmark = [pytest.mark.agents, pytest.mark.timeout(300)]

CONFIG = Path(__file__).parent.parent / "configs/quickstart_agent.yaml"


@pytest.mark.slow  # tests/test_agents_clients.py has a run in the short form
def test_two_steps_of_the_quickstart_train_what_the_engine_sampled_over_several_turns(tmp_path):
    task = {"demonstrations": "asyncrl.data.guess:demonstrations", "tokens": "asyncrl.data.guess:TOKENS"}
    make_checkpoint(tmp_path / "checkpoint", warm_start_steps=80, **task)
    write_prompts(["--out", str(tmp_path / "data"), "--train", "64", "--heldout", "8"])
    run = FaultyRun(
        None,
        tmp_path / "run",
        f"model.path={tmp_path / 'checkpoint'}",
        f"data.train_files=[{tmp_path / 'data/train.jsonl'}]",
        f"data.validation_files=[{tmp_path / 'data/heldout.jsonl'}]",
        f"rollout.agent.python={sys.prefix}-agent-openai/bin/python",
        "rollout.engine.name=tests.support.logged_engine:NATIVE",
        "rollout.n=4",
        "trainer.total_steps=2",
        "trainer.mini_batch_groups=4",
        "checkpoint.every_steps=0",  # the queue's records are kept for the audit
        "reporting.wandb.mode=disabled",
        "reporting.trajectories_per_step=16",  # all of them
        config=str(CONFIG),
    )
    try:
        assert run.wait(200) == 0, run.text
    finally:
        run.close()
    found = audit_tokens(run.folder)
    assert (found.samples, found.unexplained) == (2 * 4 * 4, 0)
    assert found.exact == found.trained > 0
    assert run.column("rollout/agent/bridged")[-1] > 0
    assert run.column("rollout/agent/branched") == []
    report = (run.folder / "report.html").read_text()
    assert "<b>assistant calls</b>" in report
    assert "<b>tool</b>" in report
