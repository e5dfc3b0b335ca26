"""Memory that the actors need: estimates for the placement plan.

Symbols: M hidden size, I feed-forward size, H and K heads, D their size, V vocabulary. `python -m benchmarks.memory`
compares the trainer's with measured peaks.
"""

from __future__ import annotations

import math

from asyncrl.config.checks import gpus_per_replica, warm_kv_bytes
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import tensor_shapes
from asyncrl.models.config import ModelConfig, text_part
from asyncrl.param_sync.manifest import DTYPE_BYTES
from asyncrl.param_sync.transports.choose import bucket_sizes
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.run.preflight import Preflight, kv_cache_bytes
from asyncrl.trainer.backends.base import BACKENDS, computes_in_bfloat16

HEAD_CHUNKS = 4  # float32 [chunk, V]: logits, probabilities, terms of their gradient (on a GPU more rows in as much)
BUFFERS = 2  # buckets on each side of a sync


def parameters_of(config: Config) -> int:
    """Number of the checkpoint's weights, all experts included."""
    return sum(math.prod(shape) for shape in tensor_shapes(config.model.path).values())


def trainer_bytes(config: Config, found: Preflight) -> dict[str, float]:
    """Bytes of one rank at the peak of a step, itemized; without the interpreter and its libraries.

    The peak is where the backward pass of the second micro-batch begins: the gradients of the first, all activations
    and a chunk's logits are alive."""
    parameters, t = parameters_of(config), config.trainer
    shards = BACKENDS.find(t.backend).weight_shards(config)
    held = {"weights, gradients and optimizer": parameters * 16 / shards}  # float32, and AdamW's two moments
    if config.model.lora.rank:  # adapters are small, and the frozen weights are the reference unless it has a path
        held = {"frozen weights": parameters * 4 / shards}
    if config.algorithm.needs_reference and (config.algorithm.reference_path or not config.model.lora.rank):
        held["reference"] = parameters * 4 / shards
    held["activations"] = activation_bytes(config, found.model, found.context_tokens)
    held["logits"] = HEAD_CHUNKS * t.logprob_chunk_tokens * found.model.vocab_size * 4
    held["buckets"] = BUFFERS * max(bucket_sizes(config))
    return held


def checkpoint_bytes(config: Config) -> float:
    """Bytes of host memory in which a rank keeps a checkpoint while it is written."""
    if not config.checkpoint.every_steps or config.model.lora.rank:
        return 0.0
    return parameters_of(config) * 12 / BACKENDS.find(config.trainer.backend).weight_shards(config)


def activation_bytes(config: Config, model: ModelConfig, context_tokens: int) -> float:
    """Bytes that the forward pass of a micro-batch keeps for the backward pass."""
    tokens = max(config.trainer.max_tokens_per_micro_batch, context_tokens)  # a longer sample has its own micro-batch
    layer = activations_per_token(model)
    kept = model.num_layers * layer
    if (
        config.trainer.activation_checkpointing
    ):  # each layer's input, and one layer's activations while it is recomputed
        kept = model.num_layers * model.hidden_size + layer
    # the head's input, and the states after the final norm
    return tokens * (kept + 3 * model.hidden_size) * (2 if computes_in_bfloat16(config) else 4)


def activations_per_token(model: ModelConfig) -> float:
    """Numbers that a layer saves for each token: inputs of norms and projections, 7·M; gate, up and their products,
    4·I; queries, attention's result and its padded copies, 5·H·D; keys and values with theirs, 4·K·D."""
    text = text_part(model.raw)
    inner = int(text.get("intermediate_size") or 4 * model.hidden_size)
    if chosen := text.get("num_experts_per_tok"):
        inner = int(text.get("moe_intermediate_size") or inner) * int(chosen)
        inner += int(text.get("shared_expert_intermediate_size") or 0)
    heads = (5 * model.num_heads + 4 * model.num_kv_heads) * model.head_dim
    return 7 * model.hidden_size + 4 * inner + heads


def replica_bytes(config: Config, found: Preflight) -> dict[str, float]:
    """Bytes of one replica, over all of its GPUs; without activations, and without the KV cache of an engine that takes
    what is left."""
    engine, dtype = config.rollout.engine, found.model.engine_dtype(config.rollout.engine.dtype)
    held = {"weights": float(parameters_of(config) * DTYPE_BYTES[dtype])}
    if config.param_sync.staging == "full":
        held["host copy"] = held["weights"]
    if ENGINES.find(engine.name).preallocates_kv:
        drafts = config.mtp.enable_rollout
        held["KV cache"] = kv_cache_bytes(found.model, engine.slots, found.context_tokens, dtype, drafts)
        if warm := warm_kv_bytes(config):
            held["finished turns' KV"] = warm
    held["buckets"] = BUFFERS * max(bucket_sizes(config)) * gpus_per_replica(config)
    return held
