"""Engine contract: tests that every engine passes, on a real replica on the CPU.

A test module provides a fixture ``replica`` (see `tests.support.engine_replica`) and takes the tests by ``import *``.
They run in order on that one replica; each syncs the weights that it needs.

``abort`` and ``wait`` with ``unload`` are required, because the other tests sync with them. Other (pause, KV) pairs are
optional and declared in `EngineSpec.pause_kv`, as are grammars and logit biases in ``constrains``. Everything else here
is required. Adapters, speculation, staging ``full`` and deterministic decoding are not part of the contract: an engine
that declares them has its own tests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re

import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import ManifestError
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.rollouter.engines.base import ENGINES, EngineError, Grammar, Scheduling
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.engine_replica import add, request

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
LONG = 800  # tokens; several times what the fastest engine generates between two event batches


@pytest.fixture(autouse=True)
def events_at_once(monkeypatch):
    """Events are reported as they come: a test interrupts a request after a few tokens, however fast the machine."""
    for name in (
        "streaming._ENDS_EVERY_S",
        "streaming._WANTED_EVERY_S",
        "native.engine._ENDS_EVERY_S",
        "native.engine._WANTED_EVERY_S",
    ):
        monkeypatch.setattr(f"asyncrl.rollouter.engines.{name}", 0.0)
    monkeypatch.setattr(Scheduling.__init__, "__defaults__", (None, False, 0.0))


@pytest.fixture(scope="module")
def long():
    """Tokens of a request that is still running when the next event batch arrives. A module with a slow engine
    overrides it, with 90 or more."""
    return LONG


@pytest.fixture(scope="module")
def caches_prefixes():
    """A module with an engine that keeps no KV of finished requests overrides it."""
    return True


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


@pytest.fixture(scope="module")
def initial(checkpoint):
    return read_tensors(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Qwen2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def changed(tensors, seed, scale=0.05):
    generator = torch.Generator().manual_seed(seed)
    return {name: t + scale * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def error_of(reference, weights, prompt, answer, temperature=1.0):
    """Largest difference between an answer's logprobs and Hugging Face's under these weights."""
    reference.load_state_dict({name: t for name, t in weights.items() if "mtp" not in name})
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, -1)
    found = logprobs[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
    return (found - torch.tensor(answer.logprobs)).abs().max().item()


def perfect_draft(tensors, sharpness=1.0):
    """Weights whose residual branches add nothing and whose MTP layer passes the token's embedding through: draft and
    target both predict from the last token alone."""
    generator = torch.Generator().manual_seed(3)
    made = {name: t.clone() for name, t in tensors.items()}
    for name, t in made.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            t.zero_()
        elif "norm" in name:
            t.fill_(1.0)
    hidden = made["model.norm.weight"].numel()
    eye = torch.eye(hidden)
    made["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros_like(eye), eye], 1)
    for name, scale in (("model.embed_tokens.weight", 1.0), ("lm_head.weight", 0.2 * sharpness)):
        if name in made:
            made[name] = scale * torch.randn(made[name].shape, generator=generator)
    return made


async def rounding(replica, config, initial):
    """Mean difference, in nats, between logprobs of a bfloat16 model and exact ones of its last hidden states, without
    and with model.float32_head. ``replica``: makes one."""
    weights, found = {name: t.bfloat16() for name, t in perfect_draft(initial, sharpness=6.0).items()}, {}
    for exact in (False, True):
        config.rollout.engine.dtype, config.model.float32_head = "bfloat16", exact
        made = await replica.start(config)
        await made.sync(weights)
        answer = (await made.generate([request("a", PROMPT, 24)]))["a"]
        await made.close()
        embed_TM = weights["model.embed_tokens.weight"][torch.tensor([PROMPT[-1], *answer.tokens[:-1]])].float()
        hidden_TM = (embed_TM / (embed_TM.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
        exact_TV = torch.log_softmax(hidden_TM.double() @ weights["lm_head.weight"].double().t(), -1)
        expected = exact_TV[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
        found[exact] = (expected - torch.tensor(answer.logprobs)).abs().mean().item()
    return found


def one_after_the_other(tensors, tokens):
    """Weights under which greedy decoding cycles through ``tokens``: the head maps each token to the next one, and the
    last to the first."""
    made = perfect_draft(tensors)
    embeddings, head = made["model.embed_tokens.weight"], torch.zeros_like(made["lm_head.weight"])
    for token, following in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        head[following] = embeddings[token]
    return made | {"lm_head.weight": head}


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


async def test_logprobs_equal_hugging_face_s_before_and_after_syncs(replica, reference, initial):
    for seed in range(12):
        weights = initial if seed == 0 else changed(initial, seed)
        report = await replica.sync(weights)
        assert not report.evicted
        temperature = 0.7 if seed % 2 else 1.0
        requests = [request(f"{seed}/{i}", PROMPT, 12, temperature=temperature) for i in range(3)]
        for answer in (await replica.generate(requests)).values():
            assert answer.finish is FinishReason.LENGTH
            assert len(answer.tokens) == 12
            assert set(answer.versions) == {replica.version}
            assert error_of(reference, weights, PROMPT, answer, temperature) < 1e-4


async def test_greedy_follows_the_synced_weights_and_not_a_stale_prefix(replica, reference, initial):
    answers = []
    for seed in (21, 22):
        weights = changed(initial, seed)
        await replica.sync(weights)
        (answer,) = (await replica.generate([request(f"{seed}", PROMPT * 8, 16, temperature=0.0)])).values()
        reference.load_state_dict({name: t for name, t in weights.items() if "mtp" not in name})
        ids = torch.tensor([PROMPT * 8])
        expected = reference.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, len(PROMPT) * 8 :]
        assert answer.tokens == expected.tolist()
        answers.append(answer.tokens)
    assert answers[0] != answers[1]


async def test_a_next_turn_does_not_compute_its_prefix_again(replica, reference, initial, caches_prefixes):
    """Until a sync. An engine that caches whole blocks computes up to a block again."""
    if not caches_prefixes:
        pytest.skip("the engine caches none")
    await replica.sync(initial)
    prompt = PROMPT * 85
    (answer,) = (await replica.generate([request("turn/1", prompt, 12)])).values()
    turn = [*prompt, *answer.tokens, *PROMPT]
    for name, share in (("turn/2", 0.8), ("turn/3", 0.0)):
        replica.recorder.drain()
        (after,) = (await replica.generate([request(name, turn, 12)])).values()
        counters = replica.recorder.drain().counters
        assert engine_metrics(counters)["rollout/prefix_reuse"] >= share
        assert share or counters["rollout/prompt/reused"] == 0
        assert error_of(reference, initial, turn, after) < 1e-4
        await replica.sync(initial)


async def test_a_resumed_request_ends_at_its_stop_tokens_and_strings(replica, tokenizer, initial):
    """Including a string that is a special token, and one whose text begins before the cut."""
    special = tokenizer.eos_token_id
    letters = [i for i in range(len(tokenizer)) if i not in {*PROMPT, special} and tokenizer.decode([i]).isalpha()]
    answer = [*letters[:12], special, *letters[12:20]]
    await replica.sync(one_after_the_other(initial, [PROMPT[-1], *answer]))
    split = tokenizer.decode(answer[9:12])
    stops = [
        ({"stop_token_ids": (answer[15], answer[12])}, 13),
        ({"stop_token_ids": (answer[15],)}, 16),
        ({"stop_strings": ("never there", tokenizer.decode([special]))}, 13),
        ({"stop_strings": (tokenizer.decode([special]) + tokenizer.decode([answer[13]]), split + "no")}, 14),
        ({"stop_strings": (split,)}, 12),
        ({"stop_strings": (split,), "stop_token_ids": (answer[10],)}, 11),
        ({}, 21),
    ]
    requests, expected = [], {}
    for i, (sampling, end) in enumerate(stops):
        for cut in range(end):
            rest = request(f"{i}/{cut}", PROMPT + answer[:cut], 21 - cut, temperature=0.0, **sampling)
            requests.append(rest._replace(position=cut, resumed=cut))
            expected[rest.id] = (answer[cut:end], FinishReason.STOP if sampling else FinishReason.LENGTH)
    answers = await replica.generate(requests)
    assert {id: (a.tokens, a.finish) for id, a in answers.items()} == expected
    assert all(len(a.logprobs) == len(a.tokens) for a in answers.values())


async def test_a_request_aborted_at_any_moment_resumes_and_ends_at_its_stop_token(replica, tokenizer, initial, long):
    answer = [i for i in range(len(tokenizer)) if i not in PROMPT][:90]
    await replica.sync(one_after_the_other(initial, [PROMPT[-1], *answer]))
    stop = answer[59]
    for moment in range(30):
        tokens: list[int] = []
        for part in itertools.count():
            rest = request(f"{moment}/{part}", PROMPT + tokens, long, temperature=0.0, stop_token_ids=(stop,))
            await replica.engine.submit([rest._replace(position=len(tokens), resumed=len(tokens))])
            if part == 0:
                await asyncio.sleep(0.002 * moment)  # from before its first step to after its last
                await replica.engine.abort([rest.id])
            ended = (await replica.collect({rest.id}))[rest.id]
            tokens += ended.tokens
            assert tokens == answer[: len(tokens)]
            assert ended.finish is (FinishReason.STOP if tokens[-1:] == [stop] else FinishReason.ABORT)
            if ended.finish is FinishReason.STOP:
                break
        assert tokens == answer[:60]


async def test_a_request_that_can_never_run_is_answered_with_the_reason(replica, initial):
    await replica.sync(initial)
    answers = await replica.generate([request("long", [1] * 1024, 4), request("alien", [10**6], 4)])
    assert answers["long"].finish is FinishReason.ERROR
    assert "context holds 1024" in answers["long"].error
    assert "vocabulary" in answers["alien"].error


@pytest.fixture
def constrains(replica):
    if not ENGINES.find(replica.config.rollout.engine.name).constrains:
        pytest.skip("the engine serves neither grammars nor logit biases")


def matching(replica, answer, stops):
    """The answer's text without its stop token."""
    assert answer.finish is FinishReason.STOP, answer.error
    assert answer.tokens[-1] in stops
    assert not set(answer.tokens[:-1]) & set(stops)
    assert len(answer.logprobs) == len(answer.tokens)
    assert all(logprob <= 0 for logprob in answer.logprobs)
    return AutoTokenizer.from_pretrained(replica.config.model.path).decode(answer.tokens[:-1])


