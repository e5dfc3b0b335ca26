"""Runs as Ray jobs: the commands of docs/cluster.md, on a head node that they started."""

import contextlib
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import psutil
import pytest
import yaml

from asyncrl.config.load import load_config
from tests.support.tiny import overrides
from tests.test_reporting_wandb import offline_run
from tests.test_run import free_port, gcs_answer, processes_of

ROOT = Path(__file__).parent.parent


def page_commands() -> list[str]:
    """Commands of docs/cluster.md for one machine, in order."""
    page = (ROOT / "docs/cluster.md").read_text()
    (section,) = re.findall(r"^## One machine\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return "".join(re.findall(r"^```sh\n(.*?)^```", section, re.DOTALL | re.MULTILINE)).splitlines()


def page_command(beginning: str) -> str:
    (found,) = [line for line in page_commands() if line.startswith(beginning)]
    return found


PREPARE = page_commands()[: page_commands().index("ray start --head")]  # turns on token authentication


class Head:
    """A cluster that a user with this ``home`` starts as in docs/cluster.md. A wrapper script named ``ray`` adds its
    own ports and folder to `ray start`."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home, self.ray_dir = folder, home, tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self.url = f"http://127.0.0.1:{(dashboard := free_port())}"
        bin_dir = Path(sys.executable).parent
        options = [f"--port={free_port()}", f"--dashboard-port={dashboard}", f"--temp-dir={self.ray_dir}"]
        options += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
        options += ["--node-ip-address=127.0.0.1", "--num-cpus=2", "--object-store-memory=300000000"]
        (script := folder / "bin/ray").parent.mkdir()
        script.write_text(
            f'#!/bin/sh\n[ "$1" = start ] && set -- "$@" {" ".join(options)}\nexec {bin_dir / "ray"} "$@"\n'
        )
        script.chmod(0o755)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(script.parent), str(bin_dir), os.environ["PATH"]]),
            "RAY_API_SERVER_ADDRESS": self.url,
            "RAY_worker_niceness": "0",  # at Ray's 15, other tests would starve the jobs
        }
        started = self.run(page_command("ray start"), cwd=folder, timeout_s=200)
        if started.returncode:
            self.close()
            pytest.fail(started.stdout)

    def run(
        self, command: str, cwd: Path = ROOT, timeout_s: float = 300, prepare: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the user's shell, after the page's preparing commands."""
        script = "\n".join([*(PREPARE if prepare else []), command])
        with tempfile.TemporaryFile("w+") as out:  # not a pipe: processes left by `ray start` would hold it open
            done = subprocess.run(
                ["bash", "-ec", script], cwd=cwd, env=self.env, stdout=out, stderr=subprocess.STDOUT, timeout=timeout_s
            )
            out.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, out.read())

    def submit(self, *options: str, name: str | None = None) -> subprocess.CompletedProcess[str]:
        """Submit the page's job with more options, and wait for it unless it has a name."""
        if name is None:
            command = page_command("ray job submit --runtime-env")
        else:
            command = page_command("ray job submit --no-wait").replace(" first ", f" {name} ")
        return self.run(f"{command} {shlex.join(options)}")

    def until_logged(self, job: str, text: str, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in (log := self.get(f"/api/jobs/{job}/logs", self.token)["logs"]):
            assert time.monotonic() < deadline, f"never logged {text!r}:\n{log}"
            time.sleep(0.5)

    def logs(self, job: str) -> str:
        return self.run(page_command("ray job logs").replace("first", job)).stdout

    def stop(self, job: str) -> subprocess.CompletedProcess[str]:
        return self.run(page_command("ray job stop").replace("first", job), timeout_s=120)

    @property
    def token(self) -> str:
        return (self.home / ".ray/auth_token").read_text()

    def get(self, path: str, token: str | None) -> Any:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with urlopen(Request(self.url + path, headers=headers)) as answer:
            return json.load(answer)

    def job(self, submitted: subprocess.CompletedProcess[str]) -> dict:
        (name,) = re.findall("Job '(.*)' submitted successfully", submitted.stdout)
        return self.get(f"/api/jobs/{name}", self.token)

    def actors(self) -> list[dict]:
        return self.get("/api/v0/actors?detail=true", self.token)["data"]["result"]["result"]

    def close(self) -> None:
        for process in (left := processes_of(self.ray_dir)):
            process.terminate()
        for process in psutil.wait_procs(left, timeout=10)[1]:
            process.kill()
        shutil.rmtree(self.ray_dir, ignore_errors=True)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    (home := tmp_path_factory.mktemp("user") / "home").mkdir()
    head = Head(tmp_path_factory.mktemp("head"), home)
    yield head
    head.close()


def check_that_others_are_refused(head: Head) -> None:
    assert stat.S_IMODE((head.home / ".ray").stat().st_mode) == 0o700
    for token, status in ((None, 401), ("another", 403)):
        with pytest.raises(HTTPError) as refused:
            head.get("/api/jobs/", token)
        assert refused.value.code == status
    answers = [gcs_answer(head.ray_dir, token) for token in (head.token, "another", None)]
    assert answers == [grpc.StatusCode.OK, *[grpc.StatusCode.UNAUTHENTICATED] * 2]
    unprepared = head.run("ray job list", prepare=False)
    assert unprepared.returncode != 0
    assert "Authentication required" in unprepared.stdout


@pytest.mark.slow
def test_a_token_that_all_users_could_read_is_kept_from_them(tmp_path):
    (folder := tmp_path / "home/.ray").mkdir(mode=0o755, parents=True)  # as Ray leaves it
    (folder / "auth_token").write_text("5" * 64)
    with contextlib.closing(Head(tmp_path, tmp_path / "home")) as head:
        assert head.token == "5" * 64
        check_that_others_are_refused(head)


def steps_in(text: str, total: int) -> list[str]:
    """First column of each step's line."""
    return re.findall(rf"^ *(\d+/{total}) +[\d–]", text, re.MULTILINE)


@pytest.mark.slow
def test_the_page_s_commands_run_the_quickstart_which_reports_each_step_once_and_leaves_its_results(head):
    for name in ("checkpoints", "data"):
        (head.folder / name).symlink_to(ROOT / name)
    submitted = head.submit("trainer.total_steps=4", "data.validation_files=[]")
    assert submitted.returncode == 0, submitted.stdout
    assert head.job(submitted)["status"] == "SUCCEEDED"
    assert steps_in(submitted.stdout, 4) == ["1/4", "2/4", "3/4", "4/4"], submitted.stdout
    summary = json.loads((head.folder / "runs/quickstart/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    check_that_others_are_refused(head)


@pytest.mark.slow
def test_a_stopped_job_leaves_a_checkpoint_from_which_another_job_resumes(head, inputs, tmp_path):
    options = overrides(inputs, tmp_path / "run", "data.validation_files=[]", "trainer.total_steps=100000")
    submitted = head.submit(*options, name="cut")
    assert submitted.returncode == 0, submitted.stdout
    head.until_logged("cut", " 3/100000 ")
    names = {actor["repr_name"]: actor["name"] for actor in head.actors() if actor["state"] == "ALIVE"}
    assert {"trainer/0", "replica/0", "rollouter", "queue"} <= names.keys()
    assert names["trainer/0"].startswith("asyncrl/tiny/")

    stopped = head.stop("cut")
    assert stopped.returncode == 0, stopped.stdout
    assert head.job(submitted)["status"] == "STOPPED"
    log = head.logs("cut")
    assert "SIGTERM: finishing the current step" in log
    assert "Traceback" not in log, log
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "SIGTERM")
    rows = [row for row in offline_run(tmp_path / "run").history if "actor/loss" in row]
    assert rows[-1]["step"] == summary["steps"]  # wandb's service outlived the signal
    done = max(int(saved.name.removeprefix("step_")) for saved in (tmp_path / "run/checkpoints").glob("step_*"))
    assert done == summary["steps"] >= 3

    more = head.submit("--resume", "auto", *options, f"trainer.total_steps={done + 2}")
    assert more.returncode == 0, more.stdout
    assert steps_in(more.stdout, done + 2) == [f"{done + 1}/{done + 2}", f"{done + 2}/{done + 2}"]
    alive = {actor["repr_name"] for actor in head.actors() if actor["state"] == "ALIVE"}
    assert not alive & names.keys()


@pytest.mark.slow
def test_a_refused_job_fails_with_the_reason_and_the_exit_status(head, inputs, tmp_path):
    refused = head.submit(*overrides(inputs, tmp_path / "run", "rollout.n=0"))
    assert refused.returncode == 1
    assert "config: rollout.n: expected at least 1, found 0" in refused.stdout
    job = head.job(refused)
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 2)
    lost = head.submit(*overrides(inputs, Path("runs/x")))  # in Ray's copy of the working directory
    assert "run_dir: runs/x is in the copy" in lost.stdout


def test_importing_the_main_module_starts_and_prints_nothing():
    code = (
        "import sys, asyncrl.fully_async_main, ray;"
        "print(ray.is_initialized(), sorted({'torch', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False []\n", "")


@pytest.mark.parametrize("name", ["local", "gpu_4_4", "multi_node"])
def test_runtime_environments_name_no_machine_and_leave_runs_time_to_save(name):
    variables = yaml.safe_load((ROOT / f"runtime_env/{name}.yaml").read_text())["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())  # Ray accepts only strings
    assert int(variables["RAY_JOB_STOP_WAIT_TIME_S"]) >= 60
    assert variables["ASYNCRL_RUNS"].startswith("${")


def test_paths_and_project_come_from_the_environment(monkeypatch, tmp_path):
    for key, value in {
        "ASYNCRL_RUNS": "/disk/runs",
        "WANDB_PROJECT": "mine",
        "WANDB_MODE": "",
        "ASYNCRL_HOME": "/x",
    }.items():
        monkeypatch.setenv(key, value)
    config = load_config(ROOT / "configs/quickstart.yaml", [])
    assert config.run_dir == "/disk/runs/quickstart"
    assert (config.reporting.wandb.project, config.reporting.wandb.mode) == ("mine", "offline")
    assert config.model.path == "/x/checkpoints/arith-mimo"
    assert load_config(ROOT / "configs/quickstart.yaml", ["run_dir=here"]).run_dir == "here"
