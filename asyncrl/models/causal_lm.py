"""Causal LMs as transformers builds and reads them, and the names of their tensors in safetensors files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.utils import logging as transformers_logging

from asyncrl.models.checkpoint import WEIGHT_DTYPES, check_folder, compare_tensors, tensor_headers, tensor_shapes
from asyncrl.models.config import CheckpointError, ModelConfig

Shapes = dict[str, tuple[int, ...]]

#: kinds of layers whose tokens see each other through attention only
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def build(path: str | Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The checkpoint's model without weights: on the meta device, in float32, for inference (no dropout). Raises
    CheckpointError if transformers builds no causal LM for its config.json."""
    options = {"trust_remote_code": trust_remote_code}
    own_code = "auto_map" in ModelConfig.load(path).raw and not trust_remote_code
    hint = "; it may need the code in its folder, which model.trust_remote_code=true would run" if own_code else ""
    with _refusals(path, hint), _quiet():
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, **options)
        if quantization := getattr(config, "quantization_config", None):
            method = quantization.get("quant_method", "?") if isinstance(quantization, Mapping) else quantization
            raise CheckpointError(
                f"{path}: its weights are quantized ({method}); expected a checkpoint in bfloat16, float16 or float32"
            )
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", **options
            )
    if model.get_output_embeddings() is None or model.get_input_embeddings() is None:
        raise CheckpointError(f"{path}: {type(model).__name__} of transformers is no causal LM with a head")
    _set_conversions(model, tensor_shapes(path))
    return model.train(False)


def _set_conversions(model: PreTrainedModel, found: Container[str]) -> None:
    """Set how names change between the files, with the tensors ``found``, and the model: transformers would look for it
    by the name of the class, which FSDP changes. Files of a part of a larger model may have its prefix."""
    changes = get_model_conversion_mapping(model, add_legacy=False)
    plain = [change for change in changes if not isinstance(change, PrefixChange)]
    for conversions in (plain, changes):
        cast(Any, model)._weight_conversions = conversions
        if all(name in found for name in FileTensors(model).shapes):
            return
    cast(Any, model)._weight_conversions = plain


def read(path: str | Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The checkpoint's model in host memory, in float32: files may hold wider tensors than config.json says, and tables
    computed in bfloat16 would be rounded. Raises CheckpointError for missing or misshapen tensors."""
    with _refusals(path), _quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
        model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(f"{path}: missing tensors: {', '.join(missing[:4])}")
    return model


def check_files(path: str | Path, trust_remote_code: bool = False) -> ModelConfig:
    """Compare the checkpoint's files with the model that transformers builds, without reading tensors. Raises
    CheckpointError."""
    config, files = check_folder(path), FileTensors(build(path, trust_remote_code))
    headers = tensor_headers(path)
    compare_tensors(path, files.shapes, {name: header.shape for name, header in headers.items()}, files.unneeded)
    for name in files.shapes:
        if (dtype := headers[name].dtype) not in WEIGHT_DTYPES:
            raise CheckpointError(f"{path}: {name} is stored as {dtype}, which cannot be sent to engines")
    return config


def choose_attention(model: PreTrainedModel, option: str, bfloat16_on_cuda: bool) -> str:
    """`model.attention`, with ``auto`` resolved: the fastest that computes all that the model asks for. Raises
    CheckpointError for one that does not."""
    lacking = {"eager": "", "sdpa": sdpa_lacks(model), "flash_attention_2": flash_lacks(model)}
    if option != "auto":
        if lacking[option]:
            raise CheckpointError(
                f"{option} lacks {lacking[option]}, which {type(model).__name__} needs; expected auto or eager"
            )
        return option
    flash = bfloat16_on_cuda and transformers.utils.is_flash_attn_2_available()
    if flash and not lacking["flash_attention_2"]:
        return "flash_attention_2"
    return "eager" if lacking["sdpa"] else "sdpa"


def sdpa_lacks(model: PreTrainedModel) -> str:
    """What transformers' sdpa would silently leave out; empty if nothing."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "caps of attention logits"
    if _has_sinks(model):
        return "attention sinks"
    return "" if model._supports_sdpa else "an implementation of it"


def flash_lacks(model: PreTrainedModel) -> str:
    """Likewise of flash attention, where the sequences of a micro-batch are one row."""
    if _has_sinks(model):
        return "attention sinks"
    if model._is_stateful or set(getattr(model.config.get_text_config(), "layer_types", None) or []) - _ATTENTION:
        return "layers that remember earlier tokens"
    return "" if model._supports_flash_attn else "an implementation of it"


def _has_sinks(model: PreTrainedModel) -> bool:
    return any(name.endswith(".sinks") for name, _ in model.named_parameters())


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks that transformers never splits between devices: decoder layers, and layers of a vision part. Of nested
    ones the outermost."""
    whole = set(model._no_split_modules or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # outer ones first
        within = any(name.startswith(f"{outer}.") for outer in found)
        if type(module).__name__ in whole and not within:
            found[name] = module
    return list(found.values())


def tied_to(model: PreTrainedModel) -> str | None:
    """Name of the embedding that is the head too, if it is."""
    embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
    if cast(nn.Linear, model.get_output_embeddings()).weight is not embedding:
        return None
    return next(name for name, p in model.named_parameters() if p is embedding)


class FileTensors:
    """A model's tensors under the names and in the shapes of its safetensors files. Of a parameter there may be
    several, as transformers fuses some (experts, for example); see ``parts``."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.parts: dict[str, Shapes] = {}  #: by name in the model
        for name, tensor in self._stored().items():
            empty = torch.empty(tensor.shape, device="meta")
            self.parts[name] = {n: tuple(t.shape) for n, t in self.of(name, empty).items()}

    def _stored(self) -> dict[str, Tensor]:
        """The model's parameters, each once, and the buffers that checkpoints hold."""
        model = self._model
        kept = {
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._buffers.keys() - module._non_persistent_buffers_set
        }
        return {**dict(model.named_parameters()), **{n: b for n, b in model.named_buffers() if n in kept}}

    @property
    def shapes(self) -> Shapes:
        return {name: shape for parts in self.parts.values() for name, shape in parts.items()}

    def of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The file's tensors of the model's ``tensor``, whole."""
        if self.parts.get(name, {}).keys() == {name}:
            return {name: tensor}
        return {n: t.contiguous() for n, t in revert_weight_conversion(self._model, {name: tensor}).items()}

    def unneeded(self, name: str) -> bool:
        """True of a file's tensor that the model does not have: a tied head, a table that it computes, or one that it
        leaves out."""
        return name in self._model.all_tied_weights_keys or name.endswith("rotary_emb.inv_freq") or self.left_out(name)

    def left_out(self, name: str) -> bool:
        """True of a tensor of the family, such as its MTP layer's, that transformers leaves out."""
        return any(re.search(pattern, name) for pattern in self._model._keys_to_ignore_on_load_unexpected or ())


@contextlib.contextmanager
def _refusals(path: str | Path, hint: str = "") -> Iterator[None]:
    """Context whose errors become CheckpointErrors; transformers raises many types."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        reason = f"{type(e).__name__}: {(str(e).strip() or 'no message').splitlines()[0]}"
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot load it ({reason}){hint}"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without transformers' progress bars and advice."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
