"""Runs all GPU measurements in under nine minutes. The last line is JSON; writes
``benchmarks/results/<gpu>-<date>.json``.

    python -m benchmarks.gpu

For a machine with one GPU that is available for a short while. Needs neither Ray nor a network, and asyncrl need not be
installed: run it in the repository. It imports torch, transformers and their dependencies (numpy, safetensors,
tokenizers, pyyaml, jinja2, packaging), also pydantic and xxhash, and for the tests pytest, pytest-timeout and
pytest-asyncio; bring wheels of those that are missing. (omegaconf, wandb, plotly, pyarrow and ray are not imported.)
Each part runs in its own process with its own time limit, and the results file is written after each part, so a
failing part or the end of the machine's time does not lose the others.

- *tests*, *ipc_tests*: ``pytest -m gpu`` of the files that need no Ray.
- *model*: writes a random checkpoint, Qwen2 0.5B with one MTP layer, bfloat16, for the following parts.
- *engine*: `benchmarks.native_engine` on it: ``speedup_equal``, ``speedup_mixed`` over transformers' ``generate``.
- *step*: one decode step at 1, 8 and 32 sequences: milliseconds, of which GPU time, number of kernels, and
  ``of_bandwidth``: the time to read the weights once, at the speed of a copy in the same run, divided by the step's
  time.
- *speculation*: tokens per second with 1, 2 and 3 drafted tokens over none, at 1, 8 and 32 sequences. The weights are
  random, so at temperature 1 target and draft agree only because both are near uniform; judge the speedup by
  ``length``, the tokens per verification.
- *trainer*: bfloat16 train steps with the draft: tokens per second, seconds of an export, peak memory.
- *cuda_ipc*: ``cuda_ipc_fraction``: time of two serial device-to-device copies of a set of tensors, divided by that of
  their transfer to another process on the same GPU, into live parameters, with digests; ``…_undigested``: the transport
  alone, because digests are computed on the host.

``--device cpu --tiny`` runs the same code without a GPU to test it; the figures then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.rollouter.engines.native.core import Core

ROOT = Path(__file__).parent.parent
TOTAL_S = 530.0  # for all parts together
MIB = 1024 * 1024

QWEN2_05B: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
TINY: dict[str, Any] = QWEN2_05B | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


class Run(NamedTuple):
    """Options of a part's run."""

    device: str
    tiny: bool
    model: Path

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def median_s(self, work: Callable[[], object], rounds: int = 5) -> float:
        """Median seconds over ``rounds``, after one warm-up."""
        times = []
        for _ in range(rounds + 1):
            self.synchronize()
            began = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


# -- the parts, each in its own process --------------------------------------------------------------------------------


def tests(run: Run) -> dict[str, Any]:
    return _pytest(run, "tests/test_native_engine_gpu.py", "tests/test_trainer_gpu.py")


def ipc_tests(run: Run) -> dict[str, Any]:
    return _pytest(run, "tests/test_param_sync_cuda_ipc.py")


def _pytest(run: Run, *files: str) -> dict[str, Any]:
    """Number of passed tests, and the names of failed and skipped ones."""
    report = run.model / f"{Path(files[0]).stem}.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfEs", f"--junitxml={report}", *files]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"ASYNCRL_TEST_DEVICE": run.device}, check=False)
    outcomes: dict[str, list[str]] = {"passed": [], "failure": [], "error": [], "skipped": []}
    for case in ET.parse(report).iter("testcase"):
        outcome = next((kind for kind in outcomes if case.find(kind) is not None), "passed")
        outcomes[outcome].append(str(case.get("name")))
    failed = outcomes["failure"] + outcomes["error"]
    return {"passed": len(outcomes["passed"]), "failed": failed, "skipped": outcomes["skipped"]}


def model(run: Run) -> dict[str, Any]:
    from benchmarks.native_engine import save_random

    save_random(TINY if run.tiny else QWEN2_05B, run.model)
    return {"gib": round((run.model / "model.safetensors").stat().st_size / 2**30, 3)}