@pytest.mark.usefixtures("constrains")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_an_answer_matches_its_grammar_and_ends_at_a_stop_token(replica, tokenizer, initial, temperature):
    stops = (tokenizer.eos_token_id, 0)
    grammars = {
        "regex": (Grammar("regex", "[0-9]{3}"), "[0-9]{3}"),
        "choice": (Grammar("regex", "yes|no"), "yes|no"),
        "gbnf": (Grammar("gbnf", 'root ::= pair pair? "!"\npair ::= [a-c] "-" [x-z]'), "([a-c]-[x-z]){1,2}!"),
    }
    await replica.sync(initial)
    options = {"temperature": temperature, "stop_token_ids": stops}
    requests = [
        request(f"{name}/{i}", [*PROMPT, i + 1], 40, grammar=grammar, **options)._replace(key=i)
        for name, (grammar, _) in grammars.items()
        for i in range(3)
    ]
    free = request("free", PROMPT, 20, temperature=0.0)
    answers = await replica.generate([*requests, free])
    for wanted in requests:
        text = matching(replica, answers[wanted.id], stops)
        assert re.fullmatch(grammars[wanted.group][1], text), (wanted.id, text)
    assert answers["free"].tokens == (await replica.generate([free]))["free"].tokens


@pytest.mark.usefixtures("constrains")
async def test_an_answer_matches_its_json_schema(replica, tokenizer, initial):
    stops = (tokenizer.eos_token_id,)
    schema = {
        "type": "object",
        "properties": {"sure": {"type": "boolean"}, "kind": {"enum": ["one", "two"]}},
        "required": ["sure", "kind"],
        "additionalProperties": False,
    }
    # random weights would write spaces for long
    spaces = tuple((i, -100.0) for i in range(len(tokenizer)) if tokenizer.decode([i]).isspace())
    grammar = Grammar("json_schema", json.dumps(schema))
    await replica.sync(initial)
    options = {"stop_token_ids": stops, "logit_bias": spaces, "grammar": grammar}
    answers = await replica.generate([request(f"{i}", [*PROMPT, i + 1], 100, **options) for i in range(4)])
    for answer in answers.values():
        found = json.loads(matching(replica, answer, stops))
        assert found.keys() == {"sure", "kind"}
        assert isinstance(found["sure"], bool)
        assert found["kind"] in ("one", "two")


