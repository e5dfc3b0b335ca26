"""Sinks are opened: built-in ones by their options, others by name or import path."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.observability.sinks.base import SINKS, Sink, SinkSpec
from asyncrl.observability.sinks.open import open_hub, sink_problems
from asyncrl.observability.telemetry.recorder import Batch
from asyncrl.run.preflight import preflight
from tests.support.tiny import make_inputs, overrides

ROOT = Path(__file__).parent.parent
REQUIRED = ["model.path=x", "data.train_files=[x]", "reward.function=x:y"]
PLAIN = ["console", "jsonl", "timeline", "trajectories"]  # always on


def config_of(*options: str) -> Config:
    return load_config(None, [*REQUIRED, "reporting.wandb.mode=disabled", *options])


def enabled(*options: str) -> list[str]:
    config = config_of(*options)
    return [name for name in SINKS.built_in() if SINKS.find(name).enabled(config)]


class Kept(Sink):
    opened: Kept | None = None

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.calls = run_dir, []
        type(self).opened = self

    def metrics(self, step, values):
        self.calls.append((step, values["a"]))

    def close(self, failed, stopped=None):
        self.calls.append("close")


KEPT = SinkSpec(open=lambda config, run_dir: Kept(run_dir))
NO_SINK = SinkSpec(open=lambda config, run_dir: object())
STRICT = SinkSpec(open=lambda config, run_dir: Sink(), problems=lambda config: ["name: expected nice, found run"])


class NoSpec:
    open = None
    enabled = None


NO_SPEC = NoSpec()


def test_built_in_sinks_are_enabled_by_their_own_options():
    assert enabled() == PLAIN
    assert enabled("reporting.prometheus.port=9400") == sorted([*PLAIN, "prometheus"])
    assert enabled("reporting.tensorboard=true") == sorted([*PLAIN, "tensorboard"])
    assert enabled("reporting.wandb.mode=offline") == [*PLAIN, "wandb"]


def test_a_sink_given_by_its_import_path_is_opened_beside_the_built_in_ones(tmp_path, capsys):
    hub = open_hub(config_of(f"reporting.sinks=[{__name__}:KEPT,jsonl]"), tmp_path)
    hub.metrics(1, {"a": 2})
    hub.close()
    assert (Kept.opened.run_dir, Kept.opened.calls) == (tmp_path, [(1, 2), "close"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1  # named twice, opened once
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("slack", rf"^reporting.sinks: expected one of .*{', '.join(PLAIN[:2])}, .*import path .*; found 'slack'$"),
        ("no_such:SINK", r"^reporting.sinks: no_such:SINK: module no_such does not import"),
        (f"{__name__}:NO_SPEC", r"^reporting.sinks: .*:NO_SPEC lacks problems, which every sink has$"),
        (f"{__name__}:NoSpec", r"^reporting.sinks: .*:NoSpec is a class; expected an instance, such as SINK = NoSpec"),
        (
            f"{__name__}:NO_SINK",
            r"^reporting.sinks: .*:NO_SINK made object, which lacks begin, close, left, metrics, spans, trajectories; ",
        ),
        (f"{__name__}:STRICT", r"^name: expected nice, found run$"),
        ("prometheus", r"^reporting.prometheus.port: expected a port to serve, found 0, but reporting.sinks names "),
    ],
)
def test_a_bad_sink_or_option_is_refused_in_one_line(tmp_path, sink, message):
    with pytest.raises(ConfigError, match=message) as refused:
        open_hub(config_of(f"reporting.sinks=[{sink}]"), tmp_path)
    assert len(refused.value.problems) == 1
    assert "\n" not in refused.value.problems[0]


def test_sinks_that_are_open_are_closed_when_another_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lacks begin, close"):
        open_hub(config_of(f"reporting.sinks=[{__name__}:KEPT,{__name__}:NO_SINK]"), tmp_path)
    assert Kept.opened.calls == ["close"]


def test_an_unknown_sink_is_refused_before_the_run_folder_is_made(tmp_path):
    inputs = make_inputs(tmp_path)
    config = load_config(None, overrides(inputs, tmp_path / "run", "reporting.sinks=[slack]"))
    with pytest.raises(ConfigError, match=r"^reporting\.sinks: expected one of"):
        preflight(config, cpus=4)
    assert list(sink_problems(replace(config, reporting=Config().reporting))) == []


def test_finding_sinks_imports_none_of_their_packages():
    script = (
        "import sys\n"
        "from asyncrl.observability.sinks.base import SINKS\n"
        "for name in SINKS.built_in(): SINKS.find(name)\n"
        "print(*{'wandb', 'tensorboard', 'rich', 'plotly', 'torch'} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_example_of_the_documentation_writes_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/examples")
    for step in (1, 2):  # a run, then its resumption
        hub = open_hub(config_of("name=sums", "reporting.sinks=[csv_sink:SINK]"), tmp_path)
        hub.metrics(step - 1, {"validation/accuracy": 0.5})
        hub.spans(Batch("replica/0", counters={"rollout/tokens": 17}))
        hub.metrics(step, {"actor/loss": 0.1, "critic/rewards/mean": 0.25, "perf/step_s": 2.5})
        hub.close()
        assert hub.failures == {}
    assert (tmp_path / "sums.csv").read_text().splitlines() == [
        "step,critic/rewards/mean,fully_async/staleness/max,perf/step_s,tokens",
        "1,0.25,,2.5,17.0",
        "2,0.25,,2.5,17.0",
    ]


def test_every_data_file_is_part_of_the_installed_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {
        path for name, globs in declared.items() for g in globs for path in ROOT.glob(f"{name.replace('.', '/')}/{g}")
    }
    here = {path for path in (ROOT / "asyncrl").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert here <= packaged
