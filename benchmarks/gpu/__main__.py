"""Runs all measurements on one GPU. The last line is JSON; results go to ``benchmarks/results/gpu.json``.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --parts decode train_native
    python -m benchmarks.gpu --docs

For a machine with one GPU that is available for a short while. Needs neither Ray nor a network, and asyncrl need not be
installed: run it in the repository. It imports torch with triton, transformers and their dependencies (numpy,
safetensors, tokenizers, pyyaml, jinja2, packaging), also pydantic, xxhash, omegaconf and pyarrow, and for the tests
pytest, pytest-timeout and pytest-asyncio; bring wheels of those that are missing.

Each part runs in its own process with its own time limit, and its figures replace those of its last run in the results
file as soon as they are there, with device, commit and command. ``--docs`` writes docs/gpu.md from the file. ``--device
cpu --tiny`` runs the same code without a GPU to test it; the figures then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.decode import decode, transformers_decode
from benchmarks.gpu.draft import draft
from benchmarks.gpu.models import Run
from benchmarks.gpu.report import DOCS, RESULTS, headline, write_docs
from benchmarks.gpu.sync import nccl, session, transfer
from benchmarks.gpu.train import train
from benchmarks.quickstart import ROOT

#: files with tests marked gpu that need no Ray
TESTS = ("native_engine_gpu", "trainer_gpu", "param_sync_cuda_ipc", "param_sync_collective", "param_sync_device_hash")


def tests(run: Run) -> dict[str, Any]:
    """``pytest -m gpu``: number of passed tests, and the names of failed and skipped ones."""
    report = run.folder / "tests.xml"
    files = [f"tests/test_{name}.py" for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", f"--junitxml={report}", *files]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"ASYNCRL_TEST_DEVICE": run.device}, check=False)
    outcomes: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
    for case in ET.parse(report).iter("testcase"):
        outcome = next((kind for kind in outcomes if case.find(kind) is not None), "passed")
        outcomes[outcome].append(str(case.get("name")))
    failed = outcomes["failure"] + outcomes["error"]
    return {"passed": len(outcomes["passed"]), "failed": failed, "skipped": outcomes["skipped"]}


def task(run: Run) -> dict[str, Any]:
    """`benchmarks.gpu_run`: the quickstart's task, rank and engine as processes that share the device."""
    command = [sys.executable, "-m", "benchmarks.gpu_run", "--device", run.device]
    command += ["--steps", "5"] if run.tiny else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


#: in order of execution, each with its time limit in seconds
PARTS: dict[str, tuple[Callable[[Run], dict[str, Any]], float]] = {
    "tests": (tests, 180),
    "decode": (decode, 90),
    "train_native": (functools.partial(train, implementation="native"), 90),
    "train_transformers": (functools.partial(train, implementation="transformers"), 90),
    "transfer": (transfer, 60),
    "session": (session, 120),
    "draft": (draft, 120),
    "task": (task, 200),
    "transformers_decode": (transformers_decode, 180),
    "nccl": (nccl, 90),
}


def run_part(name: str, run: Run, log: Path) -> dict[str, Any]:
    """Figures from the part's last line of JSON, or ``error`` and the end of its log."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", run.device]
    command += ["--folder", str(run.folder), *(["--tiny"] if run.tiny else [])]
    began, limit_s, problem = time.perf_counter(), PARTS[name][1], ""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        try:
            if status := process.wait(limit_s):
                problem = f"exited {status}"
        except subprocess.TimeoutExpired:
            problem = f"timed out after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    print(f"== {name}: {time.perf_counter() - began:.1f} s {problem}", *lines[-40:], sep="\n", flush=True)
    said = [line for line in lines if line.startswith("{")]  # libraries may write after it
    figures = {"error": problem, "log": lines[-30:]} if problem or not said else json.loads(said[-1])
    return {"seconds": round(time.perf_counter() - began, 1), "figures": figures}


def _environment() -> dict[str, str]:
    """One thread, and gloo on loopback, which does not need to resolve the host's name."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return fixed | os.environ


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="use a model that a CPU can run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--results", type=Path, default=RESULTS, help="results file")
    parser.add_argument("--commit", default=None, help="commit of the code, where git cannot tell")
    parser.add_argument("--docs", action="store_true", help="only write docs/gpu.md from the results file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.docs:
        write_docs(args.results, DOCS)
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; to test the code without one, use --device cpu --tiny")
    if args.part:
        print(json.dumps(PARTS[args.part][0](Run(args.device, args.tiny, args.folder))))
        return

    results: dict[str, Any] = json.loads(args.results.read_text()) if args.results.is_file() else {}
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    packages = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    commit = args.commit or _commit()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, tempfile.TemporaryDirectory() as logs:
        for part in args.parts:
            found = run_part(part, Run(args.device, args.tiny, Path(folder)), Path(logs) / part)
            origin = {"device": name, "commit": commit, "command": f"python -m benchmarks.gpu --parts {part}"}
            results[part] = origin | {"date": time.strftime("%Y-%m-%d")} | packages | found
            args.results.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{args.results}\n" + json.dumps(headline(results)))


if __name__ == "__main__":
    main()
