"""The native engine's core compared with Hugging Face and the training decoder, and its determinism."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from asyncrl.models.checkpoint import load_decoder, read_tensors, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import EngineError, Scheduling
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import full_forward, make_request, read, run_all

VOCABULARY, CONTEXT = 150, 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # wide, so that rounding does not change the most likely token
}


def _mimo(path: Path, **sizes: int) -> Path:
    raw = (
        SIZES
        | sizes
        | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "tie_word_embeddings": True}
    )
    config = DecoderConfig.from_dict(raw)
    decoder = Decoder(config)
    decoder.init_weights(seed=5, std=0.3)
    save_checkpoint(path, dict(decoder.named_parameters()), config)
    return path


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    return _mimo(tmp_path_factory.mktemp("mimo"))


def _core(path, slots=4, chunk=16, context=CONTEXT, **options) -> Core:
    model = NativeModel(DecoderConfig.load(path), context, torch.float32)
    model.load(path)
    core = Core(model, slots=slots, context_tokens=context, prefill_chunk_tokens=chunk, **options)
    core.start(PolicyVersion(0, 0))
    return core


def _prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_output_equals_transformers_generate(tmp_path, family, tied):
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}Config")
    more = {"Qwen3": {"head_dim": 32, "attention_bias": True}, "Llama": {"attention_bias": True, "rms_norm_eps": 1e-5}}
    extra = more.get(family, {})
    hf = getattr(transformers, f"{family}ForCausalLM")(config_class(**SIZES, **extra, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for p in hf.parameters():
            if p.dim() == 1:  # biases and norms that matter
                p.add_(torch.randn_like(p) * 0.2)
    hf.save_pretrained(tmp_path)
    prompts = [_prompt(i, n) for i, n in enumerate((1, 5, 30, 47))]
    requests = [make_request(f"r{i}", p, 20, temperature=0.0) for i, p in enumerate(prompts)]
    responses = run_all(_core(tmp_path, slots=3), requests)
    for i, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt)[None].long()
        with torch.no_grad():
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, eos_token_id=None
            )
        assert responses[f"r{i}"][0] == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_equal_a_full_forward_for_mixed_lengths_and_temperatures(mimo, deterministic):
    requests = [
        make_request(f"r{i}", _prompt(i, 3 + 7 * i), 5 + 6 * i, key=i, temperature=(1.0, 0.7)[i % 2]) for i in range(9)
    ]
    responses = run_all(_core(mimo, deterministic=deterministic), requests)
    decoder = load_decoder(mimo)
    for i, request in enumerate(requests):
        tokens, logprobs, finish = responses[request.id]
        assert len(tokens) == 5 + 6 * i
        assert finish is FinishReason.LENGTH
        np.testing.assert_allclose(logprobs, full_forward(decoder, request, tokens), atol=1e-4)


def test_a_shared_prompt_is_prefilled_once_and_copied_even_to_requests_placed_later(mimo):
    recorder = Recorder("test")
    core = _core(mimo, slots=3, recorder=recorder)
    prompt = _prompt(1, 40)
    group = [make_request(f"s{i}", prompt, 4 + 4 * i, key=i, group="g", shared=40) for i in range(6)]
    together = run_all(core, group)
    assert recorder.drain().counters["rollout/prompt/prefilled"] == 39
    for request in group:
        alone = run_all(_core(mimo), [make_request("x", prompt, request.max_new_tokens, key=request.key)])["x"]
        assert together[request.id][0] == alone[0]
        np.testing.assert_allclose(together[request.id][1], alone[1], atol=1e-4)


def test_a_different_prefix_within_a_group_is_not_shared(mimo):
    a, b = _prompt(1, 20), _prompt(2, 20)
    requests = [make_request("a", a, group="g", shared=20), make_request("b", b, group="g", shared=20)]
    responses = run_all(_core(mimo), requests)
    assert responses["b"][0] == run_all(_core(mimo), [make_request("b", b)])["b"][0]


def test_lower_priority_numbers_are_served_first(mimo):
    core = _core(mimo, slots=1)
    core.submit([make_request(str(i), _prompt(i, 4), 3, priority=p) for i, p in enumerate((2, 0, 1, 0))])
    while core.active:
        core.step()
    events = core.drain()
    ended = [id for id, finish in zip(events.ids, events.finish) if finish is not None]
    assert ended == ["1", "3", "2", "0"]


def test_validation_first_decides_whether_validation_is_placed_before_training(mimo):
    core = _core(mimo, slots=1)
    core.submit([make_request("runs", _prompt(9, 4), 8)])
    core.step()
    core.submit([make_request(str(i), _prompt(i, 4), 3, priority=i % 2) for i in range(6)])
    core.set_scheduling(Scheduling(validation_first=True))
    ended = []
    while core.active:
        core.step()
        events = core.drain()
        ended += [id for id, finish in zip(events.ids, events.finish) if finish is FinishReason.LENGTH]
        if ended[-1:] == ["3"]:
            core.set_scheduling(Scheduling())
    assert ended == ["runs", "1", "3", "0", "2", "4", "5"]


def _bits(responses):
    return {id: (tokens, logprobs.tobytes()) for id, (tokens, logprobs, _) in responses.items()}


def test_deterministic_bits_do_not_depend_on_order_slot_companions_or_an_abort(mimo):
    prompts = [_prompt(g, (9, 70, 26)[g]) for g in range(3)]
    requests = [
        make_request(
            f"{g}.{s}", prompts[g], 10 + 5 * s, key=100 * g + s, group=str(g), shared=len(prompts[g]), top_p=0.9
        )
        for g in range(3)
        for s in range(3)
    ]
    reference = _bits(run_all(_core(mimo, deterministic=True), requests))

    shuffled = [requests[i] for i in np.random.default_rng(0).permutation(len(requests))]
    companions = [make_request(f"c{i}", _prompt(50 + i, 5 + i), 30, key=i, temperature=0.6) for i in range(5)]
    core = _core(mimo, deterministic=True)
    core.submit(companions[:2])
    for _ in range(7):
        core.step()
    other = _bits(run_all(core, [*shuffled, *companions[2:]]))
    assert {id: other[id] for id in reference} == reference

    for request in requests[::2]:  # alone
        assert _bits(run_all(_core(mimo, deterministic=True), [request]))[request.id] == reference[request.id]

    core = _core(mimo, deterministic=True)
    core.submit(shuffled)
    for _ in range(9):
        core.step()
    core.abort()
    before = read(core.drain())
    continued = []
    for request in requests:
        tokens, _, finish = before[request.id]
        if finish is FinishReason.ABORT:
            continued.append(
                request._replace(
                    tokens=np.concatenate([request.tokens, tokens]).astype(np.int32),
                    position=request.position + len(tokens),
                    max_new_tokens=request.max_new_tokens - len(tokens),
                    resumed=len(tokens),
                )
            )
    assert any(request.resumed for request in continued)
    after = run_all(core, continued)
    whole = {
        id: (before[id][0] + after[id][0], np.concatenate([before[id][1], after[id][1]]), None) if id in after else part
        for id, part in before.items()
    }
    assert _bits(whole) == reference


def test_a_continued_request_uses_the_same_random_numbers(mimo):
    prompt = _prompt(3, 10)
    whole = run_all(_core(mimo), [make_request("a", prompt, 20, key=9)])["a"][0]
    rest = run_all(_core(mimo), [make_request("a", [*prompt, *whole[:8]], 12, key=9, position=8)])["a"][0]
    assert whole[8:] == rest


def test_a_flush_prefills_kept_requests_again_under_the_new_weights(mimo):
    core = _core(mimo)
    requests = [make_request(f"r{i}", _prompt(i, 6 + i), 30, key=i) for i in range(3)]
    core.submit(requests)
    for _ in range(10):
        core.step()
    first = read(core.drain())
    views = core.model.named_views()
    with torch.no_grad():
        for name, view in views.items():
            view.add_(torch.randn(view.shape, generator=torch.Generator().manual_seed(len(name))) * 0.02)
    core.flush_kv()
    core.start(PolicyVersion(0, 1))
    second = read(core.drain()) | run_all(core)

    fresh = Core(core.model, slots=4, context_tokens=CONTEXT, prefill_chunk_tokens=16)
    fresh.start(PolicyVersion(0, 1))
    for request in requests:
        done = first[request.id][0]
        row = [*request.tokens, *done]
        again = run_all(fresh, [make_request("x", row, 30 - len(done), key=request.key, position=len(done))])["x"]
        assert second[request.id][0] == again[0]
        np.testing.assert_allclose(second[request.id][1], again[1], atol=1e-4)


def test_kv_kept_across_versions_marks_the_tokens_and_is_not_shared_with_new_requests(mimo):
    recorder = Recorder("test")
    core = _core(mimo, recorder=recorder)
    prompt = _prompt(4, 20)
    core.submit([make_request("old", prompt, 20, group="g", shared=20)])
    for _ in range(5):
        core.step()
    core.start(PolicyVersion(0, 1))
    core.submit([make_request("new", prompt, 5, group="g", shared=20)])
    while core.active:
        core.step()
    events = core.drain()
    seen = {(id, v.number, mixed) for id, v, mixed in zip(events.ids, events.versions, events.mixed_kv)}
    assert seen == {("old", 0, False), ("old", 1, True), ("new", 1, False)}
    assert recorder.drain().counters["rollout/prompt/prefilled"] == 2 * 19


def test_generation_ends_at_the_end_of_the_context(mimo):
    responses = run_all(
        _core(mimo, context=32), [make_request("a", _prompt(0, 20), 1000), make_request("b", _prompt(0, 31), 5)]
    )
    assert [len(responses[id][0]) for id in "ab"] == [12, 1]
    assert responses["a"][2] is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (make_request("x", _prompt(0, 128)), "128 tokens and the context holds 128"),
        (make_request("x", []), "no tokens"),
        (make_request("x", [3, VOCABULARY]), f"0 to {VOCABULARY - 1}"),
        (make_request("x", [3], 0), "max_new_tokens is 0"),
        (make_request("x", [3], top_p=0.0), "top_p"),
        (make_request("x", [3], stop_strings=("a",)), "without a tokenizer"),
    ],
)
def test_a_request_that_can_never_run_is_answered_with_an_error(mimo, request_, says):
    core = _core(mimo)
    core.submit([request_, make_request("fine", [1, 2], 2)])
    while core.active:
        core.step()
    events = core.drain()
    assert dict(zip(events.ids, events.finish)) == {"x": FinishReason.ERROR, "fine": FinishReason.LENGTH}
    assert says in events.errors["x"]


def test_an_id_that_is_still_running_is_refused_and_nothing_is_queued(mimo):
    core = _core(mimo)
    core.submit([make_request("a", [1])])
    with pytest.raises(EngineError, match="used twice: a"):
        core.submit([make_request("b", [1]), make_request("a", [1])])
    assert core.active == 1


def test_diverged_weights_end_requests_with_an_error(mimo):
    core = _core(mimo)
    core.model.named_views()["model.norm.weight"].fill_(torch.nan)
    core.submit([make_request("a", [1, 2])])
    core.step()
    events = core.drain()
    assert events.finish == [FinishReason.ERROR]
    assert "are NaN" in events.errors["a"]
    assert not len(events.tokens)


@pytest.mark.parametrize("speculation", [None, Speculation(2)])
def test_diverged_weights_leave_nothing_in_the_slots(mimo, speculation):
    core = _core(mimo, speculation=speculation)
    weight = core.model.named_views()["model.layers.0.self_attn.v_proj.weight"]
    whole = weight.clone()
    weight.fill_(torch.nan)
    responses = run_all(core, [make_request(f"r{i}", _prompt(i, 9)) for i in range(3)])
    assert {finish for _, _, finish in responses.values()} == {FinishReason.ERROR}
    weight.copy_(whole)
    core.start(PolicyVersion(0, 1))
    requests = [make_request(f"r{i}", _prompt(i, 1 + i), 4 + 3 * i, key=i) for i in range(4)]
    responses = run_all(core, requests)
    decoder = load_decoder(mimo)
    for request in requests:
        tokens, logprobs, finish = responses[request.id]
        assert finish is FinishReason.LENGTH
        np.testing.assert_allclose(logprobs, full_forward(decoder, request, tokens), atol=1e-4)


def test_named_views_are_the_checkpoint_and_live(mimo, tmp_path):
    model = NativeModel(DecoderConfig.load(mimo), CONTEXT, torch.float32)
    model.load(mimo)
    views, stored = model.named_views(), read_tensors(mimo)
    assert views.keys() == stored.keys()
    assert all(torch.equal(views[name], stored[name]) for name in stored)
    assert any(name.startswith("model.mtp_layers.0.") for name in views)
    assert model.tied() == {"lm_head.weight": "model.embed_tokens.weight"}
    views["model.layers.1.self_attn.k_proj.weight"].zero_()
    assert not model.layers[1].qkv.weight[64:96].any()
    assert model.layers[1].qkv.weight[:64].any()


def test_large_matrices_follow_their_views_once_a_version_starts(tmp_path):
    """Matrices of this size are also kept in the kernel's own layout, which must not go stale."""
    size = {"hidden_size": 384, "intermediate_size": 512, "vocab_size": 512}
    core = _core(_mimo(tmp_path, **size))
    assert all(m.weight.numel() >= 1 << 17 for m in core.model.layers[0].matrices())
    decoder = load_decoder(tmp_path)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            core.model.named_views()[name].copy_(parameter.mul_(0.5))
    core.start(PolicyVersion(0, 1))
    requests = [make_request(f"r{i}", _prompt(i, 9), 20, key=i) for i in range(4)]
    responses = run_all(core, requests)
    for request in requests:
        tokens, logprobs, _ = responses[request.id]
        np.testing.assert_allclose(logprobs, full_forward(decoder, request, tokens), atol=1e-4)
