"""The native engine on a GPU generates the same as on a CPU."""

import asyncio
import gc

import numpy as np
import pytest
import torch

from asyncrl.config.schema import EngineConfig
from asyncrl.models.checkpoint import load_decoder, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.warm_start import Demonstration, warm_start
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.buckets import Bucket, pack
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.param_sync.manifest import Manifest, TensorSpec
from asyncrl.processes.device_memory import DeviceMemoryError
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, TokenMasks, inverse_cdf, sample
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import full_forward, make_request, run_all

pytestmark = pytest.mark.gpu

VOCABULARY, CONTEXT = 150, 128
BFLOAT16_ATOL = 0.08  # logits up to 3.5 are rounded by 0.008, and layers before them round too; 0.03 on a CPU


def _decoder(seed: int, std: float, mtp_layers: int = 1) -> Decoder:
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "num_nextn_predict_layers": mtp_layers,
        "tie_word_embeddings": True,
    }
    decoder = Decoder(DecoderConfig.from_dict(raw))
    decoder.init_weights(seed, std)
    return decoder


def _save(path, decoder: Decoder):
    save_checkpoint(path, dict(decoder.named_parameters()), decoder.config)
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Wide weights, so that rounding does not change the most likely token."""
    return _save(tmp_path_factory.mktemp("wide"), _decoder(seed=5, std=0.3))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    """Weights on the scale of a trained model's."""
    return _save(tmp_path_factory.mktemp("narrow"), _decoder(seed=6, std=0.1))


def _model(path, device, dtype=torch.float32) -> NativeModel:
    model = NativeModel(DecoderConfig.load(path), CONTEXT, dtype, device)
    model.load(path)
    return model


def _core(model: NativeModel, k: int = 0, recorder: Recorder | None = None) -> Core:
    spec = Speculation(k, guard=False) if k else None
    core = Core(model, slots=4, context_tokens=CONTEXT, prefill_chunk_tokens=16, speculation=spec, recorder=recorder)
    core.start(PolicyVersion(0, 0))
    return core


def _prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def _requests(lengths=(1, 2, 5, 17, 33, 40, 3), new=25, **sampling):
    return [make_request(f"r{i}", _prompt(i, n), new + i, key=i, **sampling) for i, n in enumerate(lengths)]


def _tokens(responses):
    return {id: (tokens, finish) for id, (tokens, _, finish) in responses.items()}


def test_greedy_tokens_equal_those_of_the_cpu(device, wide):
    shared = [make_request(f"g{i}", _prompt(9, 30), 12 + i, group="g", shared=30, temperature=0.0) for i in range(3)]
    requests = [*_requests(temperature=0.0), *shared]
    on_device, on_cpu = (run_all(_core(_model(wide, where)), requests) for where in (device, "cpu"))
    assert _tokens(on_device) == _tokens(on_cpu)
    for id, (_, logprobs, _) in on_device.items():
        np.testing.assert_allclose(logprobs, on_cpu[id][1], atol=1e-4)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, BFLOAT16_ATOL)])
def test_logprobs_equal_those_of_the_trainer_s_forward_pass(device, narrow, dtype, atol):
    requests = [*_requests(temperature=1.0), make_request("warm", _prompt(7, 20), 40, temperature=0.7)]
    responses = run_all(_core(_model(narrow, device, dtype)), requests)
    decoder = load_decoder(narrow, dtype).to(device)
    differences = [np.abs(responses[r.id][1] - full_forward(decoder, r, responses[r.id][0])) for r in requests]
    assert all(len(responses[r.id][0]) == r.max_new_tokens for r in requests)
    assert np.concatenate(differences).max() < atol
    assert np.concatenate(differences).mean() < atol / 5


