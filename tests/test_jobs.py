"""Runs as a cluster's users start them: `ray job submit` to a head, with a runtime environment of ours."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from asyncrl.config.load import load_config
from tests.support.tiny import overrides
from tests.test_reporting_wandb import offline_run
from tests.test_run import free_port, processes_of

ROOT = Path(__file__).parent.parent
LOCAL = ROOT / "runtime_env/local.yaml"


class Head:
    """`ray start --head` with ports and a folder of its own; ``run(...)`` runs one of Ray's commands on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ray_dir = folder, tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        self.url = f"http://127.0.0.1:{(dashboard := free_port())}"
        bin_dir = Path(sys.executable).parent
        self.env = os.environ | {
            "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}",
            "PWD": str(folder),
            "RAY_API_SERVER_ADDRESS": self.url,
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # at Ray's 15, other tests would leave jobs next to nothing
        }
        self.log = folder / "head.log"
        command = [bin_dir / "ray", "start", "--head", "--block", "--num-cpus=2", "--disable-usage-stats"]
        command += [f"--port={free_port()}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
        command += [f"--dashboard-agent-listen-port={free_port()}", "--object-store-memory=300000000"]
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, f"--temp-dir={self.ray_dir}"],
                cwd=folder,
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until_it_serves()

    def run(self, *args: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "ray"), *args]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )

    def submit(self, job: str, *options: str, wait: bool = True) -> subprocess.CompletedProcess[str]:
        entry = ["--", "python", "-m", "asyncrl.fully_async_main", *options]
        how = [f"--runtime-env={LOCAL}", f"--working-dir={ROOT}", f"--submission-id={job}"]
        return self.run("job", "submit", *how, *([] if wait else ["--no-wait"]), *entry)

    def until_logged(self, job: str, text: str, timeout_s: float = 180) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in (log := self.run("job", "logs", job).stdout):
            assert time.monotonic() < deadline, f"never logged {text!r}:\n{log}"
            time.sleep(0.5)

    def job(self, job: str) -> dict:
        with urlopen(f"{self.url}/api/jobs/{job}") as answer:
            return json.load(answer)

    def actors(self) -> list[dict]:
        with urlopen(f"{self.url}/api/v0/actors?detail=true") as answer:
            return json.load(answer)["data"]["result"]["result"]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while (left := processes_of(self.ray_dir)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for process in left:
            process.kill()
        self.process.wait(10)
        shutil.rmtree(self.ray_dir, ignore_errors=True)

    def _until_it_serves(self, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with urlopen(f"{self.url}/api/jobs/"):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.2)


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    head = Head(tmp_path_factory.mktemp("head"))
    yield head
    head.close()


def steps_in(text: str, total: int) -> list[str]:
    """The first column of each step's line."""
    return re.findall(rf"^ *(\d+/{total}) +[\d–]", text, re.MULTILINE)


@pytest.mark.slow
def test_a_submitted_quickstart_tells_each_step_once_succeeds_and_lasts(head):
    for name in ("checkpoints", "data"):
        (head.folder / name).symlink_to(ROOT / name)
    submitted = head.submit(
        "quickstart", "--config", "configs/quickstart.yaml", "trainer.total_steps=4", "data.validation_files=[]"
    )
    assert submitted.returncode == 0, submitted.stdout
    assert head.job("quickstart")["status"] == "SUCCEEDED"
    assert steps_in(submitted.stdout, 4) == ["1/4", "2/4", "3/4", "4/4"], submitted.stdout
    summary = json.loads((head.folder / "runs/quickstart/summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 4)


@pytest.mark.slow
def test_a_stopped_job_leaves_a_checkpoint_from_which_another_job_goes_on(head, inputs, tmp_path):
    options = overrides(inputs, tmp_path / "run", "data.validation_files=[]", "trainer.total_steps=100000")
    submitted = head.submit("cut", *options, wait=False)
    assert submitted.returncode == 0, submitted.stdout
    head.until_logged("cut", " 3/100000 ")
    names = {actor["repr_name"]: actor["name"] for actor in head.actors() if actor["state"] == "ALIVE"}
    assert {"trainer/0", "replica/0", "rollouter", "queue"} <= names.keys()
    assert names["trainer/0"].startswith("asyncrl/tiny/")

    stopped = head.run("job", "stop", "cut", timeout_s=120)
    assert stopped.returncode == 0, stopped.stdout
    assert head.job("cut")["status"] == "STOPPED"
    log = head.run("job", "logs", "cut").stdout
    assert "SIGTERM: finishing the step under way" in log
    assert "Traceback" not in log, log
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "SIGTERM")
    rows = [row for row in offline_run(tmp_path / "run").history if "actor/loss" in row]
    assert rows[-1]["step"] == summary["steps"]  # wandb's service outlived the signal
    (saved,) = (tmp_path / "run/checkpoints").glob("step_*")
    done = int(saved.name.removeprefix("step_"))
    assert done == summary["steps"] >= 3

    more = head.submit("on", "--resume", "auto", *options, f"trainer.total_steps={done + 2}")
    assert more.returncode == 0, more.stdout
    assert steps_in(more.stdout, done + 2) == [f"{done + 1}/{done + 2}", f"{done + 2}/{done + 2}"]
    alive = {actor["repr_name"] for actor in head.actors() if actor["state"] == "ALIVE"}
    assert not alive & names.keys()


@pytest.mark.slow
def test_a_refused_job_fails_with_the_reason_and_the_exit_status(head, inputs, tmp_path):
    refused = head.submit("refused", *overrides(inputs, tmp_path / "run", "rollout.n=0"))
    assert refused.returncode == 1
    assert "config: rollout.n: expected at least 1, found 0" in refused.stdout
    job = head.job("refused")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 2)
    lost = head.submit("lost", *overrides(inputs, Path("runs/x")))  # in Ray's copy of the working directory
    assert "run_dir: runs/x is in the copy" in lost.stdout


def test_importing_the_main_module_starts_and_prints_nothing():
    code = (
        "import sys, asyncrl.fully_async_main, ray;"
        "print(ray.is_initialized(), sorted({'torch', 'wandb'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False []\n", "")


@pytest.mark.parametrize("name", ["local", "gpu_4_4", "multi_node"])
def test_runtime_environments_name_no_machine_and_give_runs_time_to_save(name):
    variables = yaml.safe_load((ROOT / f"runtime_env/{name}.yaml").read_text())["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())  # Ray takes nothing else
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
