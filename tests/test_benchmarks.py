"""Benchmarks: CPU seconds are measured correctly, and each benchmark ends with its figures."""

import json
import math
import subprocess
import sys

import pytest

from benchmarks.cpu_seconds import CpuSeconds

#: CPU seconds: 0.6 before the file exists; then 0.5, 0.3 and 0.1 in separate threads; 0.4 in a child process
WORKER = """
import os, pathlib, subprocess, sys, threading, time

def burn(seconds):
    while time.thread_time() < seconds:
        pass

work = "import time\\nwhile time.process_time() < 0.4: pass\\ntime.sleep(60)"
child = subprocess.Popen([os.path.realpath(sys.executable), "-c", work])
burn(0.6)
pathlib.Path(sys.argv[1]).touch()
time.sleep(0.6)
for seconds in (0.5, 0.3, 0.1):
    thread = threading.Thread(target=lambda: (burn(seconds), time.sleep(0.6)))
    thread.start()
    thread.join()
child.kill()
"""


@pytest.mark.slow  # measures CPU seconds by the clock, so it fails on a busy machine
def test_cpu_seconds_cover_all_processes_and_the_busiest_threads_of_one_since_a_file_appeared(tmp_path):
    python = tmp_path / "worker-process"
    python.symlink_to(sys.executable)
    with CpuSeconds("worker-process", since=tmp_path / "opened") as cpu:
        subprocess.run([python, "-c", WORKER, str(tmp_path / "opened")], check=True)
    assert cpu.threads_s(2) == pytest.approx(0.8, abs=0.1)
    assert cpu.threads_s(3) == pytest.approx(0.9, abs=0.1)
    assert 1.4 < cpu.process_s < 2.1
    assert cpu.all_s - cpu.process_s == pytest.approx(0.4, abs=0.2)


def test_cpu_seconds_of_a_process_that_was_never_seen_are_not_zero(tmp_path):
    with CpuSeconds("worker-process", since=tmp_path / "opened") as cpu:
        subprocess.run([sys.executable, "-c", "import time; time.sleep(0.5)"], check=True)
    assert math.isnan(cpu.process_s)
    assert math.isnan(cpu.threads_s(1))


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


@pytest.mark.slow
def test_a_failing_part_of_the_gpu_benchmark_does_not_lose_the_others(tmp_path):
    """On a CPU; without the part that makes the model, those that need it fail."""
    options = f"--device cpu --tiny --out {tmp_path}"
    figures = last_line(f"benchmarks.gpu {options} --parts trainer cuda_ipc")
    assert figures["train_tokens_per_s"] is None
    assert figures["cuda_ipc_fraction"] > 0
    (file,) = tmp_path.iterdir()
    parts = json.loads(file.read_text())["parts"]
    assert parts["trainer"]["error"] == "exited 1"
    assert "CheckpointError" in parts["trainer"]["log"][-1]
    figures = last_line(f"benchmarks.gpu {options} --parts model step speculation trainer")
    assert figures["train_tokens_per_s"] > 0
    assert all(figures[f"{name}_b{b}"] > 0 for name in ("step_ms", "speculation_speedup") for b in (1, 8, 32))


@pytest.mark.slow
def test_the_observability_benchmark_counts_every_part():
    figures = last_line("benchmarks.observability --steps 3 data.validation_files=[]")
    assert 0 < figures["cpu_share"] < 1
    assert all(figures[part] > 0 for part in ("recorder", "driver", "wandb_threads", "answers", "report"))


@pytest.mark.slow
def test_the_overlap_benchmark_ends_with_its_figures():
    figures = last_line("benchmarks.overlap --steps 12 --rounds 1")
    assert figures.keys() >= {"fraction_of_ideal", "async_over_sync", "async_over_sync_two_threads"}
    assert all(value > 0 for value in figures.values())


def last_line(command: str) -> dict[str, float]:
    """Figures in the last line that a benchmark prints."""
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
