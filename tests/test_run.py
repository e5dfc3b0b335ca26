"""Whole runs, started as users start them, with real Ray, engine and trainer in a separate process."""

import contextlib
import gzip
import io
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType
from urllib.request import urlopen

import grpc
import psutil
import pytest
import torch
from packaging.version import Version

from asyncrl.config.load import load_config
from asyncrl.models.checkpoint import read_tensors
from asyncrl.observability.trajectory_files import read
from asyncrl.run.placement_plan import PlacementError
from asyncrl.run.shutdown import Shutdown
from tests.support.stranger import PAYLOADS, stranger
from tests.support.tiny import authorized, overrides

ROOT = Path(__file__).parent.parent
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
#: the kernel gives huge pages on request, and the C library has the option that requests them
HUGE_PAGES = (
    _THP.exists()
    and "[never]" not in _THP.read_text()
    and Version(platform.libc_ver(version="0")[1]) >= Version("2.35")
)


class Run:
    """``python -m asyncrl.fully_async_main``, or another ``module``, with options, and its output."""

    def __init__(
        self,
        options: list[str],
        log: Path,
        module: str = "asyncrl.fully_async_main",
        within: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.log = log
        command = [*within, os.environ.get("ASYNCRL_PYTHON", sys.executable), "-u", "-m", module, *options]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.began_s = time.monotonic()

    def wait(self, timeout_s: float = 200) -> int:
        """Exit status; fails the test after ``timeout_s``."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {timeout_s} s:\n{self.text}")
        return status

    def until_printed(self, text: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"never printed {text!r}:\n{self.text}")
            time.sleep(0.1)

    @property
    def text(self) -> str:
        return self.log.read_text()


def processes_of(ray_dir: str) -> list[psutil.Process]:
    """Live processes of a run: Ray's temp dir is on each command line."""
    everyone = psutil.process_iter(["cmdline"])
    return [p for p in everyone if any(ray_dir in part for part in p.info["cmdline"] or [])]


def files_with(text: str, *folders: Path) -> set[str]:
    """Names of the files in these folders that contain a text, compressed ones included."""
    found = set()
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            if text.encode() in file.read():
                found.add(path.name)
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def actors_of(run: Run) -> list[psutil.Process]:
    below = psutil.Process(run.process.pid).children(recursive=True)
    roles = ("TrainerRank", "EngineReplica", "Rollouter", "SampleQueue")
    return [p for p in below if p.name().startswith(tuple(f"ray::{role}" for role in roles))]


def the_replica_of(run: Run) -> psutil.Process:
    (replica,) = [p for p in actors_of(run) if p.name().startswith("ray::EngineReplica")]
    return replica


def has_huge_pages(process: psutil.Process) -> bool:
    sizes = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    return any(line.startswith("AnonHugePages:") and line.split()[1] != "0" for line in sizes)


@pytest.fixture
def ray_dir():
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the sockets in it must stay below 108 characters
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(inputs, tmp_path, ray_dir):
    """Start a run on its own cluster."""
    return lambda *more: Run(overrides(inputs, tmp_path / "run", f"ray.temp_dir={ray_dir}", *more), tmp_path / "log")


def gcs_answer(ray_dir: str, token: str | None) -> grpc.StatusCode:
    """Status of a request with this token for the machines of the cluster in ``ray_dir``."""
    words = [word for process in processes_of(ray_dir) for word in process.info["cmdline"]]
    address = next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        try:
            ask(b"", timeout=20, metadata=[("authorization", f"Bearer {token}")] if token else [])
        except grpc.RpcError as e:
            return e.code()
    return grpc.StatusCode.OK


def listening_addresses(run: Run) -> set[str]:
    """Addresses at which the run's processes accept TCP connections."""
    found = set()
    for process in (driver := psutil.Process(run.process.pid), *driver.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A new, empty home, without environment variables for Ray's or wandb's files."""
    for name in [name for name in os.environ if name.startswith(("RAY_AUTH", "XDG_", "WANDB_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def test_a_run_with_two_ranks_and_two_replicas_trains_reports_and_leaves_nothing(
    start, inputs, tmp_path, ray_dir, home, monkeypatch
):
    monkeypatch.setenv("JUDGE_TOKEN", token := token_hex(16))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)  # the other tests' precaution
    run = start(
        "trainer.ranks=2",
        "rollout.replicas=2",
        "param_sync.staging=full",
        "param_sync.rollout_update=rolling",
        "async_training.staleness_threshold=1",
        "ray.cpus_per_rank=0.25",
        "ray.cpus_per_replica=0.25",
        "reporting.log_level=debug",
        f"reporting.prometheus.port={(port := free_port())}",
        *authorized("JUDGE_TOKEN", token),
    )
    run.until_printed(" 1/5 ", timeout_s=240)
    with urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert {"trainer/1", "replica/1", "rollouter"} <= json.load(answer)["seconds_since_heard"].keys()
    run.process.send_signal(signal.SIGSTOP)  # the cluster is up until it was asked, however fast the run
    try:
        servers = [p for p in processes_of(ray_dir) if Path(p.info["cmdline"][0]).name in ("gcs_server", "raylet")]
        (key,) = {p.environ()["RAY_AUTH_TOKEN"] for p in servers}
        answers = [gcs_answer(ray_dir, given) for given in (key, "another", None)]
        commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        listening = listening_addresses(run)
        with_huge_pages = [has_huge_pages(p) for p in actors_of(run)]
    finally:
        run.process.send_signal(signal.SIGCONT)
    assert answers == [grpc.StatusCode.OK, *[grpc.StatusCode.UNAUTHENTICATED] * 2]
    assert listening == {"127.0.0.1", "::ffff:127.0.0.1"}
    assert [command for command in commands if token in command or key in command] == []
    assert with_huge_pages == [HUGE_PAGES] * 6
    assert run.wait() == 0, run.text
    assert "A worker died" not in run.text  # said by Ray of processes that did not end as they were asked to
    assert "retries" not in run.text  # Ray's message about calls to the queue that end with it
    assert list(home.iterdir()) == []
    folder = tmp_path / "run"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [r for r in rows if "actor/loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5]
    for r in steps:
        counts = {k.rsplit("/", 1)[1]: v for k, v in r.items() if k.startswith("fully_async/count/")}
        assert counts.pop("issued") == sum(counts.values())
        assert r["fully_async/staleness/max"] <= r["fully_async/staleness/bound"] == 1
        assert r.get("param_sync/bytes", 5e6) > 4e6  # replicas may still be switching when a step is reported
    assert "param_sync/bytes" in steps[0]
    assert steps[0]["param_sync/replicas"] == 2
    assert steps[0]["actor/ratio_max"] == pytest.approx(1, abs=1e-4)  # engine and trainer agree on every logprob
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["failed"] is None
    assert (summary["samples_before"], summary["samples_after"]) == (6, 6)
    assert (folder / "report.html").stat().st_size > 100_000
    assert [row["step"] for row in read(folder).rows()] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    logs = {path.stem: path.read_text() for path in (folder / "logs").iterdir()}
    assert logs.keys() == {"driver", "trainer-0", "trainer-1", "replica-0", "replica-1", "rollouter", "queue"}
    assert "checkpoint of step 5 written" in logs["driver"]
    lines = {line["message"]: line for line in map(json.loads, logs["driver"].splitlines())}
    assert lines["version 0.2 is served"]["param_sync/bytes"] > 4e6
    assert lines["step 5 is trained"]["actor/loss"] == steps[-1]["actor/loss"]
    assert json.loads(logs["trainer-1"].splitlines()[0])["actor"] == "trainer/1"
    assert "(replica/1 pid=" in run.text
    assert "generates with the native engine" in run.text
    ledger = subprocess.run([sys.executable, "-m", "asyncrl.ledger", folder], cwd=ROOT, capture_output=True, text=True)
    assert ledger.returncode == 0, ledger.stderr
    assert "10 final, 0 not yet covered by a checkpoint" in ledger.stdout
    assert "balanced: issued = trained + queued + leased + in flight + dropped" in ledger.stdout
    final = read_tensors(folder / "checkpoints/final/hf")
    before = read_tensors(inputs / "checkpoint")
    assert final.keys() == before.keys()
    assert not torch.equal(final["lm_head.weight"], before["lm_head.weight"])
    assert (folder / "checkpoints/final/hf/tokenizer.json").is_file()
    (wandb,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert {"config.yaml", "report.html", wandb.name} <= files_with("Bearer ${secret:JUDGE_TOKEN}", folder)
    for secret in (token, key):
        assert files_with(secret, tmp_path, Path(ray_dir)) == set()
    assert processes_of(ray_dir) == []


def test_an_interrupted_run_finishes_its_step_saves_and_reports_it(start, tmp_path, ray_dir):
    run = start("trainer.total_steps=100000", "data.validation_files=[]")
    run.until_printed("2/100000")
    os.killpg(run.process.pid, signal.SIGINT)  # as Ctrl-C does: every foreground process gets it
    assert run.wait(60) == 128 + signal.SIGINT, run.text
    assert "SIGINT: finishing the current step" in run.text
    assert "Traceback" not in run.text
    saved = list((tmp_path / "run/checkpoints").glob("step_*"))
    assert len(saved) == 1
    assert (saved[0] / "hf/model.safetensors").is_file()
    assert processes_of(ray_dir) == []


def test_an_interruption_counts_although_the_program_that_reads_the_output_has_ended(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    shutdown, stopped = Shutdown(), []
    shutdown.on_interrupt(stopped.append)
    with monkeypatch.context() as context:
        context.setattr(sys, "stdout", Closed())
        shutdown.interrupt(signal.SIGINT)
    assert stopped == ["SIGINT"]


@pytest.mark.slow
def test_a_run_ends_in_time(start, tmp_path, ray_dir):
    run = start("trainer.total_steps=100000", "trainer.max_time_s=20", "data.validation_files=[]")
    assert run.wait(120) == 0, run.text
    assert "trainer.max_time_s: 20 s have passed: finishing the current step, then saving" in run.text
    (saved,) = (tmp_path / "run/checkpoints").glob("step_*")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("finished", "trainer.max_time_s: 20 s have passed")
    assert (saved / "hf/model.safetensors").is_file()
    assert processes_of(ray_dir) == []


@pytest.mark.slow
def test_an_agent_loop_that_always_raises_is_reported_once_and_ends_the_run(start, tmp_path, ray_dir):
    bug = tmp_path / "bug"
    run = start(
        "rollout.agent_loop=tests.support.tiny:BrokenAgentLoop",
        f"rollout.agent_loop_args.path={bug}",
        "rollout.max_consecutive_drops=20",
        "data.validation_files=[]",
    )
    run.until_printed("a bug in the agent loop")
    assert time.time() - float(bug.read_text()) < 5
    assert run.wait(120) == 1, run.text
    assert run.text.count("tiny.py") == 1, run.text  # where it happened, in the traceback of the first one
    why = "all dropped (20 × agent_error); the last one: ZeroDivisionError: a bug in the agent loop"
    assert why in json.loads((tmp_path / "run/summary.json").read_text())["failed"]
    assert "retries" not in run.text  # Ray's message about calls to the queue that end with it
    assert processes_of(ray_dir) == []


@pytest.mark.slow
def test_an_interruption_during_startup_ends_the_run_at_once(start, tmp_path, ray_dir):
    run = start()
    deadline = time.monotonic() + 60
    while not list(Path(ray_dir).glob("session_2*/logs/gcs_server.out")):  # Ray is partly started
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(40) == 128 + signal.SIGINT, run.text
    assert "Traceback" not in run.text
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"
    assert processes_of(ray_dir) == []


@pytest.mark.resume
def test_a_second_interruption_abandons_even_a_sync_that_hangs(start, tmp_path, ray_dir):
    run = start(
        "trainer.total_steps=100000",
        "data.validation_files=[]",
        "async_training.staleness_threshold=9",  # so that there are groups to train on, and a sync after them
        "reporting.report=false",
        "reporting.console_every_s=1",
    )
    run.until_printed("2/100000")
    the_replica_of(run).suspend()
    run.until_printed("driver: sync/")
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(1)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait(40) == 128 + signal.SIGINT, run.text
    assert "abandoned by SIGINT" in run.text
    assert processes_of(ray_dir) == []


@pytest.mark.faults
def test_at_the_end_of_the_prompts_leftover_groups_are_counted_and_the_last_weights_validated(start, tmp_path):
    run = start("data.epochs=1", "trainer.total_steps=100", "trainer.mini_batch_groups=10", "reporting.report=false")
    assert run.wait() == 0, run.text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["reason"], summary["steps"]) == ("finished", "the prompts ended", 2)
    assert (summary["count/issued"], summary["count/trained"], summary["count/queued"]) == (25, 20, 5)
    assert summary["samples_after"] == 6
    assert "Unhandled" not in run.text


@pytest.mark.faults
def test_the_death_of_a_process_is_reported_by_name_and_ends_a_run_that_may_not_restart_it(start, tmp_path, ray_dir):
    run = start(
        "trainer.total_steps=100000", "data.validation_files=[]", "reporting.report=false", "supervision.max_restarts=0"
    )
    run.until_printed("2/100000")
    the_replica_of(run).kill()
    assert run.wait(30) == 1, run.text
    assert "FAILED" in run.text
    assert "replica/0 died: its process was killed, ran out of memory or crashed" in run.text
    assert processes_of(ray_dir) == []


@pytest.mark.faults
def test_a_replica_that_dies_during_a_validation_is_restarted_for_it(start, tmp_path, ray_dir):
    run = start(
        "trainer.total_steps=2", "validation.samples=600", "reporting.report=false", "reporting.console_every_s=0.3"
    )
    run.until_printed("rollout/validate")
    the_replica_of(run).kill()
    assert run.wait(240) == 0, run.text
    assert "supervision: replica/0 died" in run.text
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["samples_before"], summary["samples_after"]) == (3600, 3600)
    assert summary["version_before"] == 0
    assert processes_of(ray_dir) == []


@pytest.mark.faults
def test_a_run_continues_while_another_user_sends_malformed_bytes_to_its_sockets(start, tmp_path, ray_dir):
    run = start("trainer.total_steps=12", "data.validation_files=[]", "reporting.report=false")
    run.until_printed(" 1/12 ", timeout_s=240)
    below = psutil.Process(run.process.pid).children(recursive=True)
    (rank,) = [p for p in below if p.name().startswith("ray::TrainerRank")]
    names = {c.laddr for c in rank.net_connections("unix") if "asyncrl-" in c.laddr}
    with stranger([name.strip("@\0") for name in names], list(PAYLOADS.values())) as attack:
        attack.stdout.readline()
        assert run.wait() == 0, run.text
        assert attack.poll() is None
    assert "12/12" in run.text
    assert run.text.count("was refused") == 1
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert max(step.get("param_sync/refused_connections", 0) for step in steps) > 0
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["failed"] is None


@pytest.mark.slow  # an agent loop that always fails ends it in the same way
def test_a_reward_that_always_fails_ends_the_run_with_its_reason(start, inputs, tmp_path, ray_dir):
    run = start(
        "reward.function=tests.support.tiny:failing_reward",
        "rollout.max_consecutive_drops=5",
        "data.validation_files=[]",
    )
    assert run.wait(120) == 1, run.text
    assert "the last 5 groups were all dropped (5 × reward_error)" in run.text
    assert "this reward never works" in run.text
    assert "Traceback" not in run.text
    assert "retries" not in run.text  # Ray's message about calls to the queue that end with it


def test_a_run_joins_a_cluster_and_returns_its_resources(inputs, tmp_path, ray_dir, monkeypatch):
    import ray

    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=1,
        logging_level="ERROR",
        _temp_dir=ray_dir,
        _system_config={"worker_niceness": 0},  # at Ray's 15, other tests would starve the run
    )
    try:
        address = ray.get_runtime_context().gcs_address
        more = ("trainer.total_steps=1", "data.validation_files=[]", "reporting.report=false")
        run = Run(overrides(inputs, tmp_path / "run", f"ray.address={address}", *more), tmp_path / "log")
        assert run.wait() == 0, run.text
        crowded = Run(
            overrides(
                inputs, tmp_path / "b", f"ray.address={address}", "trainer.ranks=3", "ray.placement_timeout_s=2", *more
            ),
            tmp_path / "crowded",
        )
        assert crowded.wait() == 1
        assert "the trainer pool was not placed within 2 s: it needs 1.5 CPU (free: " in crowded.text
        deadline = time.monotonic() + 30
        while ray.available_resources().get("CPU") != 1.0:  # Ray counts returned resources with a delay
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rollout.replicas=0", "rollout.replicas: expected at least 1, found 0"),
        ("rollout.replica=2", "unknown key; did you mean rollout.replicas?"),
        ("trainer.ranks=500", "trainer.ranks: "),
        ("model.path=/nowhere", "model.path: no checkpoint at /nowhere"),
        ("reward.function=tests.support.tiny:nothing", "has no nothing"),
        ("rollout.engine.max_context_tokens=100000", "is more than the model's 1024"),
        ("rollout.max_response_tokens=64", "leaves no room for a prompt"),
        ("data.max_prompt_tokens=41", "data.max_prompt_tokens: 41 is more than the 40 left beside a response"),
    ],
)
def test_invalid_options_are_refused_before_anything_starts(inputs, tmp_path, option, message, capfd):
    from asyncrl.fully_async_main import main

    assert main([*overrides(inputs, tmp_path / "run"), option]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert all(line.startswith("config: ") for line in err.splitlines())
    assert not (tmp_path / "run").exists()


def test_each_run_has_an_overridden_model_of_its_own(inputs, tmp_path, monkeypatch):
    from asyncrl.fully_async_main import main

    async def open_nothing(cluster):
        raise PlacementError("no room")

    monkeypatch.setattr("asyncrl.run.cluster.Cluster.open", open_nothing)
    monkeypatch.setattr("asyncrl.observability.telemetry.log.configure_logging", lambda *_: None)
    quiet = ("reporting.wandb.mode=disabled", "reporting.report=false")
    for context in (128, 256):
        options = overrides(inputs, tmp_path / "run", f"model.overrides.max_position_embeddings={context}", *quiet)
        assert main(options) == 1
    for name, context in (("run", 128), ("run-2", 256)):
        written = load_config(tmp_path / name / "config.yaml")
        assert json.loads((tmp_path / name / "model/config.json").read_text())["max_position_embeddings"] == context
        assert written.model.path == str(inputs / "checkpoint")  # so that a resume does not find another model
        assert written.run_dir == str(tmp_path / name)  # nor another run


def test_damaged_inputs_are_reported(inputs, tmp_path, capfd):
    from asyncrl.fully_async_main import main

    data = tmp_path / "broken.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\nnot json\n')
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in (inputs / "checkpoint").iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert main([*overrides(inputs, tmp_path / "run", f"data.train_files=[{data}]", f"model.path={torn}")]) == 2
    err = capfd.readouterr().err
    assert "broken.jsonl:2" in err
    assert "truncated or damaged" in err


def test_a_tokenizer_of_another_model_is_refused(inputs, tmp_path, capfd):
    from asyncrl.fully_async_main import main

    other = tmp_path / "other"
    other.mkdir()
    for file in (inputs / "checkpoint").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    size = len(vocabulary["model"]["vocab"])
    vocabulary["model"]["vocab"] |= {f"extra{i}": size + i for i in range(1000)}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert main([*overrides(inputs, tmp_path / "run"), f"model.path={other}"]) == 2
    assert "they do not belong together" in capfd.readouterr().err
