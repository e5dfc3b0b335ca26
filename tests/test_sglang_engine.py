"""The SGLang engine with a real SGLang server on the CPU.

All tests share two servers, one of them with a draft, since a start takes a minute or two. The tests run in order, and
each syncs the weights that it needs.
"""

from __future__ import annotations

import asyncio
import importlib.util

import psutil
import pytest
import pytest_asyncio

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from transformers import AutoTokenizer

from asyncrl.config.schema import DeadlinesConfig, MTPConfig
from asyncrl.models.checkpoint import is_draft
from asyncrl.param_sync.errors import SyncError
from asyncrl.rollouter.engines.base import EngineDied, EngineError
from asyncrl.types.samples import FinishReason
from tests.support.engine_contract import *  # noqa: F403
from tests.support.engine_contract import PROMPT, changed, error_of, perfect_draft, rounding, until
from tests.support.engine_replica import Replica, request
from tests.support.processes import gone
from tests.support.sglang_replica import replica_config, server_processes

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    replica = await Replica.start(replica_config(checkpoint))
    yield replica
    await replica.close()


@pytest.mark.slow
async def test_logits_in_float32_are_not_rounded(checkpoint, initial):
    found = await rounding(Replica, replica_config(checkpoint), initial)
    assert found[True] < found[False] / 10, found


async def test_ids_with_a_common_prefix_are_aborted_separately(replica, initial, long):
    """SGLang itself aborts by prefix."""
    await replica.sync(initial)
    await replica.engine.submit([request("s/1", PROMPT, long), request("s/12", PROMPT, long)])
    answers = {}
    await until(replica, answers, lambda: len(answers) == 2)
    await replica.engine.abort(["s/1"])
    await replica.collect({"s/1", "s/12"}, answers)
    assert answers["s/1"].finish is FinishReason.ABORT
    assert answers["s/12"].finish is FinishReason.LENGTH


async def test_an_id_may_be_used_again_as_soon_as_its_request_has_ended(replica, initial):
    await replica.sync(initial)
    for _ in range(20):
        answer = (await replica.generate([request("again", PROMPT, 2)]))["again"]
        assert answer.finish is FinishReason.LENGTH, answer.error


async def test_a_request_stops_at_its_string(replica, initial):
    await replica.sync(initial)
    free = (await replica.generate([request("free", PROMPT, 40, temperature=0.0)]))["free"]
    tokenizer = AutoTokenizer.from_pretrained(replica.config.model.path)
    text = next(text for i in range(5, 40) if (text := tokenizer.decode(free.tokens[i])).strip(" \ufffd"))
    wanted = request("string", PROMPT, 40, temperature=0.0, stop_strings=(text,))
    answer = (await replica.generate([wanted]))["string"]
    assert answer.finish is FinishReason.STOP
    assert answer.tokens == free.tokens[: len(answer.tokens)]
    assert len(answer.tokens) == len(answer.logprobs) < 40
    assert text in tokenizer.decode(answer.tokens)


async def with_end_at(replica, initial, place):
    """(weights, tokens of their greedy answer, end token, its text): weights with rows swapped so that the answer has
    the tokenizer's end token at this place."""
    await replica.sync(initial)
    free = (await replica.generate([request("free", PROMPT, 40, temperature=0.0)]))["free"].tokens
    tokenizer = AutoTokenizer.from_pretrained(replica.config.model.path)
    end, other = tokenizer.eos_token_id, free[place]
    assert other not in free[:place] + PROMPT
    weights = dict(initial)
    for name in {"model.embed_tokens.weight", "lm_head.weight"} & initial.keys():
        weights[name] = initial[name].clone()
        weights[name][[end, other]] = initial[name][[other, end]]
    return weights, [end if t == other else t for t in free], end, tokenizer.decode([end])


