"""Grammars and logit biases in the native engine's core: drafting, interruptions, and what they cost others."""

import asyncio
import re
import threading

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from asyncrl.config.schema import EngineConfig
from asyncrl.models.config import DecoderConfig
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.rollouter.engines.base import Grammar
from asyncrl.rollouter.engines.native import core as core_module
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.engines.native.grammar import GrammarError, Grammars
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import make_request, read, run_all

DIGITS = Grammar("regex", "[0-9]{12}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


@pytest.fixture
def make(checkpoint, tokenizer):
    def make(drafted=0, **options) -> Core:
        model = NativeModel(DecoderConfig.load(checkpoint), 128, torch.float32)
        model.load(checkpoint)
        speculation = Speculation(drafted, guard=False) if drafted else None
        options = {"slots": 4, "load_tokenizer": lambda: tokenizer, "speculation": speculation} | options
        core = Core(model, context_tokens=128, prefill_chunk_tokens=16, **options)
        core.start(PolicyVersion(0, 0))
        return core

    return make


def wanted(tokenizer, count=3, grammar=DIGITS, **options):
    options = {"stop_token_ids": (tokenizer.eos_token_id, 1), "grammar": grammar} | options
    return [make_request(f"g{i}", [5, 6, 7, i], 40, key=i, **options) for i in range(count)]


def steps(core, count):
    for _ in range(count):
        core.step()


def test_steps_with_a_grammar_or_a_bias_draft_nothing_and_others_do(make, tokenizer, monkeypatch):
    core = make(drafted=2)
    verified = []
    step = core._speculator.step
    monkeypatch.setattr(core._speculator, "step", lambda *args: verified.append(core.running) or step(*args))
    expected = run_all(make(), wanted(tokenizer))
    free = make_request("free", [5, 6, 7], 60, temperature=0.0)
    found = run_all(core, [*wanted(tokenizer), free])
    assert {id: found[id][0] for id in expected} == {id: tokens for id, (tokens, *_) in expected.items()}
    assert found["free"][0] == run_all(make(), [free])["free"][0]
    assert verified
    assert set(verified) == {1}  # only while the one without a grammar is alone
    verified.clear()
    biased = make_request("biased", [5, 6, 7], 20, logit_bias=((9, 100.0),))
    assert run_all(core, [biased])["biased"][0] == [9] * 20
    assert not verified


@pytest.mark.parametrize("drafted", [0, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_answer_is_the_same_if_its_kv_is_computed_again(make, tokenizer, drafted, deterministic):
    if drafted and deterministic:
        pytest.skip("the two exclude each other")
    options = {"drafted": drafted, "deterministic": deterministic}
    expected = run_all(make(**options), wanted(tokenizer))
    core = make(**options)
    core.submit(wanted(tokenizer))
    steps(core, 6)
    core.flush_kv()
    while core.active:
        core.step()
    found = read(core.drain())
    for id, (tokens, logprobs, finish) in expected.items():
        assert (found[id][0], found[id][2]) == (tokens, finish)
        np.testing.assert_allclose(found[id][1], logprobs, atol=1e-5)


def test_an_aborted_request_that_starts_again_gives_the_answer_of_one_that_was_not(make, tokenizer):
    expected = run_all(make(), wanted(tokenizer))
    core = make()
    core.submit(wanted(tokenizer))
    steps(core, 5)
    core.abort()
    parts = read(core.drain())
    again = run_all(core, wanted(tokenizer))
    for id, (tokens, _, finish) in expected.items():
        assert parts[id][2] is FinishReason.ABORT
        assert 0 < len(parts[id][0]) < len(tokens)
        assert (again[id][0], again[id][2]) == (tokens, finish)


def test_requests_of_one_grammar_do_not_share_their_state(make, tokenizer):
    core = make(slots=2)  # some wait until others have ended
    for tokens, _, finish in run_all(core, wanted(tokenizer, 6)).values():
        assert finish is FinishReason.STOP
        assert tokens[-1] in (tokenizer.eos_token_id, 1)
        assert re.fullmatch("[0-9]{12}", tokenizer.decode(tokens[:-1]))


def test_both_stop_tokens_are_drawn_and_none_that_the_request_does_not_name(make, tokenizer):
    ends = set()
    for tokens, *_ in run_all(make(), wanted(tokenizer, 24, Grammar("regex", "[ab]"))).values():
        ends.add(tokens[-1])
    assert ends == {tokenizer.eos_token_id, 1}
    other = wanted(tokenizer, 4, Grammar("regex", "[ab]"), stop_token_ids=(0,))
    assert {tokens[-1] for tokens, *_ in run_all(make(), other).values()} == {0}


def test_a_stop_token_that_is_text_is_not_drawn_before_the_text_matches(make, tokenizer):
    digit = tokenizer.encode("7", add_special_tokens=False)[0]
    requests = wanted(tokenizer, 8, Grammar("regex", "[0-9]{6}"), stop_token_ids=(digit,))
    for tokens, _, finish in run_all(make(), requests).values():
        assert finish is FinishReason.STOP
        assert tokens.index(digit) == len(tokens) - 1 == 6


def test_a_limit_may_end_an_answer_before_it_matches(make, tokenizer):
    (request,) = wanted(tokenizer, 1)
    (tokens, _, finish) = run_all(make(), [request._replace(max_new_tokens=5)])["g0"]
    assert finish is FinishReason.LENGTH
    assert re.fullmatch("[0-9]{5}", tokenizer.decode(tokens))


def test_a_grammar_that_no_token_continues_ends_its_request_and_the_others_go_on(make, tokenizer, monkeypatch):
    core = make()
    requests = wanted(tokenizer)
    core.submit(requests)
    steps(core, 4)
    broken = core._scheduler.by_id["g1"]

    def fill(words):
        raise GrammarError("nothing follows")

    monkeypatch.setattr(broken.matcher, "fill", fill)
    while core.active:
        core.step()
    batch = core.drain()
    found = read(batch)
    assert found["g1"][2] is FinishReason.ERROR
    assert batch.errors["g1"] == "nothing follows"
    assert {found[id][2] for id in ("g0", "g2")} == {FinishReason.STOP}
    expected = run_all(make(), requests)
    assert found["g0"][0] == expected["g0"][0]
    assert found["g2"][0] == expected["g2"][0]


def test_stop_tokens_outside_the_vocabulary_end_the_request_with_the_reason(make, tokenizer):
    core = make()
    core.submit(wanted(tokenizer, 1, Grammar("regex", "a"), stop_token_ids=(10**6,)))
    while core.active:
        core.step()
    batch = core.drain()
    assert read(batch)["g0"][2] is FinishReason.ERROR
    assert "no token of the vocabulary" in batch.errors["g0"]


def test_without_grammars_llguidance_reads_no_tokenizer_and_no_mask_is_made(make, monkeypatch):
    def never(*args, **options):
        raise AssertionError

    monkeypatch.setattr(Grammars, "_tokens", property(never))
    monkeypatch.setattr(core_module, "TokenMasks", never)
    assert len(run_all(make(), [make_request("free", [5, 6, 7], 8)])["free"][0]) == 8


async def test_grammars_are_compiled_beside_generation(checkpoint, tokenizer, monkeypatch):
    """A large one takes up to a second, and one that is refused is not compiled again for each sample."""
    compile_one, threads = Grammars._compile, []

    def noted(self, grammar):
        threads.append(threading.current_thread().name)
        return compile_one(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", noted)
    engine = NativeEngine(checkpoint, EngineConfig(slots=2, max_context_tokens=128), load_tokenizer=lambda: tokenizer)
    await engine.resume(PolicyVersion(0, 0))
    refused = Grammar("regex", "(?=a)b")
    for requests in (wanted(tokenizer, 1), wanted(tokenizer, 3, refused)[1:2], wanted(tokenizer, 3, refused)[2:]):
        await engine.submit(requests)
    finish, errors = {}, {}
    while len(finish) < 3:
        batch = await asyncio.wait_for(engine.events(), 60)
        finish |= {id: end for id, end in zip(batch.ids, batch.finish, strict=True) if end is not None}
        errors |= batch.errors
    await engine.close()
    assert finish == {"g0": FinishReason.STOP, "g1": FinishReason.ERROR, "g2": FinishReason.ERROR}
    assert all("is refused" in errors[id] for id in ("g1", "g2"))
    assert len(threads) == 2
    assert "native-engine" not in threads


def test_a_core_without_a_tokenizer_refuses_grammars(make, tokenizer):
    core = make(load_tokenizer=None)
    core.submit(wanted(tokenizer, 1))
    assert "without a tokenizer" in core.drain().errors["g0"]


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(?=a)b"),
        Grammar("json_schema", '{"type": "wrong"}'),
        Grammar("json_schema", "[]"),
        Grammar("gbnf", "start: /lark/"),
        Grammar("gbnf", 'root ::= "a'),
    ],
)
def test_a_grammar_that_is_refused_is_named(tokenizer, grammar):
    with pytest.raises(GrammarError, match=rf"^the grammar \({grammar.kind}\) is refused: ."):
        Grammars(tokenizer, 320).matcher(grammar, (tokenizer.eos_token_id,))


@pytest.mark.parametrize("bias", [(-1, 1.0), (320, 1.0), (3, float("inf")), (3, float("nan"))])
def test_a_bias_that_cannot_be_is_refused(make, bias):
    core = make()
    core.submit([make_request("g", [5], 4, logit_bias=(bias,))])
    assert "logit_bias" in core.drain().errors["g"]
