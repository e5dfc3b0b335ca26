"""Speculative decoding in the native engine keeps greedy tokens and the sampled distribution."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncrl.models.checkpoint import load_decoder, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.models.warm_start import Demonstration, warm_start
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import ZERO_ACCEPTANCE_TOKENS, engine_metrics
from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.native import speculation
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.sampler import SamplingColumns, distributions, inverse_cdf
from asyncrl.rollouter.engines.native.speculation import Speculation, judge
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import full_forward, make_request, read, run_all

VOCABULARY, CONTEXT = 24, 128


def _decoder(seed: int, std: float = 0.3, **sizes: int) -> Decoder:
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    }
    decoder = Decoder(DecoderConfig.from_dict(raw | sizes))
    decoder.init_weights(seed, std)
    return decoder


def _save(path: Path, decoder: Decoder) -> Path:
    save_checkpoint(path, dict(decoder.named_parameters()), decoder.config)
    return path


def _walks():
    """Sequences with steps of 1, 2 or 7, mostly 1: predictable, but not certain."""
    rng = np.random.default_rng(0)
    while True:
        steps = rng.choice([1, 2, 7], 30, p=[0.7, 0.2, 0.1])
        walk = (np.cumsum(steps) + rng.integers(VOCABULARY)) % VOCABULARY
        yield Demonstration(walk[:2].tolist(), walk[2:].tolist())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A target and a draft that often agree."""
    torch.manual_seed(0)
    decoder = _decoder(seed=3, std=0.1)
    warm_start(decoder, _walks(), steps=60, batch_size=16, lr=4e-3, warmup_steps=10)
    return _save(tmp_path_factory.mktemp("trained"), decoder)


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    """Random weights with confident predictions: target and draft seldom agree."""
    return _save(tmp_path_factory.mktemp("random"), _decoder(seed=5))


def _core(path, k=1, *, slots=4, chunk=16, context=CONTEXT, guard=False, **options) -> Core:
    """A started core that drafts ``k`` tokens; 0: no speculation."""
    model = NativeModel(DecoderConfig.load(path), context, torch.float32)
    model.load(path)
    spec = Speculation(k, guard) if k else None
    core = Core(model, slots=slots, context_tokens=context, prefill_chunk_tokens=chunk, speculation=spec, **options)
    core.start(PolicyVersion(0, 0))
    return core


def _prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def _requests(lengths=(1, 2, 5, 17, 33, 40, 3), new=25, **sampling):
    return [make_request(f"r{i}", _prompt(i, n), new + i, key=i, **sampling) for i, n in enumerate(lengths)]


def _tokens(outputs):
    return {id: (tokens, finish) for id, (tokens, _, finish) in outputs.items()}


def _figures(core) -> dict[str, float]:
    core.drain()
    return engine_metrics(core._recorder.drain().counters)


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_greedy_tokens_equal_those_of_decoding_one_by_one(request, weights, k):
    path = request.getfixturevalue(weights)
    requests = _requests(temperature=0.0)
    core = _core(path, k)
    assert _tokens(run_all(core, requests)) == _tokens(run_all(_core(path, 0), requests))
    if weights == "trained":
        assert _figures(core)["rollout/spec_accept_length"] > 1.3


def test_several_mtp_layers_change_only_the_speed(tmp_path):
    path = _save(tmp_path, _decoder(seed=7, std=0.1, num_nextn_predict_layers=2))
    requests = _requests(temperature=0.0)
    assert _tokens(run_all(_core(path, 3), requests)) == _tokens(run_all(_core(path, 0), requests))


@pytest.mark.parametrize("k", [1, 3])
def test_logprobs_equal_those_of_a_full_forward_pass(trained, k):
    requests = _requests(temperature=0.8, top_p=0.9)
    outputs = run_all(_core(trained, k), requests)
    decoder = load_decoder(trained)
    for request in requests:
        tokens, logprobs, _ = outputs[request.id]
        assert len(tokens) == len(logprobs) == request.max_new_tokens
        np.testing.assert_allclose(logprobs, full_forward(decoder, request, tokens), atol=1e-4)


