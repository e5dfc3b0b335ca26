"""Benchmarks: CPU seconds, memory and disk are measured correctly, and each benchmark ends with its figures."""

import json
import math
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing
from typing import Any

import numpy as np
import psutil
import pytest

from asyncrl.config.load import load_config
from asyncrl.sample_queue.messages import Snapshot
from asyncrl.sample_queue.spool import SEGMENT_BYTES
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks import long_tail, overlap
from benchmarks.cpu_seconds import CpuSeconds
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.models import Run
from benchmarks.gpu.report import DOCS, RESULTS, page
from benchmarks.soak import (
    MIB,
    ROLES,
    DiskReading,
    ProcessReading,
    courses,
    figures,
    read_disk,
    read_process,
    spool_bytes_over_live,
    tenths,
)
from tests.support.durable import DurableTable, cover, finish, issue, lease, publish, train

#: CPU seconds: 1.5, and 0.4 in a child process
WORKER = """
import os, subprocess, sys, time

work = "import time\\nwhile time.process_time() < 0.4: pass\\ntime.sleep(60)"
child = subprocess.Popen([os.path.realpath(sys.executable), "-c", work])
while time.process_time() < 1.5: pass
time.sleep(0.6)
child.kill()
"""


@pytest.mark.slow  # measures CPU seconds by the clock, so it fails on a busy machine
def test_cpu_seconds_cover_all_processes_and_one_of_them(tmp_path):
    python = tmp_path / "worker-process"
    python.symlink_to(sys.executable)
    with CpuSeconds("worker-process") as cpu:
        subprocess.run([python, "-c", WORKER], check=True)
    assert 1.4 < cpu.process_s < 2.1
    assert cpu.all_s - cpu.process_s == pytest.approx(0.4, abs=0.2)


def test_cpu_seconds_of_a_process_that_was_never_seen_are_not_zero():
    with CpuSeconds("worker-process") as cpu:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.5)"], check=True)
    assert math.isnan(cpu.process_s)


# -- soak --------------------------------------------------------------------------------------------------------------

#: 100 MiB of own memory, 200 MiB shared with other processes, 50 files; prints a line when it has all of them
HOLDER = """
import mmap, os, sys
own, shared = bytearray(os.urandom(1) * (100 << 20)), mmap.mmap(-1, 200 << 20)
for at in range(0, len(shared), mmap.PAGESIZE):
    shared[at] = 1
files = [open(os.devnull) for _ in range(50)]
print("ready", flush=True)
sys.stdin.read()
"""

#: a run of 100 steps: step n is reported at second n, and its sync took n ms
STEPS = [{"step": n, "time": float(n), "param_sync/total_s": n / 1000, "trainer/groups": 34} for n in range(1, 101)]


def test_own_memory_leaves_out_shared_memory():
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"ready\n"
        found = read_process(psutil.Process(holder.pid))
        holder.stdin.close()
    assert 100 * MIB < found.own_bytes < 200 * MIB
    assert found.fds > 50
    assert found.threads >= 1


def readings(role: str, pid: int, own_mib=lambda at_s: 300, fds=lambda at_s: 50, until_s: int = 120):
    """A process read every half second, from before the first step to after the last one."""
    times = [at / 2 for at in range(-40, 2 * until_s)]
    return [ProcessReading(t, pid, role, round(own_mib(t) * MIB), fds(t), 9) for t in times]


def test_the_last_tenth_of_a_run_is_compared_with_the_second():
    """What happens in the first tenth, before it and after the last step does not count."""
    warming = readings("queue", 1, own_mib=lambda t: 100 if 10 < t <= 100 else 50 if t <= 10 else 900)
    leaking = readings("rank", 2, own_mib=lambda t: 200 + t)
    ended = readings("rank", 3, own_mib=lambda t: 200 + t * t, until_s=60)
    rank, queue = sorted(courses([*warming, *leaking, *ended], tenths(STEPS)), key=lambda course: course.role)[::-1]
    assert (rank.role, queue.role) == ("rank", "queue")
    assert queue.growth == 1
    assert rank.growth == pytest.approx((200 + 95.25) / (200 + 15.25))


def test_a_file_that_is_open_for_a_moment_is_no_leak_but_one_that_stays_open_is():
    briefly = readings("driver", 1, fds=lambda t: 51 if t % 2 == 0 else 50)
    leaking = readings("replica", 2, fds=lambda t: 50 + (t > 70) + (t % 2 == 0))
    driver, replica = courses([*briefly, *leaking], tenths(STEPS))
    assert driver.fds[-1] - driver.fds[0] == 0
    assert replica.fds[-1] - replica.fds[0] == 1


