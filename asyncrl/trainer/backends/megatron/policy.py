"""The policy model: megatron-core's GPT model, returning hidden states of trunk and draft instead of logits.

Shape suffixes: T packed tokens, M hidden size. megatron-core sees one sequence, [T, 1, M].
"""

from __future__ import annotations

import copy
import importlib.util
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asyncrl.config.schema import TrainerConfig
from asyncrl.cpu import megatron as megatron_cpu
from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.bridges import Bridge, expect_same_rope
from asyncrl.trainer.backends.megatron.layers import with_delta_net, without_transformer_engine
from asyncrl.trainer.backends.megatron.packed import PackedSequences
from asyncrl.trainer.backends.megatron.vocab_parallel import VocabularyPart

packages.prepare()

from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402


class PolicyModel(GPTModel):
    """GPT model whose last stage returns (hidden [T, 1, M], depth 1's hidden, depth 2's …), each after its final norm,
    so that the head runs on selected positions only. A forward pass needs no labels; the draft's loss is computed
    outside, with asyncrl's temperature and global count.

    ``draft_depths``: number of draft depths in the next forward pass; ``detach_draft``: no gradient from them reaches
    trunk and embedding; ``float32_head``: see `asyncrl.models.chunked.head_logits`; ``draft_starts_blank``: see
    `Bridge`. The draft's states are those of `asyncrl.models.decoder.Decoder.draft_states`, for at most as many
    depths as there are MTP layers."""

    draft_depths = 0
    detach_draft = True
    float32_head = False
    draft_starts_blank = True

    def _postprocess(self, hidden_states: Tensor, **layers: Any) -> Tensor | tuple[Tensor, ...]:
        if not self.post_process:
            return hidden_states
        states: tuple[Tensor, ...] = (self._of_all_tokens(hidden_states),)
        if self.draft_depths:
            states += self._draft_states(hidden_states, layers)
        return states

    def _draft_states(self, hidden_T1M: Tensor, layers: dict[str, Any]) -> tuple[Tensor, ...]:
        sequences: PackedSequences = layers["packed_seq_params"]
        started_T11 = (sequences.positions != 0).t().unsqueeze(2)
        # a sequence's last position reads the next sequence's first token; no other position reads the result
        embed_T1M = self.embedding(sequences.following, sequences.positions)
        if self.draft_starts_blank:
            embed_T1M = embed_T1M * self._of_this_rank(started_T11)
        if self.detach_draft:
            hidden_T1M, embed_T1M = hidden_T1M.detach(), embed_T1M.detach()
        passed_on = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        options = {name: layers[name] for name in passed_on}
        states: list[Tensor] = []
        for layer in self.mtp.layers[: self.draft_depths]:
            if states:
                hidden_T1M = self._of_this_rank(sequences.before(states[-1]) * started_T11)
            # not the layer's `forward`: it cannot recompute packed sequences, and embeds the shifted tokens without
            # zeros at position 0
            run = partial(layer._proj_and_transformer_layer, **options)
            if self.config.recompute_granularity and torch.is_grad_enabled():
                run = partial(checkpoint, run, use_reentrant=False)
            hidden_T1M = run(hidden_states=hidden_T1M, decoder_input=embed_T1M)
            states.append(self._of_all_tokens(hidden_T1M))
        return tuple(states)

    def _of_all_tokens(self, states: Tensor) -> Tensor:
        """[t, …] → [T, …] under sequence parallelism. From there on all tensor parallel ranks compute the same, each
        with the whole gradient."""
        if not self.config.sequence_parallel:
            return states
        return tensor_parallel.gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)

    def _of_this_rank(self, states: Tensor) -> Tensor:
        """[T, …] → [t, …] under sequence parallelism."""
        if not self.config.sequence_parallel:
            return states
        return tensor_parallel.scatter_to_sequence_parallel_region(states)

    def draft(self, hidden_T1M: Tensor, sequences: PackedSequences, depths: int) -> tuple[Tensor, ...]:
        """The draft's states of a forward pass, given the trunk's. Last stage only."""
        self.draft_depths = depths
        hidden_T1M = hidden_T1M.to(self.head_weight.dtype)
        _, rope, cos, sin, *_ = self._preprocess(None, None, decoder_input=hidden_T1M, packed_seq_params=sequences)
        layers = {"rotary_pos_emb": rope, "rotary_pos_cos": cos, "rotary_pos_sin": sin, "attention_mask": None}
        states = self._draft_states(self._of_this_rank(hidden_T1M), layers | {"packed_seq_params": sequences})
        return tuple(state.float() for state in states)

    @property
    def vocabulary_part(self) -> VocabularyPart:
        """The part of the vocabulary in this rank's rows of the head."""
        group = parallel_state.get_tensor_model_parallel_group()
        return VocabularyPart.of(self.config.vocab_size, len(self.head_weight), group, self.float32_head)

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the head, [V / tensor parallel size, M]."""
        if self.share_embeddings_and_output_weights:
            return cast(Tensor, self.shared_embedding_or_output_weight())
        return cast(Tensor, self.output_layer.weight)


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def build_chunks(bridge: Bridge, options: TrainerConfig, half: bool) -> list[PolicyModel]:
    """This rank's part of the model, uninitialized: one chunk, or one per virtual stage. Needs the model parallel
    groups. ``half``: it computes in bfloat16. Raises CheckpointError for a rope that differs from the checkpoint's."""
    provider = bridge.provider
    _complete(provider, options, half)
    virtual = options.megatron.virtual_pipeline_model_parallel_size
    chunks = [_build(provider, stage) for stage in (range(virtual) if virtual > 1 else [None])]
    for chunk in chunks:
        chunk.draft_starts_blank = bridge.draft_starts_blank
        rope = chunk.rotary_pos_emb
        expect_same_rope(bridge.source, rope.inv_freq, rope.seq_len_interpolation_factor)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return chunks