def test_a_sample_does_not_depend_on_its_slot_or_companions(trained):
    requests = _requests(temperature=1.0)
    together = run_all(_core(trained, 2, slots=3), requests)
    for request in requests[::2]:
        assert run_all(_core(trained, 2), [request])[request.id][0] == together[request.id][0]


# -- ends ----------------------------------------------------------------------------------------------------------


def test_nothing_is_emitted_after_a_stop_token_within_an_accepted_run(trained):
    plain = run_all(_core(trained, 0), _requests(temperature=0.0))
    stops = tuple(tokens[len(tokens) // 2] for tokens, _, _ in plain.values())
    requests = _requests(temperature=0.0, stop_token_ids=stops)
    expected = run_all(_core(trained, 0), requests)
    core = _core(trained, 3)
    assert _tokens(run_all(core, requests)) == _tokens(expected)
    assert {finish for _, _, finish in expected.values()} == {FinishReason.STOP}


class Letters:
    def decode(self, token_ids, **kwargs):
        return "".join(chr(ord("a") + token) for token in token_ids)


def test_nothing_is_emitted_after_a_stop_string_within_an_accepted_run(trained):
    plain = run_all(_core(trained, 0), _requests(temperature=0.0))
    strings = tuple(Letters().decode(tokens[9:11]) for tokens, _, _ in plain.values())
    requests = _requests(temperature=0.0, stop_strings=strings)
    expected = run_all(_core(trained, 0, load_tokenizer=Letters), requests)
    assert _tokens(run_all(_core(trained, 3, load_tokenizer=Letters), requests)) == _tokens(expected)
    assert max(len(tokens) for tokens, _, _ in expected.values()) <= 11


@pytest.mark.parametrize("new", [1, 2, 3])
def test_short_samples_end_at_their_length(trained, new):
    requests = _requests(new=new, temperature=0.0)
    assert _tokens(run_all(_core(trained, 3), requests)) == _tokens(run_all(_core(trained, 0), requests))


def test_samples_end_at_the_end_of_the_context(trained):
    requests = [make_request(f"r{i}", _prompt(i, n), 100, temperature=0.0) for i, n in enumerate((20, 29, 30, 31, 1))]
    outputs = run_all(_core(trained, 3, context=32), requests)
    assert _tokens(outputs) == _tokens(run_all(_core(trained, 0, context=32), requests))
    assert [len(outputs[f"r{i}"][0]) for i in range(5)] == [12, 3, 2, 1, 31]


# -- interruptions -------------------------------------------------------------------------------------------------


def test_an_aborted_sample_continues_where_it_stopped(trained):
    requests = _requests(temperature=0.0)
    whole = run_all(_core(trained, 0), requests)
    core = _core(trained, 3)
    core.submit(requests)
    for _ in range(6):
        core.step()
    core.abort()
    before = read(core.drain())
    assert any(tokens for tokens, _, _ in before.values())
    rest = []
    for request in requests:
        done = before[request.id][0]
        assert done == whole[request.id][0][: len(done)]
        row, left = [*request.tokens, *done], request.max_new_tokens - len(done)
        rest.append(make_request(request.id, row, left, key=request.key, position=len(done), temperature=0.0))
    after = run_all(core, rest)
    for request in requests:
        assert before[request.id][0] + after[request.id][0] == whole[request.id][0]


@pytest.mark.parametrize("flush", [True, False])
def test_new_weights_during_generation(trained, flush):
    """After a flush every token is sampled from the new weights; without one, generation continues over the old KV."""
    core = _core(trained, 2)
    requests = _requests(lengths=(4, 9, 30), temperature=1.0)
    core.submit(requests)
    for _ in range(6):
        core.step()
    first = read(core.drain())
    decoder = load_decoder(trained)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            core.model.named_views()[name].copy_(parameter.add_(noise * 0.02))
    if flush:
        core.flush_kv()
    core.start(PolicyVersion(0, 1))
    second = run_all(core)
    for request in requests:
        done, (tokens, logprobs, _) = first[request.id][0], second[request.id]
        assert len(done) + len(tokens) == request.max_new_tokens
        continued = make_request("x", [*request.tokens, *done], 1, temperature=1.0)
        exact = full_forward(decoder, continued, tokens)
        assert np.allclose(logprobs, exact, atol=1e-4) == flush


def test_released_memory_includes_the_draft_s_and_is_restored(trained):
    core, plain = _core(trained, 1), _core(trained, 0)
    held = core.kv.nbytes
    # one layer in addition to two, and the hidden states
    assert held == plain.kv.nbytes * 3 // 2 + 4 * CONTEXT * 64 * 4
    request = make_request("a", _prompt(0, 9), 20, temperature=0.0)
    expected = _tokens(run_all(core, [request]))
    assert core.release_kv() == held
    assert core.kv.nbytes == 0
    core.kv.restore()
    assert _tokens(run_all(core, [request])) == expected


# -- the draft -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _drafted_distributions(decoder: Decoder, tokens: list[int], drafted: list[int]) -> torch.Tensor:
    """The draft's distributions after ``tokens`` and after each of ``drafted``, by the training code: [k, V]."""
    row = torch.tensor([*tokens, *drafted])
    layout = PackedLayout.from_lengths([len(row)])
    states = decoder.draft_states(decoder.hidden_states(row, layout), row, layout, len(drafted), detach=True)
    last = len(tokens) - 2  # the first draft is made at the position before the last token
    return torch.stack([F.linear(s_TM[last + i], decoder.lm_head.weight).softmax(-1) for i, s_TM in enumerate(states)])


def _recorded(core, monkeypatch) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """Records of each sequence's verifications: preceding tokens, drafted tokens, the draft's distributions."""
    seen = []

    def spy(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ):
        for sequence in core._scheduler.decoding():
            slot = sequence.slot
            seen.append((list(sequence.tokens), drafted_Nk[slot].tolist(), draft_NkV[slot]))
        return judge(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ)

    monkeypatch.setattr(speculation, "judge", spy)
    return seen


def _expect_exact_drafts(decoder, seen):
    assert len(seen) > 20
    for tokens, drafted, draft_kV in seen:
        if len(tokens) > 1:
            exact = _drafted_distributions(decoder, tokens, drafted)
            torch.testing.assert_close(draft_kV, exact, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 3])
def test_drafts_equal_those_of_the_training_code(trained, monkeypatch, k):
    """Across chunk borders, shared prompts, reused slots and rejections."""
    core = _core(trained, k)
    seen = _recorded(core, monkeypatch)
    group = [make_request(f"g{i}", _prompt(9, 37), 4 + 6 * i, key=50 + i, group="g", shared=37) for i in range(5)]
    run_all(core, [*_requests(new=8), *group])
    _expect_exact_drafts(load_decoder(trained), seen)


def test_drafts_catch_up_after_steps_without_speculation_and_after_a_flush(trained, monkeypatch):
    core = _core(trained, 2)
    seen = _recorded(core, monkeypatch)
    drafter, widths = core._speculator._drafter, set()
    propose = drafter.propose

    def noted(places_NW, *rest):
        widths.add(places_NW.shape[1])
        propose(places_NW, *rest)

    monkeypatch.setattr(drafter, "propose", noted)
    core.submit([make_request(f"r{i}", _prompt(i, n), 110, key=i) for i, n in enumerate((3, 8, 14))])
    ks = itertools.chain([2] * 4, [0] * 5, [2] * 3, [0] * 75, itertools.repeat(2))
    core._speculator.guard.choose = lambda rows: next(ks)
    for step in itertools.count():
        if not core.active:
            break
        core.step()
        if step == 10:
            core.flush_kv()
    _expect_exact_drafts(load_decoder(trained), seen)
    assert max(widths) == 3  # places far behind are computed before: a GPU records what drafts


# -- the distribution ----------------------------------------------------------------------------------------------

SMALL, NEW = 6, 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A vocabulary of six, and a draft that is sometimes right."""
    decoder = _decoder(seed=11, std=0.17, vocab_size=SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return _save(tmp_path_factory.mktemp("tiny"), decoder)


def _differs_beyond_chance(path, draws, k=2, **sampling) -> bool:
    """True if tokens drawn after a fixed prompt differ from their exact joint distribution (chi-square, 0.1 %), or
    the mean of their behaviour logprobs from its expectation (four standard errors)."""
    prompt = [1, 4, 2, 2, 5]
    requests = [
        make_request(str(i), prompt, NEW, key=i, group="g", shared=len(prompt), **sampling) for i in range(draws)
    ]
    outputs = run_all(_core(path, k, slots=400, context=16), requests)
    seen = np.zeros((SMALL,) * NEW)
    logprobs = np.array([sum(drawn) for _, drawn, _ in outputs.values()])
    for tokens, _, _ in outputs.values():
        seen[tuple(tokens)] += 1
    decoder, columns = load_decoder(path), SamplingColumns.of([requests[0].sampling])
    expected, logprob = np.full(seen.shape, float(draws)), np.zeros(seen.shape)
    for drawn in range(NEW):
        for before in itertools.product(range(SMALL), repeat=drawn):
            row = torch.tensor([*prompt, *before])
            with torch.no_grad():
                logits = decoder.logits(row, PackedLayout.from_lengths([len(row)]))[-1:]
            full, p = (
                d[0].double().numpy().reshape(-1, *[1] * (NEW - drawn - 1)) for d in distributions(logits, columns)
            )
            expected[before] *= p
            logprob[before] += np.log(full)
    if seen[expected == 0].any():
        return True
    off = logprobs.mean() - (expected * logprob).sum() / draws
    if abs(off) > 4 * logprobs.std() / np.sqrt(draws):
        return True
    often = expected >= 8
    seen_bins, bins = [*seen[often], seen[~often].sum()], [*expected[often], expected[~often].sum()]
    if bins[-1] < 8:
        seen_bins, bins = seen_bins[:-1], bins[:-1]
    assert len(bins) > 10
    chi2 = ((np.array(seen_bins) - bins) ** 2 / bins).sum()
    free = len(bins) - 1
    return chi2 > free * (1 - 2 / (9 * free) + 3.09 * np.sqrt(2 / (9 * free))) ** 3  # Wilson and Hilferty


FILTERED = {"temperature": 0.7, "top_p": 0.9}


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "sampling",
    [pytest.param({"temperature": 1.0}, id="plain", marks=pytest.mark.slow), pytest.param(FILTERED, id="filtered")],
)
def test_fifty_thousand_tokens_follow_the_target_s_distribution(tiny, sampling, k):
    assert not _differs_beyond_chance(tiny, 50_000 // NEW, k, **sampling)


def _accepts_whatever_is_possible(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ):
    return judge(target_NJV, draft_NkV, drafted_Nk, torch.zeros_like(accept_Nk), redraw_NJ)


def _accepts_without_the_ratio(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ):
    q_Nk = draft_NkV.gather(2, drafted_Nk.unsqueeze(2)).squeeze(2)
    return judge(target_NJV, draft_NkV, drafted_Nk, accept_Nk / q_Nk, redraw_NJ)  # u < p


def _redraws_from_the_target(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ):
    accepted_N, _ = judge(target_NJV, draft_NkV, drafted_Nk, accept_Nk, redraw_NJ)
    p_NV = target_NJV[torch.arange(len(accepted_N)), accepted_N]
    return accepted_N, inverse_cdf(p_NV, redraw_NJ.gather(1, accepted_N.unsqueeze(1))).squeeze(1)


@pytest.mark.parametrize(
    "bug",
    [_accepts_whatever_is_possible, _accepts_without_the_ratio, _redraws_from_the_target],
    ids=lambda f: f.__name__,
)
def test_the_distribution_test_detects_a_wrong_rule(tiny, monkeypatch, bug):
    monkeypatch.setattr(speculation, "judge", bug)
    assert _differs_beyond_chance(tiny, 4000, temperature=1.0)


def test_the_distribution_test_detects_a_target_without_its_filters(tiny, monkeypatch):
    def unfiltered(logits, columns):
        return distributions(logits, columns._replace(filters=None))

    monkeypatch.setattr(speculation, "distributions", unfiltered)
    assert _differs_beyond_chance(tiny, 4000, **FILTERED)


def test_a_nan_draft_costs_only_speed(trained):
    core = _core(trained, 2)
    core.model.named_views()["model.mtp_layers.0.final_layernorm.weight"].fill_(torch.nan)
    requests = _requests(lengths=(4, 9), temperature=1.0)
    outputs = run_all(core, requests)
    assert all(finish is FinishReason.LENGTH for _, _, finish in outputs.values())
    assert _figures(core)["rollout/spec_accept_rate"] == 0


def test_diverged_weights_end_requests_with_an_error(trained):
    core = _core(trained, 2)
    core.model.named_views()["model.norm.weight"].fill_(torch.nan)
    outputs = run_all(core, _requests(lengths=(4,)))
    assert [finish for _, _, finish in outputs.values()] == [FinishReason.ERROR]


# -- refusals and figures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "k", "options", "says"),
    [
        ({"num_nextn_predict_layers": 0}, 1, {}, "no MTP layers"),
        ({}, 31, {"context": 32}, "room for 1 to 30"),
        ({}, 1, {"deterministic": True}, "deterministic mode does not speculate"),
    ],
)
def test_unsupported_speculation_is_refused(tmp_path, sizes, k, options, says):
    path = _save(tmp_path, _decoder(seed=0, **sizes))
    with pytest.raises(EngineError, match=says):
        _core(path, k, **options)


def test_metrics_are_ratios_of_sums_that_agree_with_the_emitted_tokens(trained):
    recorder = Recorder("replica/0")
    core = _core(trained, 3, recorder=recorder)
    outputs = run_all(core, _requests(temperature=0.0))
    counters = recorder.drain().counters
    values = engine_metrics(counters)
    assert counters["rollout/spec/tokens"] == counters["rollout/tokens"] == sum(len(t) for t, _, _ in outputs.values())
    rates = [values[f"rollout/spec_accept_rate_{place}"] for place in (1, 2, 3)]
    assert rates == sorted(rates, reverse=True)
    assert rates[2] < values["rollout/spec_accept_rate"] < rates[0]
    verifications, tokens = counters["rollout/spec/verifications"], counters["rollout/spec/tokens"]
    assert values["rollout/spec_accept_length"] == tokens / verifications
    accepted = sum(counters[f"rollout/spec/accepted/{place}"] for place in (1, 2, 3))
    # each verification emits one token more than it accepts, unless a sample ends with an accepted one
    assert 0 <= verifications + accepted - tokens <= len(outputs)
    assert engine_metrics({"rollout/tokens": 5.0}) == {}


def test_tokens_accepted_after_a_sample_s_end_are_not_counted(trained, monkeypatch):
    monkeypatch.setattr(speculation, "judge", _accepts_whatever_is_possible)
    recorder = Recorder("replica/0")
    core = _core(trained, 4, recorder=recorder)
    gained, took = [], core._speculator.took
    core._speculator.took = lambda k, rows, more, seconds: gained.extend(more) or took(k, rows, more, seconds)
    outputs = run_all(core, _requests(lengths=[3] * 40, temperature=1.0, stop_token_ids=tuple(range(0, VOCABULARY, 5))))
    counters = recorder.drain().counters
    tokens = sum(len(t) for t, _, _ in outputs.values())
    assert tokens < 8 * len(outputs)  # they end early
    drafted, accepted = (
        [counters[f"rollout/spec/{what}/{place}"] for place in (1, 2, 3, 4)] for what in ("drafted", "accepted")
    )
    assert drafted == accepted  # every drafted token is accepted
    # each verification adds one token to the accepted ones, unless the sample ended with one of them
    assert 0 < counters["rollout/spec/verifications"] + sum(accepted) - tokens <= len(outputs)
    assert len(gained) == counters["rollout/spec/verifications"]
    assert len(gained) + sum(gained) == tokens  # the guard's figures


def test_a_thousand_drafted_tokens_with_none_accepted_raise_an_alarm(random, caplog):
    recorder = Recorder("replica/0")
    core = _core(random, 3, slots=8, recorder=recorder)
    count = core._speculator.count

    def alarm() -> float:
        for _ in range(ZERO_ACCEPTANCE_TOKENS // 24 + 1):
            count(3, [3] * 8, [0] * 8, 8)
        core.drain()
        return engine_metrics(recorder.drain().counters)["rollout/spec_zero_acceptance"]

    count(3, [3] * 8, [1] + [0] * 7, 9)
    assert alarm() == 0.0
    assert alarm() == 1.0
    assert caplog.text.count("replica/0: none of the last 1008 drafted tokens was accepted") == 1
