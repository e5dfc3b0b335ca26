"""Hugging Face checkpoint folders: reading and writing of tensors, configuration and tokenizer files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.models.config import CheckpointError, DecoderConfig, ModelConfig
from asyncrl.models.decoder import Decoder, without_storage
from asyncrl.models.mtp_from_trunk import draft_from_trunk

TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json vocab.json merges.txt tokenizer.model "
    "chat_template.jinja added_tokens.json generation_config.json tiktoken.model "
    # needed by engines to load vision models
    "processor_config.json preprocessor_config.json video_preprocessor_config.json"
).split()

#: advice for a checkpoint that lacks the MTP weights it needs
MAKE_DRAFT = (
    "take a checkpoint with MTP weights, or set mtp.init_from_trunk=true to make them from the last trunk layer"
)


#: dtypes of weights, in the words of safetensors files
WEIGHT_DTYPES = ("F32", "BF16", "F16", "F64")


class HasRawConfig(Protocol):
    """A config object that keeps the whole config.json."""

    @property
    def raw(self) -> dict[str, Any]: ...


def tensor_files(path: str | Path) -> list[Path]:
    """The model's safetensors files, chosen as transformers does: model.safetensors, or those of the index. Without
    both, all in the folder. Raises CheckpointError if there are none, if the index cannot be read, or if it names a
    missing file."""
    folder = Path(path)
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():  # beside it may be an adapter, or the same weights in another format
        return [single]
    if index.is_file():
        try:
            files = sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, LookupError, TypeError, AttributeError) as e:  # malformed text or structure
            raise CheckpointError(
                f"{index}: expected a JSON object whose weight_map gives each tensor's file; the file is truncated or "
                f"damaged ({type(e).__name__}: {e})"
            ) from None
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: expected *.safetensors files, found none")
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


@contextlib.contextmanager
def open_tensors(path: str | Path) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads a single tensor by name, and raises CheckpointError if no file has it."""
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in tensor_files(path):
            f = stack.enter_context(_opened(file))
            where |= dict.fromkeys(f.keys(), f)

        def read(name: str) -> Tensor:
            if name not in where:
                raise CheckpointError(f"{path}: no tensor {name} in its files")
            return where[name].get_tensor(name)

        yield read


def check_checkpoint(path: str | Path, mtp_from_trunk: bool = False) -> DecoderConfig:
    """Compare config.json with the headers of the tensor files, without reading tensors. Returns the config of the
    decoder that `load_decoder` builds.

    Raises CheckpointError for a damaged file and for missing, unknown or misshapen tensors."""
    config = DecoderConfig.load(path)
    return _checked(path, config, tensor_shapes(path), mtp_from_trunk)


def check_folder(path: str | Path) -> ModelConfig:
    """Check that a model's files exist and that its config.json can be read. Tensors are compared where the model is
    built."""
    config, shapes = ModelConfig.load(path), tensor_shapes(path)
    return replace(config, num_mtp_layers=config.num_mtp_layers or mtp_layers_named(shapes))


def mtp_layers_named(names: Iterable[str]) -> int:
    """Number of MTP layers, from Qwen's tensor names; the config.json of the published Qwen3-Next lacks it."""
    return len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})


class TensorHeader(NamedTuple):
    """``dtype``: in the words of safetensors files."""

    dtype: str
    shape: tuple[int, ...]


def tensor_headers(path: str | Path) -> dict[str, TensorHeader]:
    """Of all tensors in the folder's safetensors files. Raises CheckpointError for a weight whose dtype is none of
    weights."""
    headers: dict[str, TensorHeader] = {}
    for file in tensor_files(path):
        with _opened(file) as f:
            for name in f.keys():  # noqa: SIM118 (not a dict)
                header = f.get_slice(name)
                headers[name] = TensorHeader(header.get_dtype(), tuple(header.get_shape()))
                if name.endswith(".weight") and header.get_dtype() not in WEIGHT_DTYPES:
                    raise CheckpointError(
                        f"{file}: {name} is stored as {header.get_dtype()}, expected {', '.join(WEIGHT_DTYPES)}; "
                        "quantized weights cannot be trained"
                    )
    return headers


def tensor_shapes(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Shapes of `tensor_headers`."""
    return {name: header.shape for name, header in tensor_headers(path).items()}


def decoder_tensors(path: str | Path, mtp_from_trunk: bool = False) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Config and tensors of a checkpoint's decoder. Raises CheckpointError listing missing, unknown or misshapen
    tensors.

    ``mtp_from_trunk``: without MTP weights in ``path``, the decoder gets one MTP layer created from the trunk, see
    `asyncrl.models.mtp_from_trunk`. Trainer and engines create identical ones."""
    config, tensors = check_checkpoint(path, mtp_from_trunk), read_tensors(path)
    if config.num_mtp_layers and not any(map(is_draft, tensors)):
        tensors |= draft_from_trunk(tensors, config)
    return config, tensors


def load_decoder(path: str | Path, dtype: torch.dtype = torch.float32, mtp_from_trunk: bool = False) -> Decoder:
    """A checkpoint's decoder in host memory; see `decoder_tensors`."""
    config, tensors = decoder_tensors(path, mtp_from_trunk)
    model = without_storage(config).to_empty(device="cpu").to(dtype)
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


def _checked(
    path: str | Path, config: DecoderConfig, found: Mapping[str, tuple[int, ...]], mtp_from_trunk: bool
) -> DecoderConfig:
    """Config of the decoder to build from tensors of these shapes. Raises CheckpointError if they do not fit."""
    made = mtp_from_trunk and not any(map(is_draft, found))
    stored = config.with_mtp_layers(0) if made else config
    expected = {name: tuple(p.shape) for name, p in without_storage(stored).named_parameters()}
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unneeded = lambda name: name in tied or name.endswith("rotary_emb.inv_freq")
    compare_tensors(path, expected, found, unneeded, stored.num_mtp_layers)
    return config.with_mtp_layers(1) if made else config


def compare_tensors(
    path: str | Path,
    expected: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    unneeded: Callable[[str], bool],
    mtp_layers: int = 0,
) -> None:
    """Raises CheckpointError for tensors that are missing, misshapen, or neither expected nor ``unneeded``."""
    differences = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(name for name in found.keys() - expected.keys() if not unneeded(name)),
        "misshapen": [
            f"{name} (config says {expected[name]}, file has {found[name]})"
            for name in sorted(expected.keys() & found.keys())
            if expected[name] != found[name]
        ],
    }
    for what, names in differences.items():
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            if what == "missing" and all(map(is_draft, names)):
                more += f"; config.json says num_nextn_predict_layers {mtp_layers}, {MAKE_DRAFT}"
            raise CheckpointError(f"{path}: {what} tensors: {', '.join(names[:4])}{more}")


def without_draft(path: str | Path) -> CheckpointError:
    """The error for a model that needs a draft but has none."""
    return CheckpointError(f"{path} has no MTP layers (num_nextn_predict_layers in config.json); {MAKE_DRAFT}")


def is_draft(name: str) -> bool:
    """True if a tensor belongs to the MTP draft rather than to the target."""
    return name.startswith(("model.mtp_layers.", "mtp."))


def save_checkpoint(
    path: str | Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], config: HasRawConfig
) -> None:
    """Write config.json, then model.safetensors atomically and world-readable (safetensors writes 0600)."""
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
    """Copy tokenizer and generation files to an exported model's folder."""
    code = [file.name for file in Path(source).glob("*.py")]  # of models and tokenizers with code of their own
    for name in (*TOKENIZER_FILES, *code):
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)