def engine(run: Run) -> dict[str, Any]:
    from benchmarks.native_engine import measure

    return measure(run.model, 1 if run.tiny else 2, run.device)


def step(run: Run) -> dict[str, Any]:
    from asyncrl.models.checkpoint import is_draft
    from asyncrl.observability.telemetry.recorder import Recorder
    from benchmarks.generation import load_model, make_core

    found = load_model(run.model, dtype="auto", device=run.device)
    nbytes = sum(view.nbytes for name, view in found.named_views().items() if not is_draft(name))
    flat = torch.empty(nbytes, dtype=torch.uint8, device=run.device)
    other = torch.empty_like(flat)
    read_s = run.median_s(lambda: other.copy_(flat)) / 2  # a copy reads and writes
    figures: dict[str, Any] = {"copy_gb_per_s": round(nbytes / read_s / 1e9, 1)}
    for batch in (1, 8, 32):
        core = make_core(found, 0, Recorder("engine"), slots=batch)
        with torch.inference_mode():
            core.submit(_requests(found.config.vocab_size, batch, 200))
            core.step()  # the prefill
            ten_steps = functools.partial(_steps, core, 10)
            seconds = run.median_s(ten_steps) / 10
            busy_s, kernels = _profiled(ten_steps, run.device)
        figures[f"b{batch}"] = {
            "ms": round(1e3 * seconds, 3),
            "gpu_ms": round(1e3 * busy_s / 10, 3),
            "kernels": round(kernels / 10),
            "of_bandwidth": round(read_s / seconds, 3),
        }
    return figures


def _steps(core: Core, count: int) -> None:
    for _ in range(count):
        core.step()


