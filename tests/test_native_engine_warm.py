"""Warm prefixes: a conversation's next turn continues from the KV of earlier ones, within its memory and version."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.models.checkpoint import load_decoder, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import EngineError
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.engines.native.kv import SlotKV
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.rollouter.engines.native.speculation import Speculation
from asyncrl.rollouter.engines.native.warm import WarmPrefix, WarmPrefixes
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.stepping import full_forward, make_request, read, run_all

VOCABULARY, CONTEXT = 150, 256
PROMPT, SEEN, ANSWER = 30, 9, 12  # tokens of a prompt, of what a tool says, of an answer


@pytest.fixture(scope="module")
def mimo(tmp_path_factory):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_nextn_predict_layers": 2}
    names = {"architectures": ["MiMoForCausalLM"], "tie_word_embeddings": True, "initializer_range": 0.3}
    config = DecoderConfig.from_dict(
        {**sizes, **heads, **names, "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    )
    decoder = Decoder(config)
    decoder.init_weights(seed=5, std=0.3)
    path = tmp_path_factory.mktemp("mimo")
    save_checkpoint(path, dict(decoder.named_parameters()), config)
    return path


def _core(path, warm_bytes=1 << 20, **options) -> Core:
    model = NativeModel(DecoderConfig.load(path), CONTEXT, torch.float32)
    model.load(path)
    options = {"slots": 4, "prefill_chunk_tokens": 16, "recorder": Recorder("test"), **options}
    core = Core(model, context_tokens=CONTEXT, warm_bytes=warm_bytes, **options)
    core.start(PolicyVersion(0, 0))
    return core


def _tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def _counters(core: Core):
    """Since the last call."""
    core.drain()
    return core._recorder.drain().counters


def _counted(core: Core) -> tuple[float, float]:
    """Tokens prefilled and reused since the last call."""
    counters = _counters(core)
    return counters["rollout/prompt/prefilled"], counters["rollout/prompt/reused"]


def _converse(core: Core, turns: int, group="g", sample=0) -> list[tuple]:
    """(request, its tokens, its logprobs) of each turn of a conversation."""
    context, found = _tokens(1, PROMPT), []
    for turn in range(turns):
        request = make_request(f"{sample}.{turn}", context, ANSWER, key=100 * sample + turn, group=group, shared=PROMPT)
        answer, logprobs, _ = run_all(core, [request])[request.id]
        found.append((request, answer, logprobs))
        context = np.concatenate([context, answer, _tokens(10 + turn, SEEN)]).astype(np.int32)
    return found


@pytest.mark.parametrize("speculation", [None, Speculation(2, guard=False)])
def test_a_next_turn_computes_only_what_came_since_and_draws_the_same(mimo, speculation):
    core, cold = _core(mimo, speculation=speculation), _core(mimo, warm_bytes=0, speculation=speculation)
    decoder = load_decoder(mimo)
    for (request, answer, logprobs), (_, expected, _) in zip(_converse(core, 5), _converse(cold, 5), strict=True):
        assert answer == expected
        np.testing.assert_allclose(logprobs, full_forward(decoder, request, answer), atol=1e-4)
    warm, without = _counters(core), _counters(cold)
    prefilled, reused = warm["rollout/prompt/prefilled"], warm["rollout/prompt/reused"]
    contexts = [PROMPT + turn * (ANSWER + SEEN) for turn in range(5)]
    assert prefilled + reused == sum(contexts) - 5  # the last token of each is the first decode step's
    new = PROMPT - 1 + 4 * SEEN
    if speculation is None:
        assert prefilled == new
    else:  # KV of up to a step's tokens is not counted as computed at the end
        assert new <= prefilled <= new + 4 * speculation.tokens
        for kept, computed in zip(core.kv.keys[2:], cold.kv.keys[2:], strict=True):  # the draft's came along
            torch.testing.assert_close(kept[0, :, : contexts[-1]], computed[0, :, : contexts[-1]], atol=1e-4, rtol=0)
    assert (without["rollout/prompt/prefilled"], without["rollout/prompt/reused"]) == (sum(contexts) - 5, 0)


def test_branches_continue_from_the_longest_prefix_and_other_groups_from_none(mimo):
    core = _core(mimo)
    turns = _converse(core, 3)
    _counted(core)
    last, answer, _ = turns[-1]
    at_second = turns[1][0].tokens
    branch = np.concatenate([at_second, _tokens(50, 7)])
    run_all(core, [make_request("branch", branch, 5, key=7, group="g", shared=PROMPT)])
    assert _counted(core) == (6, len(at_second))
    run_all(core, [make_request("other", branch, 5, key=7, group="h")])
    assert _counted(core) == (len(branch) - 1, 0)
    whole = np.concatenate([last.tokens, answer])  # equal to the end
    run_all(core, [make_request("equal", whole, 5, key=7, group="g", shared=PROMPT)])
    assert _counted(core) == (0, len(whole) - 1)


def test_a_conversation_takes_the_memory_of_its_last_turn(mimo):
    core = _core(mimo)
    turns = _converse(core, 4)
    computed = len(turns[-1][0].tokens) + ANSWER - 1
    of_all = core.kv.nbytes / (core.slots * CONTEXT)
    assert core._warm.nbytes == computed * of_all
    core.drain()
    assert core._recorder.drain().gauges["rollout/warm_kv_bytes"] == core._warm.nbytes


def test_aborted_and_failed_requests_leave_nothing(mimo):
    core = _core(mimo)
    core.submit([make_request("a", _tokens(1, PROMPT), 20, group="g", shared=PROMPT)])
    for _ in range(8):
        core.step()
    core.abort()
    run_all(core, [make_request("b", _tokens(2, CONTEXT), 20, group="g")])
    assert core._warm.nbytes == 0


@pytest.mark.parametrize("drop", ["flush_kv", "release_kv"])
def test_a_change_of_version_drops_them(mimo, drop):
    core = _core(mimo)
    first, answer, _ = _converse(core, 1)[0]
    held = core._warm.nbytes + core.kv.nbytes
    freed = getattr(core, drop)()
    assert (core._warm.nbytes, freed) == (0, held if drop == "release_kv" else None)
    core.kv.restore()
    core.start(PolicyVersion(0, 1))
    _counted(core)
    context = np.concatenate([first.tokens, answer])
    run_all(core, [make_request("next", context, 5, group="g", shared=PROMPT)])
    assert _counted(core) == (len(context) - 1, 0)


def test_kept_over_a_change_of_version_they_mark_what_continues_them(mimo):
    core = _core(mimo)
    first, answer, _ = _converse(core, 1)[0]
    core.start(PolicyVersion(0, 1))
    _counted(core)
    context = np.concatenate([first.tokens, answer])
    core.submit([make_request("next", context, 5, group="g", shared=PROMPT)])
    core.submit([make_request("fresh", _tokens(3, PROMPT), 5)])
    while core.active:
        core.step()
    events = core.drain()
    assert dict(zip(events.ids, events.mixed_kv)) == {"next": True, "fresh": False}
    assert _counted(core)[1] == len(context) - 1
    again = np.concatenate([context, read(events)["next"][0]])
    core.submit([make_request("after", again, 5, group="g", shared=PROMPT)])
    while core.active:
        core.step()
    assert core.drain().mixed_kv == [True]


def test_deterministic_mode_keeps_none(mimo):
    with pytest.raises(EngineError, match="deterministic mode keeps no warm KV"):
        _core(mimo, deterministic=True)


def test_conversations_side_by_side_find_their_own(mimo):
    core = _core(mimo, slots=2)
    contexts = {s: _tokens(1, PROMPT) for s in range(5)}
    decoder = load_decoder(mimo)
    for turn in range(3):
        requests = [
            make_request(f"{s}.{turn}", c, ANSWER, key=10 * s + turn, group="g", shared=PROMPT)
            for s, c in contexts.items()
        ]
        answers = run_all(core, requests)
        for s, request in enumerate(requests):
            answer, logprobs, finish = answers[request.id]
            assert finish is FinishReason.LENGTH
            np.testing.assert_allclose(logprobs, full_forward(decoder, request, answer), atol=1e-4)
            contexts[s] = np.concatenate([contexts[s], answer, _tokens(10 * s + turn, SEEN)]).astype(np.int32)
    assert _counted(core)[0] == PROMPT - 1 + 2 * 5 * SEEN


# -- the store alone ---------------------------------------------------------------------------------------------------


def _prefix(tokens, group="g", nbytes=40) -> WarmPrefix:
    return WarmPrefix(group, np.array(tokens, np.int32), SlotKV(torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(0)))


def test_the_least_recently_used_is_dropped_first_and_nothing_exceeds_the_limit():
    store, a, b, c = WarmPrefixes(100), *(_prefix([i, 1], group=str(i)) for i in range(3))
    store.keep(a)
    store.keep(b)
    store.used(a)
    store.keep(c)
    assert store.nbytes == 80
    assert [store.longest(str(i), np.array([i, 1, 2])) is not None for i in range(3)] == [True, False, True]
    store.keep(_prefix([9], group="9", nbytes=101))
    assert store.longest("9", np.array([9])) is None
    assert store.nbytes == 80
    store.keep(replace(_prefix([8], group="8"), kv=SlotKV(torch.zeros(25), torch.zeros(0))))
    assert store.nbytes == 100
    assert store.clear() == 100
    assert store.nbytes == 0


def test_a_longer_prefix_replaces_those_that_it_continues():
    store = WarmPrefixes(1000)
    for tokens in ([1, 2], [1, 2, 3], [1, 5], [1, 2, 3, 4]):
        store.keep(_prefix(tokens))
    assert store.nbytes == 80
    assert store.longest("g", np.array([1, 2, 3, 9])).tokens == 3
    assert store.longest("g", np.array([1, 5, 6])).tokens == 2
    assert store.longest("g", np.array([7])) is None
    assert store.longest("h", np.array([1, 2])) is None
