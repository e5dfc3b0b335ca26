"""Compares the native engine's CPU throughput with transformers' ``generate``, both with logprobs.

Both sides have the same random model, prompts and lengths, 32 sequences at once, one thread, sampling at temperature 1.
Hugging Face has its default (SDPA) attention, a dynamic cache, no end-of-sequence check, no gradient, and one pass
over its logits for the logprobs. ``equal``: 32 requests of one length. ``mixed``: 128 requests of long-tailed lengths;
``generate`` runs batches of 32 until the longest is done, since lengths are not known beforehand. The sides alternate,
and the results are medians.

    OMP_NUM_THREADS=1 python -m benchmarks.native_engine [--repetitions 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from asyncrl.config.schema import EngineConfig
from asyncrl.models.checkpoint import is_draft, read_tensors, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.rollouter.engines.base import Engine, Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.versions import PolicyVersion

CONCURRENT, PROMPT_TOKENS, CONTEXT_TOKENS = 32, 32, 512
EQUAL = [128] * CONCURRENT
# geometric from 16 to 256, shuffled: most samples are short, a few are long
MIXED = [round(16 * 16 ** (i * 37 % 128 / 127)) for i in range(4 * CONCURRENT)]

COMMON = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5m": COMMON
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 5,
        "head_dim": 64,
    },
    "mimo_1m": COMMON
    | {
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_nextn_predict_layers": 1,
    },
}


def save_random(raw: dict[str, Any], folder: Path) -> None:
    """Write a random checkpoint in the dtype of its config."""
    config = DecoderConfig.from_dict(raw)
    with torch.device("meta"):  # skips torch's own initialization; init_weights draws the weights below
        decoder = Decoder(config)
    decoder = decoder.to_empty(device="cpu")
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    decoder.init_weights(seed=0)
    dtype = getattr(torch, config.engine_dtype("auto"))
    save_checkpoint(folder, {name: p.detach().to(dtype) for name, p in decoder.named_parameters()}, config)


def as_transformers(folder: Path, device: str) -> Any:
    """The checkpoint's trunk as a Hugging Face model (MiMo's trunk is a Qwen2)."""
    config = DecoderConfig.load(folder)
    family = "Qwen3" if config.qk_norm else "Qwen2"
    fields = {k: v for k, v in config.raw.items() if k not in ("architectures", "num_nextn_predict_layers")}
    hf_config = getattr(transformers, f"{family}Config")(**fields)
    with torch.device(device):
        hf: Any = transformers.AutoModelForCausalLM.from_config(
            hf_config, dtype=getattr(torch, config.engine_dtype("auto"))
        ).eval()
    trunk = {name: tensor for name, tensor in read_tensors(folder).items() if not is_draft(name)}
    missing, unexpected = hf.load_state_dict(trunk, strict=False)
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    assert not unexpected, unexpected
    return hf


@torch.inference_mode()
def run_transformers(hf: Any, prompts: np.ndarray, lengths: list[int]) -> None:
    for lo in range(0, len(lengths), CONCURRENT):
        ids = torch.from_numpy(prompts[lo : lo + CONCURRENT]).long().to(hf.device)
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths[lo : lo + CONCURRENT]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        drawn = out.sequences[:, PROMPT_TOKENS:].unbind(1)
        logprobs = [
            torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])
            for logits, tokens in zip(out.logits, drawn, strict=True)
        ]
        torch.cat(logprobs, 1).cpu()


async def run_engine(engine: Engine, prompts: np.ndarray, lengths: list[int]) -> None:
    params = SamplingParams()
    await engine.submit([Request(f"{i}", f"{i}", prompts[i], 0, i, 0, n, params) for i, n in enumerate(lengths)])
    unfinished, tokens = len(lengths), 0
    while unfinished:
        events = await engine.events()
        unfinished -= sum(finish is not None for finish in events.finish)
        tokens += len(events.tokens)
    assert tokens == sum(lengths), f"expected {sum(lengths)} tokens, found {tokens}"


def measure(folder: Path, repetitions: int, device: str = "cpu") -> dict[str, float]:
    """Tokens per second and speedups on the checkpoint in ``folder``, in its own dtype on both sides."""
    figures: dict[str, float] = {}
    with asyncio.Runner() as runner:
        hf = as_transformers(folder, device)
        options = EngineConfig(slots=CONCURRENT, max_context_tokens=CONTEXT_TOKENS, device=device)
        engine = NativeEngine(folder, options)
        runner.run(engine.resume(PolicyVersion(0, 0)))
        rng = np.random.default_rng(0)
        vocabulary = DecoderConfig.load(folder).vocab_size
        prompts = rng.integers(0, vocabulary, (len(MIXED), PROMPT_TOKENS)).astype(np.int32)
        sides: dict[str, Callable[[list[int]], None]] = {
            "transformers": lambda lengths: run_transformers(hf, prompts, lengths),
            "native": lambda lengths: runner.run(run_engine(engine, prompts, lengths)),
        }
        for run in sides.values():
            run([8] * CONCURRENT)
        for kind, lengths in (("equal", EQUAL), ("mixed", MIXED)):
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(repetitions):
                for side, run in sides.items():
                    start_s = time.perf_counter()
                    run(lengths)
                    rates[side].append(sum(lengths) / (time.perf_counter() - start_s))
            for side in sides:
                figures[f"{side}_{kind}_tokens_per_s"] = round(statistics.median(rates[side]), 1)
            ratios = [ours / theirs for ours, theirs in zip(rates["native"], rates["transformers"])]
            figures[f"speedup_{kind}"] = round(statistics.median(ratios), 3)
        runner.run(engine.close())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    repetitions = parser.parse_args().repetitions
    torch.set_num_threads(1)
    models = {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            save_random(MODELS[name], Path(folder))
            models[name] = figures = measure(Path(folder), repetitions)
        for kind in ("equal", "mixed"):
            ours, theirs = figures[f"native_{kind}_tokens_per_s"], figures[f"transformers_{kind}_tokens_per_s"]
            print(f"{name:9} {kind:5}  native {ours:8.0f}  transformers {theirs:8.0f} tokens/s  {ours / theirs:.2f}x")
    main_row = models["qwen3_5m"]
    print(json.dumps({k: main_row[k] for k in ("speedup_equal", "speedup_mixed")} | {"models": models}))


if __name__ == "__main__":
    main()