def in_precision(provider: GPTModelProvider, chunk: PolicyModel) -> Any:
    """The chunk with its parameters in compute precision; its outputs are float32."""
    return Float16Module(provider, chunk) if provider.bf16 else chunk


def padded_vocabulary(vocab_size: int, parts: int) -> int:
    return -(-vocab_size // parts) * parts


def _build(provider: GPTModelProvider, stage: int | None) -> PolicyModel:
    fast, mpu = has_transformer_engine(), parallel_state
    # megatron-core 0.19 builds no layer spec for attention variants; `with_delta_net` inserts them below
    plain = copy.copy(provider)
    plain.experimental_attention_variant = None
    spec = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=fast, normalization=provider.normalization, vp_stage=stage
    )
    mtp = None
    if provider.mtp_num_layers:
        # copies the spec of the stage's last layer; `fit_problems` ensures that every stage has one
        mtp = get_gpt_mtp_block_spec(provider, spec, use_transformer_engine=fast, vp_stage=stage)
    if provider.experimental_attention_variant == "gated_delta_net":
        first = get_transformer_layer_offset(provider, vp_stage=stage)
        spec = with_delta_net(spec, provider.linear_attention_freq[first:])
    if not fast:
        spec, mtp = without_transformer_engine(spec), without_transformer_engine(mtp)
    model = PolicyModel(
        provider,
        transformer_layer_spec=spec,
        vocab_size=padded_vocabulary(provider.vocab_size, provider.tensor_model_parallel_size),
        max_sequence_length=provider.seq_length,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage),
        share_embeddings_and_output_weights=provider.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_percent=provider.rotary_percent,
        rotary_base=provider.rotary_base,
        rope_scaling=provider.rope_scaling,
        rope_scaling_factor=provider.rope_scaling_factor,
        seq_len_interpolation_factor=provider.seq_len_interpolation_factor,
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def _complete(provider: GPTModelProvider, options: TrainerConfig, half: bool) -> None:
    """Add sharding, precision and kernels to the configuration that the bridge read from config.json."""
    cut, fast = options.megatron, has_transformer_engine()
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": cut.tensor_model_parallel_size,
        "pipeline_model_parallel_size": cut.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": (
            cut.virtual_pipeline_model_parallel_size if cut.virtual_pipeline_model_parallel_size > 1 else None
        ),
        "context_parallel_size": cut.context_parallel_size,
        "expert_model_parallel_size": cut.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,  # experts are not sharded
        "sequence_parallel": cut.sequence_parallel,
        "params_dtype": torch.float32,  # until the model is built and loaded; `in_precision` then changes it
        "pipeline_dtype": torch.bfloat16 if half else torch.float32,
        "bf16": half,
        "fp16": False,
        "use_cpu_initialization": megatron_cpu.needed(),
        # micro-batch lengths vary, so pipeline stages exchange shapes
        "variable_seq_lengths": cut.pipeline_model_parallel_size > 1,
        "calculate_per_token_loss": True,  # sums gradients, as losses are already divided by the global count
        "attention_softmax_in_fp32": True,
        # logprobs must be reproducible
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # no load-balancing terms: only the algorithm defines the loss, and only the optimizer changes weights
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_load_balancing_type": "none",
        "moe_router_bias_update_rate": 0.0,
        "moe_input_jitter_eps": None,
        "moe_token_dispatcher_type": "alltoall",  # supports different numbers of tokens per rank
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
    }
    if not fast:
        fused = "masked_softmax_fusion bias_activation_fusion bias_dropout_fusion apply_rope_fusion persist_layer_norm"
        settings |= dict.fromkeys([*fused.split(), "moe_grouped_gemm", "moe_permute_fusion"], False)
    if options.activation_checkpointing:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
