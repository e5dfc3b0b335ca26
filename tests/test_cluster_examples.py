"""The examples for SLURM and Kubernetes ask for what their config needs, and SLURM's script runs."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from asyncrl.config.checks import gpus_per_replica
from asyncrl.config.load import load_config
from tests.support.tiny import make_inputs, overrides
from tests.test_run import free_port

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs/examples"
CONFIG = "configs/vllm_multi_node.yaml"
#: run their command here
SRUN = '#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n'


@pytest.fixture
def wanted_gpus(monkeypatch):
    for name in ("MODEL_PATH", "TRAIN_FILE", "VALIDATION_FILE"):
        monkeypatch.setenv(name, "given")
    monkeypatch.setenv("ASYNCRL_VLLM_PYTHON", "python")
    config = load_config(ROOT / CONFIG)
    return config.trainer.ranks + config.rollout.replicas * gpus_per_replica(config)


def test_the_manifest_gives_its_config_the_gpus_that_it_needs(wanted_gpus):
    job = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert cluster["authOptions"] == {"mode": "token"}
    assert shlex.split(spec["entrypoint"])[:5] == ["python", "-m", "asyncrl.fully_async_main", "--config", CONFIG]
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert workers["replicas"] * int(worker["resources"]["limits"]["nvidia.com/gpu"]) == wanted_gpus
    assert workers["minReplicas"] == workers["maxReplicas"] == workers["replicas"]
    given = yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]
    assert {"MODEL_PATH", "TRAIN_FILE", "VALIDATION_FILE", "ASYNCRL_RUNS", "ASYNCRL_JOURNAL"} <= given.keys()
    for pod in (cluster["headGroupSpec"], workers):
        (container,) = pod["template"]["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"] == container["resources"]["requests"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    mounted = [mount["mountPath"] for mount in head["volumeMounts"]]
    for name in ("ASYNCRL_RUNS", "ASYNCRL_JOURNAL"):
        assert any(Path(given[name]).is_relative_to(path) for path in mounted), name


def test_the_slurm_script_asks_for_the_gpus_of_its_config(wanted_gpus):
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", script], check=True)
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == wanted_gpus
    assert f"docs/examples/slurm.sh {CONFIG}" in script.read_text()


@pytest.mark.resume
def test_the_slurm_script_runs_is_interrupted_and_goes_on(tmp_path):
    inputs, run = make_inputs(tmp_path / "inputs"), tmp_path / "run"
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho this-machine\n")):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "USER": "somebody",
        "SLURM_JOB_NODELIST": "this-machine",
        "RAY_PORT": str(free_port()),
        "RAY_TMPDIR": f"/tmp/ray-slurm-{os.getpid()}",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }

    def start(steps: int) -> subprocess.Popen:
        options = overrides(inputs, run, f"trainer.total_steps={steps}", "reporting.wandb.mode=disabled")
        command = ["bash", str(EXAMPLES / "slurm.sh"), "configs/quickstart.yaml", *options]
        log = (tmp_path / "log").open("a")
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    text = lambda: (tmp_path / "log").read_text()
    job = start(1000)
    until = time.monotonic() + 240
    while " 2/1000 " not in text() and job.poll() is None and time.monotonic() < until:
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)
    # Ray's handler may abort a driver that joined its cluster, once it has saved
    assert job.wait(120) in (128 + signal.SIGTERM, 128 + signal.SIGABRT), text()
    assert "stopped after step" in text()
    saved = json.loads((run / "summary.json").read_text())["steps"]
    assert saved >= 2
    job = start(saved + 2)
    assert job.wait(240) == 0, text()
    assert f"back at step {saved}" in text()
