"""Small megatron-core models without a trainer, in one process or several."""

import contextlib
import multiprocessing

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers

from asyncrl.config.schema import Config, MegatronConfig
from asyncrl.cpu import megatron as megatron_cpu
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.layout import PackedLayout

#: turns on everything that a step can depend on: draft, several epochs, reference, entropy, small micro-batches
OPTIONS = {
    "enable_train": True,
    "loss": "cross_entropy",
    "updates_per_pass": 1,
    "epochs": 2,
    "kl_coef": 0.05,
    "entropy_coef": 0.01,
    "temperature": 0.8,
    "max_tokens_per_micro_batch": 64,
}
#: The draft's default loss, in separate steps. Its gradient is discontinuous where q = p: at a learning rate of 2e-3
#: these tiny models diverge by 8e-3 (relative) within ten steps, even on the torch backend with other micro-batches.
APART = {"loss": "acceptance", "updates_per_pass": 3, "passes": 2, "learning_rate": 3e-4}
CUTS = {
    "one": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
    "data": {},
    "tensor-pipeline": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pipeline-data": {"pipeline_model_parallel_size": 2},
    "context": {"context_parallel_size": 2},
    "context-tensor": {"context_parallel_size": 2, "tensor_model_parallel_size": 2},
    "context-pipeline": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "context-data": {"context_parallel_size": 2},
    "expert": {"expert_model_parallel_size": 2},
    "expert-context": {"expert_model_parallel_size": 2, "context_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "expert-tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    "sequence-context": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    "expert-tensor-data": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4},
    "expert-pipeline": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "virtual": {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2},
}


@contextlib.contextmanager
def process_group(rank=0, world_size=1, init_method=None, cut="one"):
    """Context in which megatron-core's process groups exist; one at a time per process."""
    megatron_cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    store = dist.HashStore() if init_method is None else None
    dist.init_process_group("gloo", init_method=init_method, store=store, rank=rank, world_size=world_size)
    sizes = {name: size for name, size in CUTS[cut].items() if name != "sequence_parallel"}
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    try:
        yield
    finally:
        dist.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def only_where_wanted(patch):
    """Skip the test of a patch that the installed releases do not need."""
    if not megatron_cpu.patch_named(patch).wanted():
        pytest.skip(f"{patch}: the installed releases do without it")


def built(path, cut="one", mtp_from_trunk=False, package="megatron_bridge"):
    """(chunks, conversion) of the folder's model, with its weights loaded."""
    from asyncrl.trainer.backends.megatron.bridges import bridge_of, read_source
    from asyncrl.trainer.backends.megatron.policy import build_chunks
    from asyncrl.trainer.backends.megatron.weights import Conversion

    config = Config()
    config.trainer.megatron = MegatronConfig(**CUTS[cut])
    bridge = bridge_of(read_source(path, mtp_from_trunk), package)
    chunks = build_chunks(bridge, config.trainer, half=False)
    conversion = Conversion(bridge, chunks)
    conversion.load(read_tensors(path).__getitem__)
    return chunks, conversion


@torch.no_grad()
def states(model, tokens_BS, depths=0, lengths=None):
    """(hidden [B, S, M], the draft's states at each depth); ``lengths`` of the sequences, if not one per row."""
    from asyncrl.trainer.backends.megatron.packed import PackedSequences

    model.draft_depths = depths
    lengths = np.array(lengths or [tokens_BS.shape[1]] * len(tokens_BS))
    layout = PackedLayout.from_lengths(lengths)
    sequences = PackedSequences.of(tokens_BS.flatten(), lengths, layout, dist.new_group([dist.get_rank()]))
    out = model(sequences.tokens, sequences.positions, None, packed_seq_params=sequences)
    return [state.view(*tokens_BS.shape, -1) for state in out]


def make_experts(folder, experts=6):
    """A small Qwen3-MoE in Hugging Face's format, with two active experts per token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": experts}
    choice = {"num_experts_per_tok": 2, "norm_topk_prob": True}
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(vocab_size=64, **sizes, **counts, **choice, max_position_embeddings=128)
    ).float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.save_pretrained(folder)
    return model


def random_tokens(vocab_size, shape=(2, 20)):
    return torch.from_numpy(np.random.default_rng(0).integers(0, vocab_size, shape))


def in_processes(count, work, *arguments):
    """Run ``work(rank, *arguments)`` in ``count`` processes, forked from one that has imported Megatron."""
    multiprocessing.set_forkserver_preload(["asyncrl.trainer.backends.megatron.backend"])
    mp.start_processes(work, arguments, nprocs=count, start_method="forkserver")
