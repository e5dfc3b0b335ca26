"""Checks of the native engine's GPU kernels, run by `tests.test_native_engine_kernels` in Triton's interpreter."""

import numpy as np
import torch
import torch.nn.functional as F

from asyncrl.models.config import DecoderConfig
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.engines.native import fused
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.rollouter.engines.native.model import NativeModel, Placed
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, sample
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import make_request, run_all


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=3e-6)


def check_norm_and_activation():
    x, added, weight, gate_up = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48), torch.randn(5, 600)
    summed, kept = x + added, x.clone()
    close(fused.add_norm(kept, added, weight, 1e-6), F.rms_norm(summed, (48,), weight, 1e-6))
    close(kept, summed)
    close(fused.add_norm(kept, None, weight, 1e-6), F.rms_norm(summed, (48,), weight, 1e-6))
    close(kept, summed)
    close(fused.gated(gate_up), F.silu(gate_up[:, :300]) * gate_up[:, 300:])


def check_attention(places, normed):
    slots, heads, kv_heads, dim, context, eps = 4, 6, 2, 16, 200, 1e-6
    keys, values = torch.randn(2, slots, kv_heads, context, dim)
    firsts = torch.tensor([0, 5, 63, context - places])
    positions = (firsts[:, None] + torch.arange(places)).flatten()
    qkv, rope = torch.randn(len(positions), (heads + 2 * kv_heads) * dim), torch.randn(context, 2, 1, dim)
    norms = torch.randn(2, dim).unbind() if normed else None
    slots_of = torch.arange(slots).repeat_interleave(places)
    own_keys, own_values = keys.clone(), values.clone()
    queries = fused.rotate_and_store(qkv, slots_of, positions, rope, norms, own_keys, own_values, heads, eps)
    out = fused.attend(queries, positions, own_keys, own_values, places).view(-1, heads, dim)

    q, k, v = qkv.view(-1, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = F.rms_norm(q, (dim,), norms[0], eps), F.rms_norm(k, (dim,), norms[1], eps)
    cos, sin = rope[positions].unbind(1)
    rotated = lambda x: x * cos + x.roll(dim // 2, -1) * sin
    close(queries, rotated(q))
    for row, position in enumerate(positions.tolist()):  # rows of a slot in order, each after its own was stored
        keys[row // places, :, position], values[row // places, :, position] = rotated(k)[row], v[row]
        seen = slice(position + 1)
        for head in range(heads):
            own = row // places, head // (heads // kv_heads)
            weights = torch.softmax(keys[own][seen] @ rotated(q)[row, head] / dim**0.5, 0)
            close(out[row, head], weights @ values[own][seen])
    assert torch.equal(own_values, values)
    close(own_keys, keys)


def check_draw(size):
    uniforms = torch.tensor([0.0, 0.1, 0.5, 0.9, 0.99, 1 - 2**-24])
    rows = [SamplingParams(temperature=t) for t in (1.0, 0.7, 0.0, 1.0, 2.0, 1.0)]
    logits = torch.randn(len(rows), size) * 3
    for params in (rows, [SamplingParams()] * len(rows)):
        columns = SamplingColumns.of(params)
        tokens, logprobs = fused.draw(logits, columns.temperature, columns.greedy, uniforms)
        theirs = sample(logits, columns, uniforms)
        assert torch.equal(tokens, theirs[0])
        torch.testing.assert_close(logprobs, theirs[1], rtol=0, atol=1e-5)
    damaged = logits.clone()
    damaged[1, 7], damaged[2, 5] = float("nan"), float("inf")
    tokens, logprobs = fused.draw(damaged, None, None, uniforms)
    assert logprobs.isnan().tolist() == [False, True, True, False, False, False]
    assert ((tokens >= 0) & (tokens < size)).all()


def check_that_no_token_of_zero_weight_is_drawn():
    logits = torch.full((64, 9000), -torch.inf)
    logits[:, 3::50] = torch.randn(64, 180)
    tokens, logprobs = fused.draw(logits, None, None, torch.linspace(0, 1 - 2**-24, 64))
    assert logprobs.isfinite().all()
    assert len(tokens.unique()) > 20


def small_model():
    raw = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48}
    raw |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    model = NativeModel(DecoderConfig.from_dict(raw | {"max_position_embeddings": 64}), 64, torch.float32)
    for view in model.named_views().values():
        view.normal_(0, 0.3)
    model.refresh()
    return model


@torch.inference_mode()
def check_passes_of_the_model():
    """A prefill of several prompts at once and a decode pass, against those of the eager model."""
    model = small_model()
    config = model.config
    eager, fast = (KVCache(config, 4, 64, torch.float32, model.device) for _ in range(2))
    for start, size in ((0, 9), (9, 5)):
        chunks = [Placed(np.arange(size) + 7 * slot, slot, start) for slot in (2, 0, 3)]
        for tokens, slot, start in chunks:
            model.prefill(torch.from_numpy(tokens), slot, start, eager, size, start + size)
        model.prefill_together(chunks, fast)
    tokens, positions = torch.tensor([[5], [6], [7], [8]]), torch.tensor([[14], [0], [14], [14]])
    expected = model.hidden_states(tokens, positions, eager, 64)
    slots, flat = torch.arange(4), positions.flatten()
    attend = lambda i, queries: fused.attend(queries, flat, fast.keys[i], fast.values[i], 1)
    torch.testing.assert_close(model._fused_trunk(tokens.flatten(), slots, flat, fast, attend), expected)
    for ours, theirs in zip(fast.keys + fast.values, eager.keys + eager.values):
        torch.testing.assert_close(ours, theirs)


@torch.inference_mode()
def check_that_prompts_prefilled_together_are_copied_within_groups():
    """Through the core: groups whose samples copy their prompt from the one that is prefilled in the same step."""
    model = small_model()

    def responses(together):
        core = Core(model, slots=6, context_tokens=64, prefill_chunk_tokens=40)
        core._prefiller.together = together
        core.start(PolicyVersion(0, 0))
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 50, size) for size in (9, 17, 3, 25)]
        requests = [
            make_request(f"{g}.{i}", [*prompt, *rng.integers(0, 50, i)], 6, key=i, group=str(g), shared=len(prompt))
            for g, prompt in enumerate(prompts)
            for i in range(3)
        ]
        return run_all(core, requests)

    found, expected = responses(True), responses(False)
    for id, (tokens, logprobs, finish) in expected.items():
        assert (tokens, finish) == (found[id][0], found[id][2])
        np.testing.assert_allclose(found[id][1], logprobs, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_that_prompts_prefilled_together_are_copied_within_groups()
    check_passes_of_the_model()
    check_norm_and_activation()
    for places in (1, 3):
        for normed in (False, True):
            check_attention(places, normed)
    for size in (300, 9000):
        check_draw(size)
    check_that_no_token_of_zero_weight_is_drawn()
