"""docs/gpu.md, from the results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.quickstart import ROOT

RESULTS, DOCS = ROOT / "benchmarks/results/gpu.json", ROOT / "docs/gpu.md"

TITLES = {
    "tests": "Tests marked `gpu`",
    "task": "The quickstart's task without Ray",
    "decode": "Decoding, native engine",
    "transformers_decode": "Decoding, transformers with a static cache and a compiled step",
    "train_native": "Train step, native decoder",
    "train_transformers": "Train step, transformers",
    "transfer": "Weights over CUDA IPC",
    "session": "Whole syncs, with generation under way",
    "draft": "The draft over syncs",
    "nccl": "NCCL between two processes on one device",
}
EXPLANATIONS = {
    "tests": "Parity of engine and trainer with the CPU, kernels, CUDA IPC, digests.",
    "task": "Trainer rank and native engine as processes that share the GPU, weights over CUDA IPC, the durable queue "
    "between them; each process is killed once with SIGKILL on the way.",
    "decode": "Qwen2 1.5B's shapes with random weights, bfloat16, about 1000 tokens a request. `of_floor`: the time in "
    "which weights and KV can be read once, at the speed of a large copy, over that of a whole step.",
    "transformers_decode": "The same model and sizes; compiled by `generate`.",
    "train_native": "The same model, 32 sequences of 1024 tokens, micro-batches of 16k tokens, AdamW with float32 "
    "master weights. `mfu` counts 6 FLOPs per weight and token, and attention.",
    "train_transformers": "As above.",
    "transfer": "The same model to another process, digests included. Every byte is copied twice: into a bucket and "
    "out of it. `of_copies`: two copies within the device, tensor by tensor, over the transfer; `of_flat_copies`: of "
    "all bytes at once. The goal is 0.8. What is missing is about a millisecond for each of twelve buckets, of Python, "
    "messages and launches.",
    "session": "Milliseconds of pauses and phases with 64 requests under way, by pause and KV mode. "
    "`device_freed_gib`: growth of the device's free memory in each unload phase. `tokens_per_s`: in the 1.5 s before "
    "a sync; with `recompute` most of them prefill what the last sync flushed, 512 tokens at a time.",
    "draft": "By arm: whether the KV cache is unloaded in each sync and whether the draft is reloaded; `none` does not "
    "speculate. The policy is trained far from the start. The model is so small that its passes cost less than their "
    "launches, so speculation does not pay; and a batch takes 30 ms, in which graphs are recorded again after an "
    "unload.",
    "nccl": "NCCL wants a device of its own for each rank.",
}
NEVER_SEEN = (
    "Several GPUs: NCCL between devices, FSDP2 over more than one rank, tensor and pipeline parallelism",
    "Ray with GPUs: placement, fractions of a GPU, `ray.share_gpus`, configs/one_gpu.yaml as a whole run",
    "vLLM and SGLang on a GPU: their receivers over CUDA IPC and NCCL, sleep and wake of their KV caches",
    "Megatron on CUDA, its parity tests included",
    "Flash attention (`model.attention=flash_attention_2`), float8, CPU offload at a real size",
    "The container images",
)


def headline(results: dict[str, Any]) -> dict[str, Any]:
    """Figures to compare between runs; null where not measured."""
    at = lambda *keys: _at(results, keys)
    return {
        "tests_passed": at("tests", "figures", "passed"),
        "tests_failed": at("tests", "figures", "failed"),
        "accuracy": at("task", "figures", "accuracy"),
        "accuracy_with_kills": at("task", "figures", "accuracy_with_kills"),
        **{f"decode_of_floor_b{b}": at("decode", "figures", f"b{b}", "of_floor") for b in (1, 8, 64, 256)},
        "mfu_native": at("train_native", "figures", "mfu"),
        "mfu_transformers": at("train_transformers", "figures", "mfu"),
        "sync_of_copies": at("transfer", "figures", "of_copies"),
        "sync_of_flat_copies": at("transfer", "figures", "of_flat_copies"),
        "draft_accepted_both": at("draft", "figures", "both", "accepted"),
        "draft_accepted_neither": at("draft", "figures", "neither", "accepted"),
    }


def write_docs(results: Path, docs: Path) -> None:
    docs.write_text(page(json.loads(results.read_text())))


def page(results: dict[str, Any]) -> str:
    lines = [
        "# Seen on a GPU",
        "",
        "Made by `python -m benchmarks.gpu --docs` from [benchmarks/results/gpu.json](../benchmarks/results/gpu.json). "
        "A figure is what one command measured once, on the device and at the commit beside it.",
        "",
    ]
    for part, title in TITLES.items():
        if part not in results:
            continue
        found = results[part]
        lines += [f"## {title}", "", EXPLANATIONS[part], ""]
        lines += [
            f"`{found['command']}` on one {found['device']}, {found['date']}, commit {found['commit']}, "
            f"torch {found['torch']}, transformers {found['transformers']}, {found['seconds']:.0f} s.",
            "",
            *_table(found["figures"]),
            "",
        ]
    lines += ["## Never seen on a GPU", "", *(f"- {what}." for what in NEVER_SEEN)]
    missing = [TITLES[part] for part in TITLES if part not in results]
    lines += [f"- {title}: `benchmarks.gpu` measures it, but has not yet." for title in missing]
    return "\n".join(lines) + "\n"


def _table(figures: dict[str, Any]) -> list[str]:
    """Plain figures in one table, and those by case in another, a row each."""
    plain = {k: v for k, v in figures.items() if not isinstance(v, dict) and k != "log"}
    cases = {k: v for k, v in figures.items() if isinstance(v, dict)}
    lines = []
    if plain:
        lines += ["| figure | found |", "|---|---|", *(f"| `{k}` | {_text(v)} |" for k, v in plain.items())]
    if cases:
        columns = list(dict.fromkeys(column for case in cases.values() for column in case))
        lines += [""] if lines else []
        lines += ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {k} | " + " | ".join(_text(v.get(c, "")) for c in columns) + " |" for k, v in cases.items()]
    return lines


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    return str(value).replace("|", "\\|")


def _at(tree: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