async def test_a_request_stops_at_its_own_stop_tokens_and_not_at_the_model_s_end_token(replica, initial):
    weights, tokens, end, text = await with_end_at(replica, initial, 4)
    await replica.sync(weights)
    stop = next(token for i, token in enumerate(tokens) if i > 6 and token not in tokens[:i])
    wanted = {
        "at another": ({"stop_token_ids": (stop,)}, stop),
        "at none": ({}, None),
        "at the end": ({"stop_token_ids": (stop, end)}, end),
        "at its text": ({"stop_strings": (text,)}, end),
    }
    requests = [request(id, PROMPT, 40, temperature=0.0, **stops) for id, (stops, _) in wanted.items()]
    for id, answer in (await replica.generate(requests)).items():
        _, last = wanted[id]
        assert answer.tokens == (tokens if last is None else tokens[: tokens.index(last) + 1]), id
        assert answer.finish is (FinishReason.LENGTH if last is None else FinishReason.STOP), id


async def test_nothing_follows_a_stop_token_whenever_a_request_is_aborted(replica, initial, monkeypatch):
    """SGLang ends an aborted request with ABORT even in the step that sampled its stop token; the engine recognises the
    stop token as the last one of its part. How many tokens precede the abort depends on the machine."""
    weights, tokens, end, _ = await with_end_at(replica, initial, 8)
    await replica.sync(weights)
    cut_after, take, aborts = 0, replica.engine._take, []

    def take_and_cut(running, event):
        result = take(running, event)
        if running.received >= cut_after:
            aborts.append(asyncio.create_task(replica.engine.abort([running.request.id])))
        return result

    monkeypatch.setattr(replica.engine, "_take", take_and_cut)
    for cut_after in range(1, 10):
        got = []
        while end not in got:
            id = f"{cut_after}/{len(got)}"
            wanted = request(id, PROMPT + got, 40 - len(got), temperature=0.0, stop_token_ids=(end,))
            answer = (await replica.generate([wanted]))[id]
            assert answer.finish in (FinishReason.STOP, FinishReason.ABORT)
            got += answer.tokens
        assert got == tokens[:9]
    await asyncio.gather(*aborts)
    assert aborts


async def test_streams_in_larger_pieces_lose_nothing(replica, reference, initial, long, monkeypatch):
    """As if no request were ever kept over a sync: each event has many tokens."""
    monkeypatch.setattr(replica.engine, "_stream_interval", 16)
    await replica.sync(initial)
    await replica.engine.submit([request("cut", PROMPT, long), request("whole", PROMPT, 50)])
    answers = {}
    await until(replica, answers, lambda: len(answers) == 2 and len(answers["cut"].tokens) > 20)
    report = await replica.sync(changed(initial, 81))
    await replica.collect({"cut", "whole"}, answers)
    assert report.held_requests >= 1
    for answer in answers.values():
        assert len(answer.tokens) == len(answer.logprobs)
        assert error_of(reference, initial, PROMPT, answer) < 1e-4
    assert answers["cut"].finish is FinishReason.ABORT
    with pytest.raises(EngineError, match=r"started for another param_sync\.pause"):
        await replica.engine.pause("keep", 5)


async def test_checksums_change_when_the_weights_do_and_only_then(replica, initial):
    await replica.sync(initial)
    first = await replica.receiver.live_checksums("target")
    await replica.sync(initial)
    assert await replica.receiver.live_checksums("target") == first
    one = "model.layers.1.mlp.down_proj.weight"
    await replica.sync(dict(initial) | {one: initial[one] + 1})
    now = await replica.receiver.live_checksums("target")
    assert {name for name in first if now[name] != first[name]} == {one}
    for selector in ("target", "all"):  # of no tensor, as to wait for the GPU
        none = await replica.engine._client.post("/weights_checker", skip_tensor_list=[""], selector=selector)
        assert [rank["checksums"] for rank in none["ranks"]] == [{}]


