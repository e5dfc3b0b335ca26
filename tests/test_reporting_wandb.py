"""The wandb sink, against wandb itself: an offline run is read back from the file it leaves."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wandb.proto import wandb_internal_pb2 as pb

from asyncrl.config.schema import WandbConfig
from asyncrl.reporting.wandb_sink import WandbSink

_BLOCK_BYTES = 32_768
_CHUNK = struct.Struct("<IHB")  # crc, length, kind: 1 whole, 2 first, 3 middle, 4 last


def records(path: Path) -> Iterator[pb.Record]:
    """The records of a .wandb file: a 7-byte header, then chunks that never cross a block."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is no wandb file: it begins with {data[:7]!r}"
    at, pending = 7, b""
    while at + _CHUNK.size <= len(data):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _CHUNK.size:
            at += left
            continue
        _, size, kind = _CHUNK.unpack_from(data, at)
        if kind == 0:  # padding up to the next block
            at += left
            continue
        pending += data[at + _CHUNK.size : at + _CHUNK.size + size]
        at += _CHUNK.size + size
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(pending)
            pending = b""
            yield record


@dataclass
class OfflineRun:
    config: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    project: str = ""
    tags: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    step_metric: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None


def items(of: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in of}


def offline_run(run_dir: Path) -> OfflineRun:
    (path,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    run = OfflineRun()
    for record in records(path):
        match record.WhichOneof("record_type"):
            case "run":
                run.config |= items(record.run.config.update)
                run.name, run.project = record.run.display_name or run.name, record.run.project or run.project
                run.tags = list(record.run.tags) or run.tags
            case "history":
                run.history.append(items(record.history.item))
            case "summary":
                run.summary |= items(record.summary.update)
            case "metric":
                run.step_metric[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "exit":
                run.exit_code = record.exit.exit_code
    return run


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """No login, no key, and no network that would answer one."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


def test_an_offline_run_holds_config_and_metrics_by_step(alone, tmp_path):
    config = WandbConfig(project="test", tags=["cpu"])
    sink = WandbSink(config, "quick", tmp_path, {"seed": 3, "trainer": {"optimizer": {"lr": 1e-3}}})
    for step in range(1, 4):
        sink.metrics(step, {"critic/rewards/mean": np.float32(step / 4), "fully_async/version": step, "skip": object()})
    sink.metrics(3, {"actor/loss": float("nan"), "skip": np.array([3, 4])})
    sink.metrics(2, {"validation/accuracy": 0.75})  # a late result for an earlier step
    sink.close(None)
    run = offline_run(tmp_path)
    assert (run.name, run.project, run.tags) == ("quick", "test", ["cpu"])
    assert run.config["seed"] == 3
    assert run.config["trainer"] == {"optimizer": {"lr": 1e-3}}
    assert [(row["step"], row.get("critic/rewards/mean")) for row in run.history[:3]] == [
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert not any("skip" in row for row in run.history)
    assert (run.history[4]["step"], run.history[4]["validation/accuracy"]) == (2, 0.75)
    assert run.step_metric["*"] == "step"
    assert run.exit_code == 0


def test_nothing_is_said_on_the_console(alone, tmp_path):
    # In a process and an environment of its own: what wandb and pytest leave in this one changes what wandb says.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "PYTEST"))}
    script = (
        "from asyncrl.config.schema import WandbConfig\n"
        "from asyncrl.reporting.wandb_sink import WandbSink\n"
        f"sink = WandbSink(WandbConfig(), 'quick', {str(tmp_path)!r}, {{}})\n"
        "sink.metrics(1, {'a': 1})\n"
        "sink.close(None)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")
    assert offline_run(tmp_path).exit_code == 0


def test_a_failed_run_ends_with_an_exit_code_and_its_reason(alone, tmp_path):
    sink = WandbSink(WandbConfig(), "quick", tmp_path, {})
    sink.metrics(1, {"critic/rewards/mean": 0.5})
    sink.close("replica/1 is gone")
    run = offline_run(tmp_path)
    assert run.exit_code == 1
    assert run.summary["failed"] == "replica/1 is gone"


def test_an_interrupted_run_ends_well_with_what_stopped_it(alone, tmp_path):
    sink = WandbSink(WandbConfig(), "quick", tmp_path, {})
    sink.metrics(1, {"critic/rewards/mean": 0.5})
    sink.close(None, "SIGINT")
    run = offline_run(tmp_path)
    assert run.exit_code == 0
    assert run.summary["stopped"] == "SIGINT"
    assert "failed" not in run.summary


def test_a_disabled_run_leaves_nothing_behind(alone, tmp_path):
    sink = WandbSink(WandbConfig(mode="disabled"), "quick", tmp_path, {"seed": 3})
    sink.metrics(1, {"critic/rewards/mean": 0.5})
    sink.close(None)
    assert list(tmp_path.rglob("*.wandb")) == []


def test_an_unknown_mode_is_refused_with_the_ones_there_are(tmp_path):
    with pytest.raises(ValueError, match="offline, online, disabled, found 'of'"):
        WandbSink(WandbConfig(mode="of"), "quick", tmp_path, {})
