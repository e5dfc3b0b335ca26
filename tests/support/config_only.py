"""Checkpoint folders of real sizes without weights: headers of tensor files, and holes where the tensors would be."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.models.tokenizer import train_tokenizer

QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
QWEN25_7B = QWEN25_05B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN35_4B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}


def write(folder: Path, fields: Mapping[str, Any], more: Mapping[str, tuple[int, ...]] | None = None) -> Path:
    """A folder with the config.json of ``fields``, a small tokenizer with a chat template, and a tensor file in
    bfloat16 that takes no room on disk. ``more``: further tensors."""
    config = AutoConfig.for_model(**fields, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    folder.mkdir(parents=True)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    train_tokenizer([""]).save_pretrained(folder)
    header, at = {}, 0
    for name, shape in {**{n: tuple(p.shape) for n, p in model.named_parameters()}, **(more or {})}.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return folder