@pytest.mark.usefixtures("constrains")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_bias_forces_and_forbids_tokens(replica, initial, temperature):
    await replica.sync(initial)
    free = (await replica.generate([request("free", PROMPT, 8, temperature=temperature)]))["free"].tokens
    forbidden = tuple((token, -100.0) for token in sorted(set(free)))
    biases = {"forced": ((42, 100.0),), "forbidden": forbidden}
    requests = [request(id, PROMPT, 8, temperature=temperature, logit_bias=bias) for id, bias in biases.items()]
    answers = await replica.generate(requests)
    assert answers["forced"].tokens == [42] * 8
    assert max(map(abs, answers["forced"].logprobs)) < 1e-4
    assert not set(answers["forbidden"].tokens) & set(free)


@pytest.mark.usefixtures("constrains")
async def test_a_malformed_grammar_fails_its_own_request_only(replica, tokenizer, initial):
    stops, good = (tokenizer.eos_token_id,), Grammar("regex", "[0-9]{3}")
    await replica.sync(initial)
    bad = {
        "regex": Grammar("regex", "[0-9"),
        "schema": Grammar("json_schema", '{"type": '),
        "gbnf": Grammar("gbnf", "root ::= missing"),
        "empty": Grammar("regex", ""),
    }
    requests = [request(id, PROMPT, 8, grammar=grammar, stop_token_ids=stops) for id, grammar in bad.items()]
    requests += [
        request("endless", PROMPT, 8, grammar=good),
        request("cut", PROMPT, 8, grammar=good, stop_token_ids=stops)._replace(resumed=1),
        request("good", PROMPT, 8, grammar=good, stop_token_ids=stops),
    ]
    answers = await replica.generate(requests)
    assert re.fullmatch("[0-9]{3}", matching(replica, answers.pop("good"), stops))
    for id, answer in answers.items():
        assert answer.finish is FinishReason.ERROR, id
        assert answer.error
    assert "no stop token" in answers["endless"].error
    assert "cannot be resumed" in answers["cut"].error
    again = (await replica.generate([requests[-1]]))["good"]
    assert re.fullmatch("[0-9]{3}", matching(replica, again, stops))


