"""Which implementation of a model the torch backend trains, and what it refuses. Imports no FSDP: the driver asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import check_checkpoint
from asyncrl.models.config import CheckpointError, DecoderConfig, ModelConfig, rope_fields


def implementation(config: Config, path: str) -> str:
    """`model.implementation` for a checkpoint, with ``auto`` resolved: native if the decoder builds it. Raises
    CheckpointError if config.json cannot be read."""
    if config.model.implementation != "auto":
        return config.model.implementation
    ModelConfig.load(path)
    return "transformers" if DecoderConfig.of(path) is None else "native"


def check(config: Config, path: str, mtp_from_trunk: bool) -> ModelConfig:
    """Compare the checkpoint's files with what its implementation expects, without reading tensors. Raises
    CheckpointError."""
    if implementation(config, path) == "native":
        return check_checkpoint(path, mtp_from_trunk)
    from asyncrl.models.causal_lm import check_files

    try:
        return check_files(path, config.model.trust_remote_code)
    except CheckpointError as e:
        if config.model.implementation == "auto":
            raise CheckpointError(f"{_native_refusal(path)}; and {e}") from None
        raise


def problems(config: Config, text: Mapping[str, Any]) -> Iterator[str]:
    """Options that do not suit the model; see `BackendSpec.model_problems`."""
    if implementation(config, config.model.path) == "native":
        if config.model.attention != "auto":
            yield (
                "model.attention: the native decoder has only one; expected auto, or "
                f"model.implementation=transformers, found {config.model.attention}"
            )
        return
    for option in ("enable_train", "init_from_trunk"):
        if getattr(config.mtp, option):
            yield (
                f"mtp.{option}: models of transformers have no MTP layers; expected false, or a model that the native "
                "decoder builds, or trainer.backend=megatron"
            )
    yield from _rope_problems(config, text)
    from asyncrl.models import causal_lm

    try:
        causal_lm.choose_attention(
            causal_lm.build(config.model.path, config.model.trust_remote_code), config.model.attention, False
        )
    except CheckpointError as e:
        yield f"model.attention: {e}"
        return
    if config.model.attention == "flash_attention_2" and config.trainer.device == "cpu":
        yield "model.attention: flash_attention_2 needs GPUs; expected auto, found trainer.device=cpu"


def _rope_problems(config: Config, text: Mapping[str, Any]) -> Iterator[str]:
    """Rotary tables that depend on the length of the longest sequence of a micro-batch, or of an engine's context: the
    same tokens would have other logprobs beside other sequences."""
    rope = rope_fields(text)
    kind = rope["rope_type"]
    short = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
    if kind == "dynamic":
        short = text.get("max_position_embeddings")
    context = config.rollout.engine.max_context_tokens or text.get("max_position_embeddings", 0)
    if kind in ("dynamic", "longrope") and short and context > short:
        yield (
            f"rollout.engine.max_context_tokens: beyond {short} tokens the model's {kind} positions depend on the "
            f"longest sequence of a batch; expected at most {short}, found {context}"
        )


def _native_refusal(path: str) -> str:
    """Why the native decoder does not build the checkpoint's model."""
    try:
        DecoderConfig.load(path)
    except CheckpointError as e:
        return str(e)
    return ""
