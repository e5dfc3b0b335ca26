"""Checks that a model can be sharded and trained as configured, before anything is built.

Imports none of Megatron's packages, because the checking process may lack them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.config.schema import Config

#: dimensions that tensor parallel ranks must divide evenly, where a model has them
CUT_BY_TENSOR = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "shared_expert_intermediate_size",
    "hidden_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


def linear_layers(text: Mapping[str, Any]) -> list[bool]:
    """For each layer, True if it has linear attention (Gated DeltaNet) instead of full attention."""
    layers = range(int(text["num_hidden_layers"]))
    if types := text.get("layer_types"):
        return [types[i] == "linear_attention" for i in layers]
    every = int(text.get("full_attention_interval", 4))  # default of Qwen3-Next and Qwen3.5
    return [bool(text.get("linear_num_value_heads")) and (i + 1) % every != 0 for i in layers]


def fit_problems(config: Config, text: Mapping[str, Any]) -> Iterator[str]:
    """One line for each option that does not suit the model. ``text``: the text part of its config.json."""
    cut = config.trainer.megatron
    tensor, pipeline = cut.tensor_model_parallel_size, cut.pipeline_model_parallel_size
    for name in CUT_BY_TENSOR:
        if (size := int(text.get(name) or 0)) % tensor:
            yield (
                f"trainer.megatron.tensor_model_parallel_size: expected a divisor of the model's {name} {size}, "
                f"found {tensor}"
            )
    if (context := cut.context_parallel_size) > 1 and any(linear_layers(text)):
        yield (
            f"trainer.megatron.context_parallel_size: expected 1, found {context}: the model has linear attention "
            "(Gated DeltaNet), whose state runs through each sequence from its start; use tensor, pipeline or data "
            "parallel ranks"
        )
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    if (parts := cut.expert_model_parallel_size) > 1 and (not experts or experts % parts):
        has = f"a divisor of the model's {experts} experts" if experts else "1, as the model has no experts"
        yield f"trainer.megatron.expert_model_parallel_size: expected {has}, found {parts}"
    if experts and tensor > 1 and not (cut.sequence_parallel and parts > 1):
        yield (
            f"trainer.megatron.tensor_model_parallel_size: {tensor} with a mixture of experts needs trainer.megatron."
            "sequence_parallel=true and trainer.megatron.expert_model_parallel_size of at least 2, as no expert is "
            "sharded"
        )
    layers, chunks = int(text["num_hidden_layers"]), pipeline * cut.virtual_pipeline_model_parallel_size
    if layers % chunks:
        key = "pipeline_model_parallel_size" if chunks == pipeline else "virtual_pipeline_model_parallel_size"
        yield (
            f"trainer.megatron.{key}: {pipeline} stages of {chunks // pipeline} model chunks cannot share the model's "
            f"{layers} layers evenly; expected a number of chunks that divides them"
        )
    drafts = int(text.get("num_nextn_predict_layers") or text.get("mtp_num_hidden_layers") or 0)
    depths = config.mtp.num_speculative_tokens
    if config.mtp.enable_train and drafts and depths > drafts:
        yield (
            f"mtp.num_speculative_tokens: the Megatron backend trains each MTP layer for one depth; expected at most "
            f"{drafts}, found {depths} (trainer.backend=torch repeats the last layer)"
        )
