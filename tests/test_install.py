"""The environments for GPUs: pip resolves each from the files that docs/install.md names, without installing it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]

#: environment → constraints, and what is installed
SETS = {
    "trainer, queue, native engine": ("constraints.txt", ["."]),
    "Megatron": ("constraints-megatron.txt", [".", "megatron-core"]),
    "vLLM": ("constraints-vllm-gpu.txt", [".", "vllm"]),
    # without asyncrl, whose torch is older than the one of its kernels, but with what a replica imports
    "SGLang": ("constraints-sglang-gpu.txt", ["sglang", "ray[default]", "omegaconf", "pydantic", "pyarrow", "xxhash"]),
}


def pinned(file: str) -> dict[str, str]:
    """Versions by normalized name, of the files that this one includes too."""
    found: dict[str, str] = {}
    for line in (ROOT / file).read_text().splitlines():
        if included := re.match(r"-c (\S+)", line):
            found |= pinned(included[1])
        elif pin := re.match(r"([\w.-]+)==([\w.+]+)", line):
            found[pin[1].lower().replace("_", "-")] = pin[2]
    return found


# pip takes minutes for each; vLLM's set is the one that most people install
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "vLLM" else pytest.mark.slow) for name in SETS]
)
def test_pip_resolves_it_with_cuda_and_the_pinned_versions(name, tmp_path):
    constraints, wanted = SETS[name]
    # as on a machine without a folder of CPU builds
    environment = {k: v for k, v in os.environ.items() if k not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    environment |= {"PIP_CONFIG_FILE": os.devnull}
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--report", str(tmp_path / "report"), "--constraint", constraints, *wanted]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report").read_text())
    found = {p["metadata"]["name"].lower().replace("_", "-"): p["metadata"]["version"] for p in report["install"]}
    names = {requirement.partition("[")[0].replace(".", "asyncrl") for requirement in wanted}
    assert {"torch", *names} <= found.keys()
    assert any(package.startswith("nvidia-cublas") for package in found)  # torch's CUDA build
    pins = pinned(constraints)
    assert {n: v for n, v in found.items() if n in pins and v != pins[n]} == {}