class Read:
    """Finished readings of a run with one process per role."""

    def __init__(self, **differing) -> None:
        self.processes = [r for pid, role in enumerate(ROLES) for r in differing.get(role, readings(role, pid))]
        self.disk = [DiskReading(SEGMENT_BYTES, MIB, 1), DiskReading(3 * SEGMENT_BYTES, SEGMENT_BYTES // 2, 40)]


def test_the_figures_are_those_of_the_worst_process(capsys):
    run = Read(
        queue=readings("queue", 7, own_mib=lambda t: 100 if t < 50 else 125),
        rollouter=readings("rollouter", 8, fds=lambda t: 50 + (t > 50) * 3),
        raylet=[],
    )
    run.processes += readings("gcs_server", 9, own_mib=lambda t: 100 if t < 50 else 300)
    found = figures(run, STEPS)
    assert found["rss_growth"] == 1.25
    assert found["fds_growth"] == 3
    assert found["sync_growth"] == pytest.approx(95.5 / 15.5)
    assert found["spool_bytes_over_live"] == 2
    assert found["others_rss_growth"] == 3
    assert (found["syncs"], found["groups"]) == (100, 3400)
    printed = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert printed.keys() >= {*ROLES, "gcs_server"}


def test_a_process_that_was_replaced_during_the_run_hides_no_growth():
    run = Read(replica=[*readings("replica", 7, until_s=60), *readings("replica", 8)[160:]])
    with pytest.raises(SystemExit, match="found no process of replica"):
        figures(run, STEPS)


def test_the_spool_may_hold_two_segments_beyond_the_live_payloads():
    assert spool_bytes_over_live([DiskReading(2 * SEGMENT_BYTES, 0, 2)]) == 0
    assert spool_bytes_over_live([DiskReading(2 * SEGMENT_BYTES + 10 * MIB, 5 * MIB, 2)]) == 2


async def test_live_payloads_are_those_of_groups_that_the_ledger_needs(tmp_path):
    version = PolicyVersion(0, 0)
    span, ones = VersionSpan(0, version), np.ones(1000, np.float32)

    def payload(uid: str) -> bytes:
        sample = Sample.single(0, ones.astype(np.int32), -ones, ones.astype(bool), [span], FinishReason.LENGTH, 0.0)
        return Group.from_samples(uid, "p", 0, np.arange(3), [sample]).to_bytes()

    size, table = len(payload("a")), DurableTable(tmp_path)
    await table.write(publish(version, 0), *(issue(uid, version) for uid in "abcde"))
    await table.journal.snapshot([Snapshot("e", 0, 0, bytes(500))])
    await table.write(*(finish(payload(uid)) for uid in "abcd"))
    await table.write(lease(["a", "b"], 1), train(1), lease(["c"], 2))
    assert 4 * size + 500 <= read_disk(tmp_path).live_bytes < 4 * size + 600
    await table.write(cover(1))
    assert 2 * size + 500 <= read_disk(tmp_path).live_bytes < 2 * size + 600
    await table.write(finish(payload("e")))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db, db:  # a payload that the queue forgot to delete
        db.execute("INSERT INTO payloads VALUES ('a', 1, 0, 1000000)")
    found = read_disk(tmp_path)
    assert found.live_bytes == 3 * size
    assert found.held_bytes > 5 * size
    assert found.segments == 1
    await table.close()


# -- whole benchmarks --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sample_queue_benchmark_ends_with_its_figures():
    figures = last_line("benchmarks.sample_queue --windows 1 --window-s 0.1 --latency-window-s 0.5 --steps 0")
    assert figures["speedup_over_per_call"] > 1
    assert figures["latency_p99_ms"] == max(figures["durable_p99_ms"], figures["readable_p99_ms"]) > 0


@pytest.mark.slow
def test_the_param_sync_benchmark_ends_with_its_figures():
    figures = last_line("benchmarks.param_sync --mib 8 --tensors 50 --rounds 1")
    assert figures.keys() >= {"shm_fraction_of_memcpy", "bucketed_over_per_tensor", "gloo_fraction_of_broadcast"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.slow
def test_the_lora_sync_benchmark_ends_with_its_figures():
    figures = last_line("benchmarks.lora_sync --hidden 64 --layers 1 --rank 2 --syncs 1")
    assert figures["adapters_mib"] < figures["merged_mib"] == figures["whole_weights_mib"]
    assert all(value > 0 for name, value in figures.items() if not name.endswith("_mib"))


def test_a_failing_part_of_the_gpu_benchmark_leaves_its_log(tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.PARTS, "unknown", (gpu.nccl, 100.0))
    found = gpu.run_part("unknown", Run("cpu", True, tmp_path), tmp_path / "log")["figures"]
    assert found["error"] == "exited 2"
    assert "invalid choice: 'unknown'" in found["log"][-1]


@pytest.mark.slow
def test_parts_of_the_gpu_benchmark_replace_their_own_figures_only(tmp_path):
    """On a CPU, where the figures mean nothing."""
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps({"decode": {"figures": {"b64": {"of_floor": 0.5}}}, "nccl": {"figures": {}}}))
    options = f"--device cpu --tiny --commit abc --results {results}"
    figures = last_line(f"benchmarks.gpu {options} --parts nccl train_native transfer")
    assert figures["decode_of_floor_b64"] == 0.5
    assert figures["sync_of_copies"] > 0
    found = json.loads(results.read_text())
    assert found["nccl"]["figures"]["said"] == "no CUDA device"
    assert found["train_native"]["figures"]["tokens_per_s"] > 0
    assert found["transfer"]["commit"] == "abc"


def test_the_page_of_gpu_figures_is_made_from_the_results_file():
    assert DOCS.read_text() == page(json.loads(RESULTS.read_text()))


@pytest.mark.slow
def test_the_observability_benchmark_counts_every_part():
    figures = last_line("benchmarks.observability --steps 3 data.validation_files=[] trainer.mini_batch_groups=8")
    assert 0 < figures["cpu_share"] < 1
    assert all(figures[part] > 0 for part in ("recorder", "driver", "wandb_threads", "answers", "report"))


def test_the_long_tail_is_as_long_as_it_says():
    lengths = sorted(long_tail.length(1000, f"g{g}", s) for g in range(2000) for s in range(8))
    assert statistics.median(lengths) == pytest.approx(1000, rel=0.1)
    assert statistics.fmean(lengths) == pytest.approx(1800, rel=0.1)
    assert lengths[len(lengths) * 99 // 100] == pytest.approx(13_000, rel=0.15)
    assert sum(lengths[len(lengths) * 95 // 100 :]) > sum(lengths) / 4
    assert lengths[-1] == 16_000


def test_the_overlap_benchmark_compares_the_runs_of_a_round(tmp_path, monkeypatch, capsys):
    """With runs of which only the options are checked, as `load_config` does, and whose steps take the given times."""
    step_s = {"async": 2.5, "sync": 4.0, "sync_two_threads": 3.0, "tail": 5.0, "tail_sync": 6.0}
    runs = []

    def run(seed, checkpoint, data, folder, overrides):
        config = load_config(overlap.ROOT / "configs/quickstart.yaml", overrides)
        runs.append((folder.name, config.trainer.threads))
        (run_dir := folder / "seed-0").mkdir()
        every_s, groups = step_s.get(folder.name, 0.0), 64
        # as many are generated as trained, but for the first steps, whose time does not count
        stock = {"fully_async/queue/depth": 4, "fully_async/in_flight": 2, "perf/fraction_of_ideal": 0.75}
        rows = [
            {"step": step, "actor/loss": 0.0, "time": 100 + every_s * step, "trainer/groups": groups} | stock
            for step in range(1, config.trainer.total_steps + 1)
        ]
        rows[0]["time"] -= 1000
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = {"trainer/step": 11.0, "trainer/logprobs": 1.0, "rollout/generate": 9.0}  # of five optimizer steps
        spans = [{"name": name, "actor": "any", "start": 0.0, "end": s, "args": {}} for name, s in ended.items()]
        (run_dir / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
        (run_dir / "summary.json").write_text('{"advice": "both are busy"}')

    monkeypatch.setattr(overlap, "run", run)
    monkeypatch.setattr(overlap, "ensure_inputs", lambda *folders: None)
    monkeypatch.setattr(overlap, "without_end", lambda checkpoint, out: out)
    monkeypatch.setattr(overlap.machine, "together_over_alone", lambda: {"products": 0.9})
    monkeypatch.setattr(sys, "argv", ["overlap", "--rounds", "2"])
    overlap.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == {
        "fraction_of_ideal": pytest.approx(2.0 / 2.5),  # training is the bottleneck: 2 s a step, generation 1.8
        "async_over_sync": pytest.approx(4.0 / 2.5),
        "async_over_sync_two_threads": pytest.approx(3.0 / 2.5),
        "async_over_sync_tail": pytest.approx(6.0 / 5.0),
        "train_alone_s": pytest.approx(2.0),
        "rollout_alone_s": pytest.approx(1.8),
        "async_step_s": pytest.approx(2.5),
        "sync_step_s": pytest.approx(4.0),
        "sync_two_threads_step_s": pytest.approx(3.0),
        "machine": {"products": 0.9},
    }
    assert [name for name, _ in runs[:6]] == ["alone", "async", "sync", "tail", "tail_sync", "sync_two_threads"]
    assert [name for name, threads in runs if threads == 2] == ["sync_two_threads"]


def test_the_overlap_benchmark_refuses_too_few_steps(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["overlap", "--steps", "7"])
    with pytest.raises(SystemExit):
        overlap.main()
    assert "--steps: expected at least 8, found 7" in capsys.readouterr().err


def last_line(command: str) -> dict[str, Any]:
    """Figures in the last line that a benchmark prints."""
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
