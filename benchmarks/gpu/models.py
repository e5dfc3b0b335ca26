"""Random models of a real size, without a download: Qwen2 1.5B's shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from asyncrl.models.checkpoint import save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.rollouter.engines.native.model import NativeModel

QWEN2_15B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
TINY = QWEN2_15B | {
    "vocab_size": 2048,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


class Run(NamedTuple):
    """Options of a part: the device, whether to use the tiny model, and a folder that the parts share."""

    device: Literal["cpu", "cuda"]
    tiny: bool
    folder: Path

    @property
    def config(self) -> dict[str, Any]:
        return TINY if self.tiny else QWEN2_15B

    @property
    def checkpoint(self) -> Path:
        """The random model's, in bfloat16; written on first use."""
        path = self.folder / "model"
        if not (path / "model.safetensors").is_file():
            model = random_model(self, 16)
            save_checkpoint(path, {n: v.cpu().contiguous() for n, v in model.named_views().items()}, model.config)
        return path

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def median_s(self, work: Callable[[], object], rounds: int = 5) -> float:
        """Median seconds over ``rounds``, after one warm-up."""
        return statistics.median([self.seconds(work) for _ in range(rounds + 1)][1:])

    def copied_bytes_per_s(self) -> float:
        """Speed of a large copy within the device's memory: bytes read plus bytes written."""
        source = torch.zeros(1 << (24 if self.tiny else 31), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.median_s(lambda: target.copy_(source), 10)


def random_model(run: Run, context_tokens: int) -> NativeModel:
    """Normal(0, 0.02) matrices, zero biases, unit norms, in bfloat16, made on the device."""
    model = NativeModel(DecoderConfig.from_dict(run.config), context_tokens, torch.bfloat16, run.device)
    generator = torch.Generator(run.device).manual_seed(0)
    for name, view in model.named_views().items():
        if view.dim() >= 2:
            view.normal_(0.0, 0.02, generator=generator)
        else:
            view.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
