"""The command ``asyncrl``, and the modules that its subcommands run."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from asyncrl.cli.main import main
from tests.support.tiny import make_inputs, overrides

ROOT = Path(__file__).parent.parent


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_console_script_is_the_main_function():
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["asyncrl"]
    module, _, function = script.partition(":")
    assert getattr(importlib.import_module(module), function) is main


def test_train_takes_the_arguments_of_the_main_module(tmp_path, capsys):
    inputs = make_inputs(tmp_path / "inputs")
    options = overrides(inputs, tmp_path / "run", "trainer.ranks=2")
    assert main(["train", options[0], "--dry-run", *options[1:]]) == 0
    plan = capsys.readouterr().out
    assert "trainer/1  this machine" in plan
    assert not (tmp_path / "run").exists()


def test_a_part_may_be_a_module_of_the_working_directory(tmp_path):
    (tmp_path / "mine.py").write_text("SURROGATE = object()\n")
    script = "import sys; from asyncrl.cli.main import main; sys.exit(main(sys.argv[1:]))"
    options = ["algorithm.surrogate=mine:SURROGATE", "model.path=m", "reward.function=arithmetic"]
    command = [sys.executable, "-P", "-c", script, "train", *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "config: algorithm.surrogate: mine:SURROGATE lacks anchors, loss" in done.stderr


def test_the_exit_status_is_the_subcommand_s(tmp_path, capsys):
    assert main(["train", "rollout.n=0"]) == 2
    assert "config: model.path: " in capsys.readouterr().err
    assert main(["ledger", str(tmp_path)]) == 2
    assert main(["report", str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("arguments", [["simulat"], []])
def test_an_unknown_command_is_refused_with_the_known_ones(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert "{train,scale,eval,simulate,report,ledger,trajectories,data,sandbox}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "command"),
    [("asyncrl.fully_async_main", "train"), ("asyncrl.report", "report"), ("asyncrl.ledger", "ledger")],
)
def test_each_subcommand_is_also_a_module(module, command):
    by_module, by_command = python("-m", module, "--help"), python("-m", "asyncrl.cli.main", command, "--help")
    assert "usage: " in by_module.stdout + by_module.stderr
    assert (by_module.stdout, by_module.returncode) == (by_command.stdout, by_command.returncode)


def test_a_subcommand_does_not_import_packages_of_the_others(tmp_path):
    code = (
        "import sys; from asyncrl.cli.main import main;"
        f"main(['ledger', {str(tmp_path)!r}]); print(sorted({{'torch', 'ray', 'plotly'}} & set(sys.modules)))"
    )
    assert python("-c", code).stdout == "[]\n"
