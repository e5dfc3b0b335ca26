"""The wandb sink with real wandb: tests read the file of an offline run."""

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

from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config, WandbConfig
from asyncrl.observability.sinks import wandb_workspace
from asyncrl.observability.sinks.jsonl import JsonlSink
from asyncrl.observability.sinks.wandb import SINK, TABLE, WandbSink, git_state
from asyncrl.observability.trajectories import trajectory_row
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan

_BLOCK_BYTES = 32_768
_CHUNK = struct.Struct("<IHB")  # crc, length, kind: 1 whole, 2 first, 3 middle, 4 last


def records(path: Path) -> Iterator[pb.Record]:
    """The records of a .wandb file: a 7-byte header, then chunks that never cross a block."""
    data = path.read_bytes()
    assert data[:4] == b":W&B", f"{path} is not a wandb file: it begins with {data[:7]!r}"
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
    """No login, no key and no network."""
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


def test_wandb_prints_nothing_and_leaves_the_home_folder_alone(alone, tmp_path):
    # In a fresh process and environment, because state of wandb and pytest in this one changes wandb's output.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "PYTEST"))}
    (home := tmp_path / "home").mkdir()
    script = (
        "from asyncrl.config.schema import WandbConfig\n"
        "from asyncrl.observability.sinks.wandb import WandbSink\n"
        f"sink = WandbSink(WandbConfig(table_every_steps=1), 'quick', {str(tmp_path)!r}, {{}})\n"
        "sink.metrics(1, {'a': 1})\n"
        "sink.trajectories([{'step': 1, 'prompt': '1+1'}])\n"
        "sink.close(None)\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")
    assert offline_run(tmp_path).exit_code == 0
    assert list(home.iterdir()) == []


def test_a_failed_run_ends_with_an_exit_code_and_its_reason(alone, tmp_path):
    sink = WandbSink(WandbConfig(), "quick", tmp_path, {})
    sink.metrics(1, {"critic/rewards/mean": 0.5})
    sink.close("replica/1 is gone")
    run = offline_run(tmp_path)
    assert run.exit_code == 1
    assert run.summary["failed"] == "replica/1 is gone"


def test_an_interrupted_run_has_exit_code_0_and_its_reason(alone, tmp_path):
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


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'offline', 'online' or 'disabled'"):
        WandbConfig(mode="of")


def trajectories(step: int, count: int = 2) -> list[dict]:
    spans = [VersionSpan(0, PolicyVersion(0, 3)), VersionSpan(1, PolicyVersion(0, 4))]
    columns = np.array([52, 53]), np.full(2, -1.0), np.ones(2, bool)
    samples = [Sample.single(i, *columns, spans, FinishReason.STOP, i / 2) for i in range(count)]
    group = Group.from_samples("u", "p", 0, np.array([50, 43, 61]), samples)
    return [trajectory_row(step, group, s, lambda tokens: "".join(map(chr, tokens))) for s in range(count)]


def test_sampled_trajectories_become_a_table_every_few_steps(alone, tmp_path):
    sink = WandbSink(WandbConfig(table_every_steps=2), "quick", tmp_path, {})
    for step in range(1, 6):
        sink.trajectories(trajectories(step))
    sink.close(None)
    tables = [row for row in offline_run(tmp_path).history if "trajectories" in row or "trajectories/_type" in row]
    assert [row["step"] for row in tables] == [2, 4, 5]
    files = sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"))
    first, second, rest = sorted(
        (json.loads(file.read_text()) for file in files), key=lambda table: table["data"][0][0]
    )
    assert first["columns"] == list(TABLE)
    assert [row[0] for row in first["data"]] == [1, 1, 2, 2]
    assert [row[0] for row in second["data"]] == [3, 3, 4, 4]
    assert [row[0] for row in rest["data"]] == [5, 5]
    assert first["data"][1][1:] == ["p", "2+=", "45", 0.5, "0.3 · 0.4", "stop", 2, "u"]