def _profiled(work: Callable[[], object], device: str) -> tuple[float, int]:
    """Seconds and number of the device's kernels (CPU operations do not count)."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as profiled:
        work()
    kernels = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e6, len(kernels)


def speculation(run: Run) -> dict[str, Any]:
    from asyncrl.observability.telemetry.recorder import Recorder
    from asyncrl.rollouter.engine_metrics import engine_metrics
    from benchmarks.generation import generate, load_model, make_core

    found, recorder = load_model(run.model, dtype="auto", device=run.device), Recorder("engine")
    new, rounds = (16, 1) if run.tiny else (96, 3)
    figures: dict[str, Any] = {}
    for batch in (1, 8, 32):
        cores = {k: make_core(found, k, recorder, slots=batch) for k in range(4)}
        rates: dict[int, list[float]] = {k: [] for k in cores}
        lengths: dict[int, float] = {}
        for number in range(rounds + 1):
            for k, core in cores.items():
                recorder.drain()
                _, seconds = generate(core, _requests(found.config.vocab_size, batch, new, seed=number))
                lengths[k] = engine_metrics(recorder.drain().counters).get("rollout/spec_accept_length", 1.0)
                rates[k] += [batch * new / seconds] if number else []
        figures[f"b{batch}"] = {
            f"k{k}": {
                "tokens_per_s": round(statistics.median(rates[k]), 1),
                "length": round(lengths[k], 3),
                "speedup": round(statistics.median(a / b for a, b in zip(rates[k], rates[0], strict=True)), 3),
            }
            for k in cores
        }
        figures[f"b{batch}"]["speedup"] = max(figures[f"b{batch}"][f"k{k}"]["speedup"] for k in (1, 2, 3))
    return figures


def trainer(run: Run) -> dict[str, Any]:
    from asyncrl.config.schema import Config
    from asyncrl.observability.telemetry.recorder import Recorder
    from asyncrl.trainer.rank import TrainerRank

    config = Config()
    config.model.path, config.trainer.device = str(run.model), run.device
    config.trainer.mixed_precision, config.trainer.max_tokens_per_micro_batch = "bfloat16", 16384
    config.trainer.mini_batch_groups, config.mtp.enable_train = 64, True
    groups, samples, length = (2, 2, 16) if run.tiny else (8, 8, 512)
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    vocabulary = (TINY if run.tiny else QWEN2_05B)["vocab_size"]
    buffers = [_group(g, samples, length, vocabulary) for g in range(groups)]
    reported: list[dict[str, float]] = []
    seconds = run.median_s(lambda: reported.append(rank.train(len(reported), buffers)), rounds=3)
    figures = {
        "step_s": round(seconds, 4),
        "tokens_per_s": round(reported[-1]["trainer/tokens"] / seconds, 1),
        "export_s": round(run.median_s(lambda: sum(tensor.nbytes for _, tensor in rank.export())), 4),
        "losses": [round(metrics["actor/loss"], 5) for metrics in reported],
        "draft_losses": [round(metrics["mtp/loss_1"], 4) for metrics in reported],
    }
    if run.device == "cuda":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    rank.close()
    return figures


def cuda_ipc(run: Run) -> dict[str, Any]:
    from benchmarks.param_sync import Link, large_and_small, manifest_of, medians

    transport = "cuda_ipc" if run.device == "cuda" else "shared_memory"
    tensors = {n: t.to(run.device) for n, t in large_and_small((8 if run.tiny else 1024) * MIB).items()}
    staged, live = ({n: torch.zeros_like(t) for n, t in tensors.items()} for _ in range(2))

    def two_copies_s() -> float:
        run.synchronize()
        began = time.perf_counter()
        for to, of in ((staged, tensors), (live, staged)):
            for name, tensor in of.items():
                to[name].copy_(tensor)
        run.synchronize()
        return time.perf_counter() - began

    nbytes = manifest_of(tensors).nbytes
    figures: dict[str, Any] = {"mib": nbytes // MIB}
    for bucket_mib in (32, 256):
        link = Link(transport, tensors, bucket_mib * MIB)
        digested_s_of = functools.partial(link.transfer_s, checksum=False)
        copies_s, digested_s, bare_s = medians(5, two_copies_s, digested_s_of, link.undigested_s)
        link.close()
        figures[f"buckets_of_{bucket_mib}_mib"] = {
            "two_copies_ms": round(1e3 * copies_s, 3),
            "cuda_ipc_fraction": round(copies_s / digested_s, 4),
            "cuda_ipc_fraction_undigested": round(copies_s / bare_s, 4),
            "gb_per_s": round(nbytes / digested_s / 1e9, 2),
            "gb_per_s_undigested": round(nbytes / bare_s / 1e9, 2),
        }
    return figures


#: in order of execution, each with its time limit in seconds
PARTS: dict[str, tuple[Callable[[Run], dict[str, Any]], float]] = {
    "tests": (tests, 110),
    "model": (model, 100),  # most of the following parts need it
    "engine": (engine, 140),
    "speculation": (speculation, 100),
    "cuda_ipc": (cuda_ipc, 60),
    "step": (step, 60),
    "trainer": (trainer, 80),
    "ipc_tests": (ipc_tests, 110),
}


def _requests(vocabulary: int, count: int, new: int, seed: int = 0) -> list[Any]:
    from asyncrl.rollouter.engines.base import Request, SamplingParams

    prompts = np.random.default_rng(seed).integers(0, vocabulary, (count, 32)).astype(np.int32)
    return [Request(f"{i}", f"{i}", prompts[i], 0, i, 0, new, SamplingParams()) for i in range(count)]


def _group(number: int, samples: int, length: int, vocabulary: int) -> bytes:
    """Random tokens with the logprobs of a uniform policy."""
    from asyncrl.types.groups import Group
    from asyncrl.types.samples import FinishReason, Sample
    from asyncrl.types.versions import PolicyVersion, VersionSpan

    rng = np.random.default_rng(number)
    made = [
        Sample.single(
            index=index,
            tokens=rng.integers(0, vocabulary, length),
            logprobs=np.full(length, -np.log(vocabulary), np.float32),
            loss_mask=np.ones(length, bool),
            spans=[VersionSpan(0, PolicyVersion(0, 0))],
            finish=FinishReason.STOP,
            reward=float(index % 2),
        )
        for index in range(samples)
    ]
    return Group.from_samples(f"g{number}", f"p{number}", 0, rng.integers(0, vocabulary, 32), made).to_bytes()


# -- running the parts in turn -----------------------------------------------------------------------------------------


def run_part(name: str, run: Run, limit_s: float) -> dict[str, Any]:
    """Figures from the part's last output line, or ``error`` and its log."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--device", run.device]
    command += ["--model", str(run.model), *(["--tiny"] if run.tiny else [])]
    log = run.model / f"{name}.log"
    began, problem = time.perf_counter(), ""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=_environment(), start_new_session=True
        )
        try:
            if status := process.wait(max(limit_s, 1.0)):
                problem = f"exited {status}"
        except subprocess.TimeoutExpired:
            problem = f"timed out after {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too
            process.wait()
    lines = log.read_text(errors="replace").splitlines()
    print(f"== {name}: {time.perf_counter() - began:.1f} s {problem}", *lines[-40:], sep="\n", flush=True)
    reported: dict[str, Any] = {"error": problem} if problem else json.loads(lines[-1])
    if problem or reported.get("failed"):
        reported["log"] = lines[-200:]
    return {"seconds": round(time.perf_counter() - began, 1)} | reported