@pytest.mark.usefixtures("constrains")
@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_a_kept_request_stays_within_its_grammar(replica, tokenizer, initial, kv, long):
    if ("keep", kv) not in ENGINES.find(replica.config.rollout.engine.name).pause_kv:
        pytest.skip("the engine does not offer it")
    stops, digits = (tokenizer.eos_token_id,), f"[0-9]{{{long}}}"
    await replica.sync(initial)
    wanted = request("kept", PROMPT, long + 1, grammar=Grammar("regex", digits), stop_token_ids=stops)
    await replica.engine.submit([wanted])
    answers = {}
    await until(replica, answers, lambda: "kept" in answers and len(answers["kept"].tokens) > 5)
    report = await replica.sync(changed(initial, 42), pause="keep", kv=kv)
    assert report.held_requests == 1
    answer = (await replica.collect({"kept"}, answers))["kept"]
    assert answer.versions[0] != answer.versions[-1]
    assert re.fullmatch(digits, matching(replica, answer, stops))


async def until(replica, answers, condition):
    async with asyncio.timeout(60):
        while not condition():
            add(answers, await replica.engine.events())


async def test_an_aborted_request_keeps_its_tokens(replica, reference, initial, long):
    await replica.sync(initial)
    await replica.engine.submit([request("cut", PROMPT, long)])
    answers = {}
    await until(replica, answers, lambda: "cut" in answers and len(answers["cut"].tokens) > 5)
    await replica.engine.abort(["cut", "unknown"])
    answer = (await replica.collect({"cut"}, answers))["cut"]
    assert answer.finish is FinishReason.ABORT
    assert 5 < len(answer.tokens) < long
    assert error_of(reference, initial, PROMPT, answer) < 1e-4


async def test_a_sync_aborts_requests_and_keeps_their_tokens(replica, initial, long):
    await replica.sync(initial)
    await replica.engine.submit([request("cut", PROMPT, long)])
    answers = {}
    await until(replica, answers, lambda: "cut" in answers and len(answers["cut"].tokens) > 5)
    before = replica.version
    report = await replica.sync(changed(initial, 31))
    answer = (await replica.collect({"cut"}, answers))["cut"]
    assert report.held_requests == 1
    assert answer.finish is FinishReason.ABORT
    assert set(answer.versions) == {before}


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_kept_samples_continue_under_the_new_weights(replica, reference, initial, kv, long):
    if ("keep", kv) not in ENGINES.find(replica.config.rollout.engine.name).pause_kv:
        pytest.skip("the engine does not offer it")
    await replica.sync(initial)
    await replica.engine.submit([request("kept", PROMPT, long)])
    answers = {}
    await until(replica, answers, lambda: "kept" in answers and len(answers["kept"].tokens) > 5)
    before, weights = replica.version, changed(initial, 41)
    report = await replica.sync(weights, pause="keep", kv=kv)
    assert report.held_requests == 1
    answer = (await replica.collect({"kept"}, answers))["kept"]
    assert answer.finish is FinishReason.LENGTH
    assert len(answer.tokens) == long
    switch = answer.versions.index(replica.version)
    assert answer.versions == [before] * switch + [replica.version] * (long - switch)
    assert switch > 5
    # over kept KV no single version's logprobs match (hence mixed_kv); recomputed, the new version's do
    assert answer.mixed_kv == [kv == "keep" and i >= switch for i in range(long)]
    rest = type(answer)(answer.tokens[switch:], answer.logprobs[switch:])
    error = error_of(reference, weights, PROMPT + answer.tokens[:switch], rest)
    assert error > 1e-3 if kv == "keep" else error < 1e-4