def test_a_token_of_zero_weight_is_never_drawn(device):
    """With uniforms at the borders of the cumulative sum, one row at a time and many at once."""
    generator = torch.Generator().manual_seed(0)
    for size in (1000, 20_000):
        weights_V = torch.rand(size, generator=generator) * (torch.rand(size, generator=generator) < 0.05)
        cdf_V = weights_V.double().cumsum(0)
        borders = (cdf_V / cdf_V[-1]).unique()[:64]
        near = (borders[:, None] * 2**24).round() + torch.arange(-2, 3)
        uniforms_N = (near.clamp(0, 2**24 - 1) / 2**24).float().flatten()
        weights_V = weights_V.to(device)
        rows_NV, uniforms_N1 = weights_V.expand(len(uniforms_N), -1).contiguous(), uniforms_N[:, None].to(device)
        drawn = [inverse_cdf(rows_NV, uniforms_N1)]
        drawn += [inverse_cdf(rows_NV[:1], uniforms_N1[n : n + 1]) for n in range(len(uniforms_N))]
        assert (weights_V[torch.cat(drawn)] > 0).all()


def test_filters_and_greedy_rows_draw_the_same_as_on_the_cpu(device):
    logits_NV = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    uniforms_N = torch.tensor([0.1, 0.5, 0.9, 0.99])
    rows = [
        make_request(str(i), [1], **options).sampling
        for i, options in enumerate(({"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.0}, {"min_p": 0.1}))
    ]
    on_cpu = sample(logits_NV, SamplingColumns.of(rows), uniforms_N)
    on_device = sample(logits_NV.to(device), SamplingColumns.of(rows, device), uniforms_N.to(device))
    assert on_device[0].tolist() == on_cpu[0].tolist()
    torch.testing.assert_close(on_device[1].cpu(), on_cpu[1], atol=1e-5, rtol=0)


def test_rows_with_biases_and_masks_draw_the_same_as_on_the_cpu(device):
    logits_NV = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 3
    uniforms_N = torch.tensor([0.1, 0.5, 0.9, 0.99])
    rows = [SamplingParams(logit_bias=((0, 9.0), (299, 8.0))), SamplingParams(), SamplingParams(temperature=0.0)] * 2
    words_GW = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 10)).astype(np.int32)

    def drawn(place):
        masks = TokenMasks(torch.tensor([1, 2], device=place), torch.from_numpy(words_GW).to(place))
        return sample(logits_NV.to(place), SamplingColumns.of(rows[:4], place), uniforms_N.to(place), masks)

    on_cpu, on_device = drawn("cpu"), drawn(device)
    assert on_device[0].tolist() == on_cpu[0].tolist()
    torch.testing.assert_close(on_device[1].cpu(), on_cpu[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [1, 3])
def test_speculation_changes_no_greedy_token(device, wide, counting, k):
    for path, accepted in ((wide, 1.0), (counting, 1.3)):
        recorder, model = Recorder("engine"), _model(path, device)
        core = _core(model, k, recorder)
        requests = _requests(temperature=0.0)
        assert _tokens(run_all(core, requests)) == _tokens(run_all(_core(model), requests))
        assert engine_metrics(recorder.drain().counters)["rollout/spec_accept_length"] >= accepted


def test_speculation_with_two_draft_layers_changes_no_greedy_token(device, tmp_path):
    model = _model(_save(tmp_path, _decoder(seed=5, std=0.3, mtp_layers=2)), device)
    requests = _requests((1, 33, 80), temperature=0.0)
    assert _tokens(run_all(_core(model, 2), requests)) == _tokens(run_all(_core(model), requests))


@pytest.mark.parametrize("beside", [{}, {"top_k": 5}])
def test_a_deterministic_row_has_the_same_bits_beside_any_other(device, narrow, beside):
    def drawn(*others):
        model = _model(narrow, device)
        core = Core(model, slots=4, context_tokens=CONTEXT, prefill_chunk_tokens=16, deterministic=True)
        core.start(PolicyVersion(0, 0))
        return run_all(core, [make_request("own", _prompt(1, 20), 20, key=1), *others])["own"]

    alone, together = drawn(), drawn(make_request("other", _prompt(2, 9), 30, key=2, **beside))
    assert alone[0] == together[0]
    np.testing.assert_array_equal(alone[1], together[1])


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A target and a draft that learnt the same task and mostly agree."""

    def counts():
        rng = np.random.default_rng(0)
        while True:
            run = (rng.integers(VOCABULARY) + np.cumsum(rng.choice([1, 2], 24, p=[0.9, 0.1]))) % VOCABULARY
            yield Demonstration(run[:2].tolist(), run[2:].tolist())

    torch.manual_seed(0)
    decoder = _decoder(seed=3, std=0.1)
    warm_start(decoder, counts(), steps=80, batch_size=16, lr=4e-3, warmup_steps=10)
    return _save(tmp_path_factory.mktemp("counting"), decoder)


def _held_bytes(device: str) -> int:
    """Bytes held by live tensors, from the device's allocator, or counted on a CPU."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _live_tensors()}
    return sum(storages.values())


def _live_tensors():
    return [o for o in gc.get_objects() if type(o) is torch.Tensor]


async def _generate(engine: NativeEngine, id: str) -> list[int]:
    await engine.submit([make_request(id, _prompt(1, 20), 30, temperature=0.0)])
    tokens, ended = [], False
    while not ended:
        events = await asyncio.wait_for(engine.events(), 60)
        tokens += events.tokens.tolist()
        ended = any(finish is not None for finish in events.finish)
    return tokens


def test_released_kv_frees_memory_until_it_is_restored(device, wide):
    """Through the engine, whose thread is not the one that created the tensors."""

    async def scenario():
        engine = NativeEngine(wide, EngineConfig(slots=64, max_context_tokens=CONTEXT, device=device))
        await engine.resume(PolicyVersion(0, 0))
        before = await _generate(engine, "before")
        await engine.pause("abort", 10)
        held = _held_bytes(device)
        freed = await engine.release_kv()
        assert freed == 2 * 2 * 64 * 2 * CONTEXT * 16 * 4  # layers, K and V, slots, heads, positions, head_dim, bytes
        assert held - _held_bytes(device) == pytest.approx(freed, rel=0.01)
        await engine.restore_kv()
        assert _held_bytes(device) == pytest.approx(held, rel=0.01)
        await engine.resume(PolicyVersion(0, 0))
        assert await _generate(engine, "after") == before
        await engine.close()

    asyncio.run(scenario())


def test_out_of_memory_is_one_line_that_names_what_holds_it(device, wide):
    if device == "cpu":
        pytest.skip("a limit of the CUDA allocator")
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 2**26
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    said = (
        r"ran out of memory while it allocated KV of 99999 slots of 128 tokens\. Of its .* GiB: weights 0\.00, .*slots"
    )
    try:
        with pytest.raises(DeviceMemoryError, match=said):
            NativeEngine(wide, EngineConfig(slots=99999, max_context_tokens=CONTEXT, device=device))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("buckets", ["host", "device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_become_the_live_weights(device, wide, narrow, buckets, dtype):
    """Host buckets are read-only as in shared memory, device buckets as in CUDA IPC; tensors are split over buckets."""
    updated, fresh = _model(wide, device, dtype), _model(narrow, device, dtype)
    receiver = LiveWeights(updated.named_views(), updated.tied(), lambda version: None)
    sent = {name: p.detach().to(dtype) for name, p in load_decoder(narrow).named_parameters()}
    specs = [TensorSpec(n, str(dtype).removeprefix("torch."), tuple(t.shape)) for n, t in sent.items()]
    receiver.open("s", Manifest(tuple(specs)))
    buffer = torch.empty(4096, dtype=torch.uint8, device=device if buckets == "device" else "cpu")
    for sequence, filled in enumerate(pack(sent.items(), lambda: buffer)):
        data = memoryview(buffer.numpy()).toreadonly() if buffer.device.type == "cpu" else buffer
        receiver.take(Bucket("s", 0, sequence, filled.parts, data, filled.checksum))
    assert sequence > 20
    receiver.verify()
    receiver.commit(PolicyVersion(0, 1))
    assert digest_tensors(updated.named_views().items()) == digest_tensors(sent.items())
    requests = _requests(temperature=0.0)
    assert _tokens(run_all(_core(updated), requests)) == _tokens(run_all(_core(fresh), requests))
