"""`benchmarks.gpu_run` on the CPU, where Ray cannot be imported; its audit finds lost groups and repeated ones."""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from asyncrl.types.groups import Group
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks.gpu_run import audit
from tests.support.durable import DurableTable, drop, finish, issue, lease, publish, train

ROOT = Path(__file__).parent.parent
OPTIONS = [
    "rollout.n=4",
    "rollout.max_response_tokens=24",
    "rollout.engine.slots=8",
    "rollout.engine.max_context_tokens=64",
    "rollout.engine.cpu_priority=normal",
    "reward.function=tests.support.tiny:length_reward",
    "trainer.mini_batch_groups=2",
]
FIRST = PolicyVersion(0, 0)


@pytest.mark.slow
def test_both_processes_are_killed_and_every_group_is_trained_once_without_ray(inputs, tmp_path):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/__init__.py").write_text("raise ImportError('this machine has no Ray')\n")
    command = [sys.executable, "-m", "benchmarks.gpu_run", "--device", "cpu", "--steps", "5"]
    paths = ["--checkpoint", str(inputs / "checkpoint"), "--data", str(inputs)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([*command, *paths, *OPTIONS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert (figures["steps"], figures["lost"], figures["trained_twice"], figures["device"]) == (5, 0, 0, "cpu")
    assert all(0 <= figures[name] <= 1 for name in ("accuracy", "accuracy_with_kills"))
    assert all(figures[name] > 0 for name in ("seconds", "tokens_per_s", "sync_s"))


async def test_the_audit_counts_groups_that_are_lost_and_groups_that_are_in_the_weights_twice(tmp_path):
    table = DurableTable(tmp_path)
    await table.write(publish(FIRST, 0), *(issue(uid, FIRST) for uid in "abcdef"))
    await table.write(*(finish(_payload(uid)) for uid in "abcd"))
    await table.write(lease(["a", "b", "c"], 1), train(1), drop("e", "poison"))
    await table.close()  # d is queued, f in flight
    assert audit(table.journal.folder / "ledger.sqlite", ["a", "b", "c", "e"], _order()) == (0, 1)
    assert audit(table.journal.folder / "ledger.sqlite", ["a", "b"], _order()) == (2, 0)
    assert audit(table.journal.folder / "ledger.sqlite", ["a", "b", "c", "a", "d"], _order()) == (1, 2)


def _order():
    return (Prompt(uid, uid, (), "") for uid in (chr(ord("a") + i) for i in count()))


def _payload(uid: str) -> bytes:
    ones, spans = np.ones(3, np.float32), [VersionSpan(0, FIRST)]
    sample = Sample.single(0, ones.astype(np.int32), -ones, ones.astype(bool), spans, FinishReason.STOP, 0.0)
    return Group.from_samples(uid, "p", 0, np.arange(3), [sample]).to_bytes()
