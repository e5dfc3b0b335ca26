"""Hugging Face checkpoint folders: read and write the tensors and the files beside them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


def tensor_files(path: str | Path) -> list[Path]:
    """The folder's safetensors files. Raises CheckpointError if there are none, if the index cannot be read, or if a
    file that it names is not there."""
    folder = Path(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError) as e:  # whatever is wrong with its text or shape
            raise CheckpointError(
                f"{index}: expected a JSON object whose weight_map gives each tensor's file; the file is truncated or "
                f"damaged ({type(e).__name__}: {e})"
            ) from None
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: no *.safetensors files there")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: named by {index.name}, but missing")
    return files


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files. Raises CheckpointError naming a missing or damaged file."""
    tensors: dict[str, Tensor] = {}
    for file in tensor_files(path):
        with _opened(file) as f:
            tensors |= {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118 (not a dict)
    return tensors


def check_checkpoint(path: str | Path) -> DecoderConfig:
    """Compare config.json with the headers of the tensor files, without reading a tensor; returns the config.

    Raises CheckpointError for a damaged file and for missing, unknown or misshapen tensors."""
    config = DecoderConfig.load(path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in tensor_files(path):
        with _opened(file) as f:
            shapes |= {key: tuple(f.get_slice(key).get_shape()) for key in f.keys()}  # noqa: SIM118 (not a dict)
    _compare(path, config, shapes)
    return config


def load_decoder(path: str | Path, dtype: torch.dtype = torch.float32) -> Decoder:
    """Build the decoder that ``path`` holds. Raises CheckpointError listing missing, unknown or misshapen tensors."""
    config = DecoderConfig.load(path)
    tensors = read_tensors(path)
    _compare(path, config, {name: tuple(t.shape) for name, t in tensors.items()})
    with torch.device("meta"):
        model = Decoder(config)
    model = model.to_empty(device="cpu").to(dtype)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])
    return model


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(str(file), framework="pt") as f:
            yield f
    except SafetensorError as e:
        raise CheckpointError(f"{file}: truncated or damaged ({e})") from None


def _compare(path: str | Path, config: DecoderConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    with torch.device("meta"):
        expected = {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = found.keys() - expected.keys() - ignored
    differences = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(name for name in unknown if not name.endswith("rotary_emb.inv_freq")),
        "misshapen": [
            f"{name} (config says {expected[name]}, file has {found[name]})"
            for name in sorted(expected.keys() & found.keys())
            if expected[name] != found[name]
        ],
    }
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(f"{path}: {what} tensors: {', '.join(names[:4])}{more}")


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to the MTP draft rather than to the target."""
    return name.startswith(("model.mtp_layers.", "mtp."))


def save_checkpoint(
    path: str | Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], config: DecoderConfig
) -> None:
    """Write config.json, then model.safetensors: whole or not at all, and readable by all (safetensors writes 0600)."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    flat = {name: t.detach().cpu().contiguous().clone() for name, t in items}
    staged = folder / "model.safetensors.partial"
    save_file(flat, str(staged), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.raw, indent=2) + "\n")
    staged.chmod(0o644)
    staged.rename(folder / "model.safetensors")


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's and generation's files beside an exported model."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)
