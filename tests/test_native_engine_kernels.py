"""The native engine's GPU kernels in Triton's interpreter, on the CPU, against plain torch.

In a process of its own, because the interpreter is chosen when triton is imported. The vLLM environment has triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton: make test-vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


def test_kernels_compute_what_plain_torch_computes():
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engine_kernels"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
