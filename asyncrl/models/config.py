"""A checkpoint's ``config.json``: fields of every model, and those that the native decoder needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self


class CheckpointError(ValueError):
    """A checkpoint folder is missing, incomplete or damaged, or its model cannot be built."""


# architecture → (biases on q, k and v; norms on q and k)
_FAMILIES = {
    "Qwen2ForCausalLM": (True, False),
    "MiMoForCausalLM": (True, False),
    "Qwen3ForCausalLM": (False, True),
    "LlamaForCausalLM": (False, False),
}

#: fields of config.json without which there is no `ModelConfig`
_NEEDED = frozenset(
    {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"}
)


def engine_dtype(dtype: str, option: str) -> str:
    """dtype of an engine's weights, in which they are sent: ``option`` (`rollout.engine.dtype`), with ``auto`` resolved
    for a checkpoint of ``dtype``. Never float16, whose limited range would make sampling and training disagree."""
    if option == "auto":
        return "bfloat16" if dtype in ("bfloat16", "float16") else "float32"
    if option not in ("float32", "bfloat16"):
        raise ValueError(f"rollout.engine.dtype is {option!r}; expected auto, float32 or bfloat16")
    return option


def read_config(path: str | Path) -> dict[str, Any]:
    """``path/config.json`` as it is. Raises CheckpointError."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{path}: expected a Hugging Face checkpoint folder, found no config.json")
    try:
        raw = json.loads(file.read_bytes())
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read ({e})") from None
    except ValueError as e:  # of the JSON, or of its encoding
        raise CheckpointError(f"{file}: not valid JSON ({e})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("text_config") or {}, dict):
        raise CheckpointError(f"{file}: expected a JSON object, and in it an object as text_config if there is one")
    return raw


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` with its text part, if it has one, merged in."""
    return {**raw, **(raw.get("text_config") or {})}


def rope_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """What a text part says of its rotary positions: ``rope_type``, ``rope_theta`` and the fields of that type.

    transformers 5 writes rope_parameters, 4 wrote rope_theta and rope_scaling. Of both in one file, transformers and
    the engines that use it read rope_scaling."""
    rope = dict(text.get("rope_scaling") or text.get("rope_parameters") or {})
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return {"rope_theta": text.get("rope_theta", 10000.0), **rope, "rope_type": kind}


def _of_family(path: str | Path) -> dict[str, Any]:
    """Sizes of the checkpoint's decoder as transformers knows them, whose families have names and defaults of their
    own."""
    from transformers import AutoConfig  # takes seconds, which few checkpoints need

    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True).get_text_config()
    except Exception:  # of no family that it knows; it raises many types
        return {}
    return {
        name: value
        for name in (*_NEEDED, "num_key_value_heads", "head_dim")
        if (value := getattr(config, name, None)) is not None
    }


def _size(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive number. ``default``: in place of a missing or empty field."""
    value = text[key] if default is None else text.get(key) or default
    try:
        size = int(value)
    except (ValueError, TypeError, OverflowError):
        size = 0
    if size < 1:
        raise ValueError(f"{key} is {value!r}, expected a positive number")
    return size


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a decoder of any family, for any backend and engine. ``raw`` is the whole config.json, for
    lossless exports."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int
    dtype: str
    raw: dict[str, Any]

    def engine_dtype(self, option: str) -> str:
        """See `engine_dtype`."""
        return engine_dtype(self.dtype, option)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read ``path/config.json``. Raises CheckpointError naming missing or malformed fields and unsupported
        settings."""
        raw, where = read_config(path), str(Path(path) / "config.json")
        if cls is ModelConfig and not text_part(raw).keys() >= _NEEDED:
            return cls.from_dict(raw, where, _of_family(path))
        return cls.from_dict(raw, where)

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config", defaults: Mapping[str, Any] | None = None) -> Self:
        """``defaults``: of fields that ``raw`` lacks."""
        try:
            return cls(**cls._read(raw, {**(defaults or {}), **text_part(raw)}, where))
        except KeyError as e:
            raise CheckpointError(f"{where}: field {e} is missing") from None
        except CheckpointError:
            raise
        except (ValueError, TypeError, AttributeError, ArithmeticError) as e:  # a value of another type than expected
            raise CheckpointError(f"{where}: malformed field ({e})") from None

    @classmethod
    def _read(cls, raw: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, Any]:
        """The fields. ``text``: ``raw``, with its text part merged in."""
        heads, hidden_size = _size(text, "num_attention_heads"), _size(text, "hidden_size")
        return {
            "architecture": (raw.get("architectures") or ["?"])[0],
            "vocab_size": _size(text, "vocab_size"),
            "hidden_size": hidden_size,
            "num_layers": _size(text, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": _size(text, "num_key_value_heads", heads),
            "head_dim": _size(text, "head_dim", hidden_size // heads),
            "max_position_embeddings": _size(text, "max_position_embeddings"),
            "tie_word_embeddings": bool(text.get("tie_word_embeddings", False)),
            "num_mtp_layers": int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0),
            "dtype": str(text.get("dtype") or text.get("torch_dtype") or "float32").removeprefix("torch."),
            "raw": raw,
        }


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Configuration of a decoder that `asyncrl.models.decoder` builds."""

    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool

    @staticmethod
    def builds(architecture: str) -> bool:
        return architecture in _FAMILIES

    @classmethod
    def of(cls, path: str | Path) -> Self | None:
        """Config of the decoder for a checkpoint; None if the decoder does not build its model."""
        try:
            return cls.load(path)
        except CheckpointError:
            return None

    def with_mtp_layers(self, count: int) -> DecoderConfig:
        """The same trunk with ``count`` MTP layers, in ``raw`` too.

        A Qwen2 trunk with MTP layers is a MiMo, and gets its architecture. No architecture has MiMo's MTP layers on a
        Qwen3 or Llama trunk, so those keep their name: asyncrl reads the field, and other software sees a plain trunk
        with unknown tensors."""
        raw = {**self.raw, "num_nextn_predict_layers": count}
        raw.pop("mtp_num_hidden_layers", None)
        if raw.get("text_config"):
            raw["text_config"] = {
                **raw["text_config"],
                "num_nextn_predict_layers": count,
                "mtp_num_hidden_layers": count,
            }
        architecture = self.architecture
        if count and architecture == "Qwen2ForCausalLM":
            architecture = "MiMoForCausalLM"
            raw["architectures"] = [architecture]
        return replace(self, architecture=architecture, num_mtp_layers=count, raw=raw)

    @classmethod
    def _read(cls, raw: dict[str, Any], text: dict[str, Any], where: str) -> dict[str, Any]:
        architecture = (raw.get("architectures") or ["?"])[0]
        if not cls.builds(architecture):
            raise CheckpointError(
                f"{where}: architecture {architecture} is not one the native decoder builds ({', '.join(_FAMILIES)})"
            )
        qkv_bias, qk_norm = _FAMILIES[architecture]
        if architecture in ("Qwen3ForCausalLM", "LlamaForCausalLM"):
            qkv_bias = bool(text.get("attention_bias", False))
        if text.get("mlp_bias"):
            raise CheckpointError(f"{where}: mlp_bias is set; the native decoder's feed-forward layers have none")
        if text.get("use_sliding_window"):
            raise CheckpointError(f"{where}: use_sliding_window is set; the native decoder has full attention only")
        if (activation := text.get("hidden_act") or "silu") != "silu":
            raise CheckpointError(f"{where}: hidden_act {activation!r} is not supported; the native decoder has silu")
        rope = rope_fields(text)
        if (rope_type := rope["rope_type"]) not in ("default", "linear", "llama3"):
            raise CheckpointError(f"{where}: rope type {rope_type!r} is not supported (default, linear, llama3)")
        return super()._read(raw, text, where) | {
            "intermediate_size": _size(text, "intermediate_size"),
            "rms_norm_eps": float(text.get("rms_norm_eps", 1e-6)),
            "rope_theta": float(rope["rope_theta"]),
            "rope_scaling": None if rope_type == "default" else rope,
            "qkv_bias": qkv_bias,
            "o_bias": qkv_bias and architecture in ("Qwen3ForCausalLM", "LlamaForCausalLM"),
            "qk_norm": qk_norm,
        }