def _environment() -> dict[str, str]:
    """One thread, and gloo on loopback, which does not need to resolve the host's name."""
    fixed = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return fixed | os.environ


def headline(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Figures to compare between runs; null where not measured."""
    found = lambda *keys: _at(parts, keys)
    return {
        "tests_passed": found("tests", "passed"),
        "tests_failed": found("tests", "failed"),
        "ipc_tests_passed": found("ipc_tests", "passed"),
        "ipc_tests_failed": found("ipc_tests", "failed"),
        "speedup_equal": found("engine", "speedup_equal"),
        "speedup_mixed": found("engine", "speedup_mixed"),
        **{f"step_ms_b{b}": found("step", f"b{b}", "ms") for b in (1, 8, 32)},
        **{f"speculation_speedup_b{b}": found("speculation", f"b{b}", "speedup") for b in (1, 8, 32)},
        "train_tokens_per_s": found("trainer", "tokens_per_s"),
        "cuda_ipc_fraction": found("cuda_ipc", "buckets_of_256_mib", "cuda_ipc_fraction"),
        "cuda_ipc_fraction_undigested": found("cuda_ipc", "buckets_of_256_mib", "cuda_ipc_fraction_undigested"),
    }


def _at(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="use a model that a CPU can run")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder of the results file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # in this process
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device found; to test the code without one, use --device cpu --tiny")
    if args.part:
        print(json.dumps(PARTS[args.part][0](Run(args.device, args.tiny, args.model))))
        return

    ends_s = time.perf_counter() + TOTAL_S
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    file = args.out / f"{name.replace(' ', '-').lower()}-{time.strftime('%Y-%m-%d')}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers", "numpy")}
    parts: dict[str, dict[str, Any]] = {}
    result = {"device": name, "tiny": args.tiny, "python": platform.python_version(), "versions": versions}
    with tempfile.TemporaryDirectory() as folder:
        for part in args.parts:
            left_s = ends_s - time.perf_counter()
            parts[part] = run_part(part, Run(args.device, args.tiny, Path(folder)), min(PARTS[part][1], left_s))
            file.write_text(json.dumps(result | {"figures": headline(parts), "parts": parts}, indent=1) + "\n")
    print(f"\n{file}\n" + json.dumps(headline(parts)))


if __name__ == "__main__":
    main()