async def test_waiting_lets_samples_finish_and_holds_later_ones_back(replica, initial):
    await replica.sync(initial)
    await replica.engine.submit([request("first", PROMPT, 120)])
    syncing = asyncio.create_task(replica.sync(changed(initial, 51), pause="wait"))
    while not replica.session._paused and not syncing.done():  # then the engine was asked
        await asyncio.sleep(0.001)
    await replica.engine.submit([request("later", PROMPT, 4)])
    answers = await replica.collect({"first", "later"})
    await syncing
    assert answers["first"].finish is FinishReason.LENGTH
    assert set(answers["first"].versions) == {PolicyVersion(0, replica.version.number - 1)}
    assert set(answers["later"].versions) == {replica.version}


async def test_waiting_ends_with_more_requests_than_slots(replica, initial, long):
    await replica.sync(initial)
    ids = [f"{i}" for i in range(2 * replica.config.rollout.engine.slots)]
    await replica.engine.submit([request(id, PROMPT, long) for id in ids])
    assert await replica.engine.pause("wait", 60) == len(ids)
    answers = await replica.collect(set(ids))
    assert {len(answer.tokens) for answer in answers.values()} == {long}
    await replica.engine.resume(replica.version)


async def test_a_pause_that_times_out_changes_nothing(replica, initial, long):
    await replica.sync(initial)
    await replica.engine.submit([request("long", PROMPT, long)])
    with pytest.raises(TimeoutError, match="generation continues under"):
        await replica.engine.pause("wait", 0.01)
    answer = (await replica.collect({"long"}))["long"]
    assert len(answer.tokens) == long


async def test_priority_decides_which_requests_wait(replica, initial):
    await replica.sync(initial)
    few = [request(f"train/{i}", PROMPT, 40) for i in range(16)]  # twice the slots
    last = request("validation", PROMPT, 4)._replace(priority=1)
    first = request("urgent", PROMPT, 4)._replace(priority=-1)
    await replica.engine.submit([last, *few, first])
    order, answers = [], {}
    while len(order) < 18:
        batch = await replica.engine.events()
        add(answers, batch)
        order += [id for id, finish in zip(batch.ids, batch.finish) if finish is not None]
    assert order.index("urgent") < order.index("validation") or order.index("validation") < 8


async def test_max_running_requests_limits_training_and_loses_no_request(replica, initial, long):
    await replica.sync(initial)
    lengths = {f"train/{i}": 60 if i < 6 else long for i in range(10)} | {"validation": 30}
    requests = [request(id, PROMPT, length) for id, length in lengths.items()]
    requests[-1] = requests[-1]._replace(priority=1)
    await replica.engine.set_scheduling(Scheduling(max_running_requests=2))
    await replica.engine.submit(requests)
    answers, under_way, most, ended = {}, set(), 0, []
    while len(ended) < len(lengths):
        batch = await replica.engine.events()
        add(answers, batch)
        for id, finish in zip(batch.ids, batch.finish):
            under_way.add(id)
            most = max(most, len(under_way - {"validation"}))
            if finish is not None:
                under_way.remove(id)
                ended.append(id)
        if len(ended) < 4:
            assert most <= 2
        else:
            await replica.engine.set_scheduling(Scheduling())
    assert ended.index("validation") < 4  # the limit does not apply to it
    assert most > 2
    assert {id: len(a.tokens) for id, a in answers.items()} == lengths