async def test_a_lost_delivery_fails_the_sync(replica, reference, initial, monkeypatch):
    await replica.sync(initial)
    deliver = replica.receiver._deliver

    async def lose(parcel):
        parcel.places = [place for place in parcel.places if "layers.2.mlp.up_proj" not in place.name]
        await deliver(parcel)

    monkeypatch.setattr(replica.receiver, "_deliver", lose)
    message = r"phase verify, replica/0.*layers\.2\.mlp\.gate_proj.*no live parameter matches it"
    with pytest.raises(SyncError, match=message):
        await replica.sync(changed(initial, 82))
    assert not replica.fleet.routable
    monkeypatch.undo()
    weights = changed(initial, 83)
    await replica.sync(weights)
    answer = (await replica.generate([request("mended", PROMPT, 12)]))["mended"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_a_sync_succeeds_after_an_update_that_was_left_open(replica, reference, initial):
    await replica.engine._client.post("/begin_weight_update")  # as by an abandoned session
    weights = changed(initial, 84)
    await replica.sync(weights)
    answer = (await replica.generate([request("again", PROMPT, 12)]))["again"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("transport", "delivery"), [("gloo", "memory"), ("shared_memory", "gloo")])
async def test_weights_arrive_by_each_transport_and_delivery(
    replica, reference, initial, transport, delivery, monkeypatch
):
    """The other two combinations are those of this file's replicas."""
    monkeypatch.setattr(replica.config.rollout.engine, "delivery", delivery)
    other = Replica(replica.engine, replica.config, transport, replica.recorder)
    other.version = replica.version
    try:
        await follow(other, reference, initial, 11)
    finally:
        replica.version, replica.engine._receiver = other.version, replica.receiver
        other.rank.close()


async def follow(replica, reference, initial, syncs, temperature=1.0):
    """Check that each sync delivers its weights, with equal digests, and that answers have their logprobs."""
    for seed in range(syncs):
        weights = initial if seed == 0 else changed(initial, seed)
        report = await replica.sync(weights)
        assert {role: await replica.engine.digest(role) for role in report.digests} == report.digests
        asked = [request(f"{replica.version}", PROMPT, 12, temperature=temperature)]
        (answer,) = (await replica.generate(asked)).values()
        assert set(answer.versions) == {replica.version}
        assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_the_kv_cache_is_released_and_restored(replica, reference, initial, monkeypatch):
    await replica.sync(initial)
    calls, post = [], replica.engine._client.post

    async def recorded(path, **body):
        calls.append(path)
        return await post(path, **body)

    monkeypatch.setattr(replica.engine._client, "post", recorded)
    await replica.engine.pause("wait", 30)
    server = await replica.engine._client.get("/server_info")
    assert server["max_total_num_tokens"] > 8 * 1024  # eight slots of 1024 tokens
    await replica.engine.release_kv()
    with pytest.raises(EngineError, match="restore_kv first"):
        await replica.engine.resume(replica.version)
    await replica.engine.restore_kv()
    assert [call for call in calls if "memory" in call] == ["/release_memory_occupation", "/resume_memory_occupation"]
    assert [call for call in calls if "memory" in call] == ["/release_memory_occupation", "/resume_memory_occupation"]
    await replica.engine.resume(replica.version)
    answer = (await replica.generate([request("back", PROMPT, 12)]))["back"]
    assert error_of(reference, initial, PROMPT, answer) < 1e-4


async def test_kept_requests_keep_their_kv_cache(replica, initial, long):
    """SGLang's scheduler would exit if it were asked to free it."""
    await replica.sync(initial)
    await replica.engine.submit([request("kept", PROMPT, long)])
    await replica.engine.pause("keep", 30)
    with pytest.raises(EngineError, match="1 requests are kept during this pause"):
        await replica.engine.release_kv()
    await replica.engine.resume(replica.version)
    answer = (await replica.collect({"kept"}))["kept"]
    assert answer.finish is FinishReason.LENGTH


async def test_requests_without_the_key_are_refused(replica):
    """The server requires a key that is on no command line, and listens only on this machine."""
    port = int(replica.engine._client._url.rpartition(":")[2])
    server, *_ = server_processes()
    listening = {c.laddr.ip for c in server.net_connections() if c.status == "LISTEN" and c.laddr.port == port}
    assert listening == {"127.0.0.1"}
    key = replica.engine._client._key
    assert not any(key in word for process in server_processes() for word in process.cmdline())
    with pytest.raises(EngineError, match="401"):
        await type(replica.engine._client)(replica.engine._client._url, "guessed").get("/model_info")


async def test_a_killed_scheduler_is_reported_and_leaves_nothing_behind(replica, initial):
    """The replica cannot continue; its supervisor starts another."""
    await replica.sync(initial)
    await replica.engine.submit([request("lost", PROMPT, 200)])
    answers = {}
    await until(replica, answers, lambda: bool(answers))
    below = server_processes()
    next(process for process in below if "scheduler" in process.name()).kill()
    with pytest.raises(EngineDied):
        await until(replica, answers, lambda: False)
    with pytest.raises(EngineDied):
        await replica.engine.submit([request("more", PROMPT, 4)])
    await gone(below)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafting(checkpoint):
    """A server with MiMo's draft; weights arrive over gloo and are passed on by a process group."""
    mtp = MTPConfig(enable_rollout=True, num_speculative_tokens=2)
    parts = ("prefill", "decode", "speculative_draft")
    args = {f"{part}_attention_backend": "intel_amx" for part in parts}  # the CPU backend that works with a draft
    config = replica_config(checkpoint, mtp=mtp, args=args, delivery="gloo")
    replica = await Replica.start(config, transport="gloo")
    yield replica
    await replica.close()


async def checksums(replica):
    return {role: await replica.receiver.live_checksums(role) for role in ("target", "draft")}


def differing(before, after):
    return {name for name in before if before[name] != after[name]}


async def test_each_model_changes_only_with_its_own_tensors(drafting, initial):
    report = await drafting.sync(initial)
    assert not report.evicted
    before = await checksums(drafting)
    drafts = {name: t for name, t in initial.items() if is_draft(name)}
    await drafting.sync(dict(initial) | changed(drafts, 1))
    after = await checksums(drafting)
    assert after["target"] == before["target"]
    own = differing(before["draft"], after["draft"])
    assert len(own) == len(before["draft"]) - 2  # all but embedding and head, which are the target's
    layer = {name: t for name, t in initial.items() if "layers.0.mlp.down_proj" in name and not is_draft(name)}
    await drafting.sync(dict(initial) | changed(drafts, 1) | changed(layer, 2))
    last = await checksums(drafting)
    assert last["draft"] == after["draft"]
    assert differing(after["target"], last["target"]) == layer.keys()


async def test_the_draft_shares_embedding_and_head_with_the_target(drafting, initial):
    before = await checksums(drafting)
    shared = {"model.embed_tokens.weight", "lm_head.weight"}
    await drafting.sync({name: t + 1 if name in shared else t for name, t in initial.items()})
    after = await checksums(drafting)
    assert differing(before["draft"], after["draft"]) >= {f"draft.{name}" for name in shared}
    assert all(after["draft"][f"draft.{name}"] == after["target"][name] for name in shared)


async def test_a_draft_that_is_not_delivered_fails_the_sync(drafting, initial, monkeypatch):
    await drafting.sync(initial)
    deliver = drafting.receiver._deliver

    async def lose(parcel):
        if parcel.role == "target":
            await deliver(parcel)

    monkeypatch.setattr(drafting.receiver, "_deliver", lose)
    with pytest.raises(SyncError, match=r"phase verify, replica/0.*mtp_layers.*no live parameter matches it"):
        await drafting.sync(changed(initial, 3))
    assert not drafting.fleet.routable
    monkeypatch.undo()
    assert not (await drafting.sync(changed(initial, 4))).evicted


async def acceptance(drafting):
    """Acceptance rates by draft position, and the greedy answers."""
    drafting.recorder.drain()
    requests = [request(f"{i}", [*PROMPT, i], 60, temperature=0.0) for i in range(8)]
    answers = await drafting.generate(requests)
    counters = drafting.recorder.drain().counters
    assert counters["rollout/spec/tokens"] == sum(len(answer.tokens) for answer in answers.values())
    rates = [counters[f"rollout/spec/accepted/{i}"] / counters[f"rollout/spec/drafted/{i}"] for i in (1, 2)]
    return rates, answers


async def test_drafted_tokens_that_the_target_predicts_are_accepted(drafting, initial, reference):
    """A draft that equals its target is accepted; a stale one is not."""
    perfect = perfect_draft(initial)
    await drafting.sync(perfect)
    rates, answers = await acceptance(drafting)
    assert min(rates) > 0.95
    for id, answer in answers.items():
        assert error_of(reference, perfect, [*PROMPT, int(id)], answer) < 1e-4
    stale = {name: t if "mtp" in name else 4 * t for name, t in changed(perfect, 5, scale=0.5).items()}
    await drafting.sync(stale)
    rates, answers = await acceptance(drafting)
    assert max(rates) < 0.5
    for id, answer in answers.items():
        assert error_of(reference, stale, [*PROMPT, int(id)], answer) < 1e-3  # logits four times as large


async def test_sampling_is_refused_where_only_the_likeliest_token_would_be_drawn(drafting, initial):
    await drafting.sync(initial)
    answer = (await drafting.generate([request("warm", PROMPT, 4)]))["warm"]
    assert answer.finish is FinishReason.ERROR
    assert "always greedy" in answer.error


async def test_weights_delivered_by_a_group_are_live_after_each_sync(drafting, reference, initial):
    await follow(drafting, reference, initial, 11, temperature=0.0)


async def test_a_broken_group_fails_the_sync_and_the_next_sync_forms_another(drafting, initial, monkeypatch):
    await drafting.sync(initial)
    delivery = drafting.receiver._delivery
    broken, deliver = delivery._name, delivery.deliver

    async def break_it(parcel, selector):
        delivery._channel.end_calls()
        await deliver(parcel, selector)

    monkeypatch.setattr(delivery, "deliver", break_it)
    async with asyncio.timeout(60):
        with pytest.raises(SyncError, match=r"phase transfer, replica/0.*Failed to receive weights"):
            await drafting.sync(changed(initial, 91))
    monkeypatch.undo()
    assert not (await drafting.sync(changed(initial, 92))).evicted
    assert delivery._name != broken


def schedulers_of(replica):
    below = psutil.Process(replica.engine._server._process.pid).children(recursive=True)
    return [process for process in below if "scheduler" in process.name()]


async def test_a_server_that_hangs_during_a_delivery_fails_the_sync_in_time(drafting, initial, monkeypatch):
    """The supervisor would then start another replica; here the server wakes up again, alone in its group."""
    await drafting.sync(initial)
    (scheduler,) = schedulers_of(drafting)
    deliver = drafting.receiver._deliver

    async def stop(parcel):
        scheduler.suspend()
        await deliver(parcel)

    monkeypatch.setattr(drafting.receiver, "_deliver", stop)
    monkeypatch.setattr("asyncrl.rollouter.engines.remote_receiver._ENDING_S", 2.0)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(SyncError, match=r"phase transfer, replica/0.*was silent for 1\.5 s"):
                await drafting.sync(changed(initial, 93), deadlines=DeadlinesConfig(transfer_s=3.0))
            with pytest.raises(EngineDied, match="did not end an abandoned update within 2 s"):
                await drafting.session.close()
    finally:
        scheduler.resume()
    monkeypatch.undo()
    assert not (await drafting.sync(changed(initial, 94))).evicted


async def test_a_scheduler_that_dies_during_a_delivery_is_reported(drafting, initial, monkeypatch):
    await drafting.sync(initial)
    (scheduler,) = schedulers_of(drafting)
    below = [scheduler, *scheduler.parents()[:1]]
    deliver = drafting.receiver._deliver

    async def kill(parcel):
        scheduler.kill()
        await deliver(parcel)

    monkeypatch.setattr(drafting.receiver, "_deliver", kill)
    async with asyncio.timeout(60):
        with pytest.raises(SyncError, match="phase transfer, replica/0"):
            await drafting.sync(changed(initial, 95))
        with pytest.raises(EngineDied):
            await until(drafting, {}, lambda: False)
    await gone(below)
