"""Modes are pure configuration: each file of configs/modes loads, and those that test_run.py does not cover are run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from tests.support.tiny import make_inputs, overrides

ROOT = Path(__file__).parent.parent
MODES = {
    "on_policy": (1, "0", True, 0),
    "stream_off_policy": (4, "0", True, 0),
    "async_stale_samples": (1, "1/2", False, 1),
    "async_partial_rollout": (1, "1", True, 1),
}


def test_there_is_a_config_for_each_mode():
    assert {p.stem for p in (ROOT / "configs/modes").glob("*.yaml")} == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_its_options(mode):
    config = load_config(ROOT / f"configs/modes/{mode}.yaml")
    trigger, threshold, partial, bound = MODES[mode]
    options, derived = config.async_training, derive(config)
    assert (options.trigger_parameter_sync_step, options.partial_rollout) == (trigger, partial)
    assert (derived.staleness_threshold, derived.staleness_bound) == (Fraction(threshold), bound)
    assert derived.pause == ("abort" if partial else "wait")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream_off_policy", "async_stale_samples"])
def test_a_mode_runs_within_its_staleness_bound(mode, tmp_path):
    inputs = make_inputs(tmp_path)
    ray_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    options = overrides(
        inputs, tmp_path / "run", f"ray.temp_dir={ray_dir}", "data.validation_files=[]", "reporting.report=false"
    )
    config = str(ROOT / f"configs/modes/{mode}.yaml")
    command = [sys.executable, "-m", "asyncrl.fully_async_main", "--config", config, *options, "trainer.total_steps=9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=os.environ)
    shutil.rmtree(ray_dir, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "actor/loss" in row]
    trigger, _, partial, bound = MODES[mode]
    assert [row["step"] for row in steps] == list(range(1, 10))
    assert [row["fully_async/version"] for row in steps] == [(step - 1) // trigger for step in range(1, 10)]
    assert max(row["fully_async/staleness/max"] for row in steps) == bound  # reached, and not exceeded
    assert partial or not any(row["fully_async/partial/count"] for row in steps)