async def test_validation_first_runs_waiting_validation_before_waiting_training(replica, initial):
    await replica.sync(initial)
    await replica.engine.set_scheduling(Scheduling(validation_first=True))
    await replica.engine.submit([request(f"running/{i}", PROMPT, 40) for i in range(8)])  # as many as slots
    validation = [request(f"validation/{i}", PROMPT, 4)._replace(priority=1) for i in range(4)]
    await replica.engine.submit([*(request(f"waiting/{i}", PROMPT, 40) for i in range(8)), *validation])
    ended = []
    while len(ended) < 20:
        batch = await replica.engine.events()
        ended += [id for id, finish in zip(batch.ids, batch.finish) if finish is FinishReason.LENGTH]
    await replica.engine.set_scheduling(Scheduling())
    assert not any(id.startswith("waiting") for id in ended[: max(ended.index(r.id) for r in validation)])


async def test_ends_are_reported_without_the_progress_of_others_and_no_token_is_lost(replica, initial, long):
    await replica.sync(initial)
    await replica.engine.set_scheduling(Scheduling(progress_every_s=3600.0))
    await replica.engine.submit([request("long", PROMPT, long), *(request(f"{i}", PROMPT, 4) for i in range(3))])
    answers, ended, reports = {}, set(), 0
    while len(ended) < 4:
        batch = await replica.engine.events()
        add(answers, batch)
        reports += batch.progress and "long" in batch.ids
        assert batch.progress or None not in batch.finish
        ended |= {id for id, finish in zip(batch.ids, batch.finish) if finish is not None}
    await replica.engine.set_scheduling(Scheduling())
    assert reports <= 2  # at the start of the engine's time, and at the end, when nothing else runs
    assert {id: len(answer.tokens) for id, answer in answers.items()} == {"long": long, "0": 4, "1": 4, "2": 4}


async def test_an_engine_whose_progress_nobody_wants_yet_still_shows_that_it_lives(replica, initial, long, monkeypatch):
    for module in ("streaming", "native.engine"):
        monkeypatch.setattr(f"asyncrl.rollouter.engines.{module}.ALIVE_EVERY_S", 0.05)
    await replica.sync(initial)
    await replica.engine.set_scheduling(Scheduling(progress_every_s=3600.0))
    await replica.engine.submit([request("on", PROMPT, long)])
    batches = []
    while not any(batch.finish for batch in batches):
        batches.append(await replica.engine.events())
    await replica.engine.set_scheduling(Scheduling())
    assert sum(not batch.ids for batch in batches) >= 1
    assert sum(len(batch.tokens) for batch in batches) == long


async def test_a_manifest_that_does_not_fit_is_refused_before_anything_is_paused(replica, initial):
    await replica.sync(initial)
    await replica.engine.submit([request("on", PROMPT, 100)])
    serving = replica.version
    wrong = dict(initial) | {"model.layers.0.mlp.up_proj.weight": torch.zeros(3, 5)}
    with pytest.raises(ManifestError, match="up_proj"):
        await replica.sync(wrong)
    with pytest.raises(ManifestError, match=r"model\.norm\.weight"):
        await replica.sync({name: t for name, t in initial.items() if name != "model.norm.weight"})
    with pytest.raises(ManifestError, match="surprise"):
        await replica.sync(dict(initial) | {"model.surprise": torch.zeros(2)})
    answer = (await replica.collect({"on"}))["on"]
    assert answer.finish is FinishReason.LENGTH
    assert set(answer.versions) == {serving}


async def test_a_failed_transfer_leaves_no_partial_update_in_service(replica, reference, initial):
    await replica.sync(initial)
    replica.rank.break_at = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(SyncError, match="ran out of memory"):
        await replica.sync(changed(initial, 61))
    replica.rank.break_at = ""
    assert not replica.fleet.routable
    with pytest.raises(EngineError, match="interrupted during its transfer"):
        await replica.engine.resume(replica.version)
    weights = changed(initial, 62)
    await replica.sync(weights)
    answer = (await replica.generate([request("again", PROMPT, 12)]))["again"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_a_damaged_bucket_fails_the_sync_at_once_and_the_next_sync_succeeds(replica, reference, initial):
    await replica.sync(initial)
    replica.rank.writer.damage = True
    async with asyncio.timeout(30):
        with pytest.raises(SyncError, match=r"phase transfer, replica/0.*bucket 0/\d+.*damaged in transit"):
            await replica.sync(changed(initial, 63))
    weights = changed(initial, 64)
    await replica.sync(weights)
    answer = (await replica.generate([request("mended", PROMPT, 12)]))["mended"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_the_replica_s_digests_equal_the_sender_s(replica, initial):
    report = await replica.sync(changed(initial, 71))
    assert {role: await replica.engine.digest(role) for role in report.digests} == report.digests
    assert report.nbytes == sum(t.nbytes for t in initial.values())
