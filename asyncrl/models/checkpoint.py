"""Hugging Face checkpoint folders: read and write the tensors and the files beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json merges.txt tokenizer.model "
    "chat_template.jinja added_tokens.json generation_config.json"
).split()


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files. Raises CheckpointError naming a missing or damaged file."""
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = [f.name for f in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors files there")
    tensors: dict[str, Tensor] = {}
    for name in files:
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: named by {index.name}, but missing")
        try:
            with safe_open(str(file), framework="pt") as f:
                tensors |= {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as e:
            raise CheckpointError(f"{file}: truncated or damaged ({e})") from None
    return tensors


def load_decoder(path: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the decoder that ``path`` holds. Raises CheckpointError listing missing, unknown or misshapen tensors."""
    config = DecoderConfig.load(path)
    tensors = read_tensors(path)
    with torch.device("meta"):
        model = Decoder(config)
    expected = dict(model.named_parameters())  # a tied head is named once, as the embedding
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    unknown = [n for n in unknown if not n.endswith("rotary_emb.inv_freq")]
    shapes = [
        f"{n}: config says {tuple(expected[n].shape)}, file has {tuple(tensors[n].shape)}"
        for n in sorted(expected.keys() & tensors.keys())
        if expected[n].shape != tensors[n].shape
    ]
    for what, names in (("missing", missing), ("unknown", unknown), ("misshapen", shapes)):
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(f"{path}: {what} tensors: {', '.join(names[:4])}{more}")
    model = model.to_empty(device="cpu").to(dtype)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])
    return model


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the MTP draft rather than to the target."""
    return name.startswith("model.mtp_layers.") or name.startswith("mtp.")


def save_checkpoint(
    path: str | Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], config: DecoderConfig
) -> None:
    """Write config.json and model.safetensors; an existing file is replaced whole or not at all."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    flat = {name: t.detach().cpu().contiguous().clone() for name, t in items}
    staged = folder / "model.safetensors.partial"
    save_file(flat, str(staged), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.raw, indent=2) + "\n")
    staged.rename(folder / "model.safetensors")


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's and generation's files beside an exported model."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)