@pytest.mark.parametrize("python", ["/bin/false", "/bin/sleep"])
def test_a_service_that_does_not_start_is_one_line(alone, tmp_path, monkeypatch, python):
    """In a submitted job, whose run it outlives."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setattr(sys, "executable", python)
    with pytest.raises(ConfigError, match=r"^reporting\.wandb: a run cannot begin: .*non-zero exit status 1[^\n]*$"):
        SINK.open(Config(), tmp_path)


def test_a_last_table_that_fails_does_not_keep_the_run_open(alone, tmp_path):
    sink = WandbSink(WandbConfig(table_every_steps=9), "quick", tmp_path, {})
    sink._rows = [[object()]]  # not as many cells as columns
    with pytest.raises(ValueError, match="columns"):
        sink.close("replica/1 is gone")
    run = offline_run(tmp_path)
    assert (run.exit_code, run.summary["failed"]) == (1, "replica/1 is gone")


def test_without_tables_no_trajectory_is_kept(alone, tmp_path):
    sink = WandbSink(WandbConfig(table_every_steps=0), "quick", tmp_path, {})
    for step in range(1, 6):
        sink.trajectories(trajectories(step))
    assert sink._rows == []
    sink.close(None)
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json")) == []


def test_an_id_that_a_crash_left_empty_is_made_anew(alone, tmp_path):
    (tmp_path / "wandb-id").write_text("")
    WandbSink(WandbConfig(), "quick", tmp_path, {}).close(None)
    assert len((tmp_path / "wandb-id").read_text()) == 8


def test_a_login_is_found_whatever_the_environment_s_mode_and_starts_nothing(alone, monkeypatch):
    config = Config()
    config.reporting.wandb.mode = "online"
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert list(SINK.problems(config)) == []
    assert "WANDB_SERVICE" not in os.environ


@pytest.mark.parametrize("key", [None, "short"])
def test_an_online_run_without_a_login_is_refused_before_it_begins(tmp_path, key):
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_CONFIG_DIR": str(tmp_path / "wandb")}
    command = [sys.executable, "-m", "asyncrl.fully_async_main", "--config", "configs/quickstart.yaml"]
    command += [f"run_dir={tmp_path}/run", "reporting.wandb.mode=online"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env=kept | home | ({"WANDB_API_KEY": key} if key else {}),
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "reporting.wandb.mode" in line]
    assert line.startswith("config: reporting.wandb.mode: online needs a")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_keeps_its_id_and_repeats_no_step(alone, tmp_path):
    row = {"actor/loss": 0.5, "critic/rewards/mean": 0.25}
    ids = []
    for steps in ((1, 2, 3, 2), (2, 3, 4)):  # killed after it went back to 2; resumed from there
        folder = tmp_path / f"copy-{len(ids)}"
        sink, lines = WandbSink(WandbConfig(), "quick", tmp_path, {}), JsonlSink(tmp_path)
        for step in steps:
            sink.metrics(step, row)
            lines.metrics(step, row)
        sink.metrics(2, {"validation/accuracy": 0.5})  # a late result is not a step
        lines.close(None)
        sink.close(None)
        (tmp_path / "wandb").rename(folder)
        (path,) = folder.glob("offline-run-*/*.wandb")
        ids.append((path.stem, [items(r.history.item)["step"] for r in records(path) if r.HasField("history")]))
    assert ids[0][0] == ids[1][0]
    assert [steps for _, steps in ids] == [[1, 2, 3, 2], [4, 2]]


def test_the_dashboard_has_the_report_s_charts_in_named_sections(capsys):
    assert wandb_workspace.main(["--print"]) == 0
    sections = {section["name"]: section["panels"] for section in json.loads(capsys.readouterr().out)}
    expected = "Learning Asynchrony Throughput Agents Speculation Policy Pipes Trajectories"
    assert list(sections) == expected.split()
    metrics = {metric for panels in sections.values() for panel in panels for metric in panel.get("metrics", [])}
    assert metrics >= {
        "critic/rewards/mean",
        "fully_async/staleness/max",
        "fully_async/queue/depth",
        "fully_async/trainer/idle_ratio",
        "param_sync/transfer_s",
        "rollout/spec_accept_rate",
        "perf/fraction_of_ideal",
        "response_length/p99",
    }


def test_wandb_accepts_the_dashboard(monkeypatch):
    workspaces = pytest.importorskip("wandb_workspaces.workspaces")
    saved = []
    monkeypatch.setattr(workspaces.Workspace, "save", lambda workspace: saved.append(workspace))
    monkeypatch.setattr(workspaces.Workspace, "url", "there")
    assert wandb_workspace.save("team", "project", "asyncrl") == "there"
    spec = saved[0]._to_model().model_dump()["spec"]["section"]["panel_bank_config"]["sections"]
    assert [section["name"] for section in spec][:7] == [section["name"] for section in wandb_workspace.definition()]


def test_tensorboard_gets_every_number_by_step_and_is_refused_without_its_package(tmp_path, monkeypatch):
    from asyncrl.observability.sinks.tensorboard import SINK as TENSORBOARD
    from asyncrl.observability.sinks.tensorboard import TensorboardSink

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    problems = list(TENSORBOARD.problems(Config()))
    assert problems == [
        "reporting.tensorboard: the package tensorboard is not installed; `pip install tensorboard` adds it"
    ]
    monkeypatch.undo()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorboardSink(tmp_path)
    sink.begin(0)
    for step in (1, 2, 3):
        sink.metrics(step, {"actor/loss": step / 4, "text": "left out", "mtp/loss_1": float("nan")})
    sink.trajectories(trajectories(2))
    sink.close(None, "SIGINT")
    resumed = TensorboardSink(tmp_path)
    resumed.begin(1)  # from the checkpoint of the first step
    resumed.metrics(2, {"actor/loss": 4.0})
    resumed.close(None)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 0.25), (2, 4.0)]
    assert events.Tags()["scalars"] == ["actor/loss"]
    assert "trajectories/0/text_summary" in events.Tags()["tensors"]


def test_the_commit_of_the_working_directory_is_recorded(tmp_path, monkeypatch):
    for command in (["init", "-qb", "main"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    state = git_state()
    assert (len(state["commit"]), state["branch"], state["changed"]) == (40, "main", False)
    (tmp_path / "new").touch()
    assert git_state()["changed"]
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert git_state() == {}
