"""The SGLang engine, held against a real SGLang server on the CPU.

One server is started for most tests, as it takes a minute or two; they run in order, and each syncs the weights that it
needs. The last one kills it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time

import psutil
import pytest
import pytest_asyncio

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from transformers import AutoTokenizer

from asyncrl.param_sync.errors import SyncError
from asyncrl.rollouter.engine import EngineDied, EngineError
from asyncrl.sample import FinishReason
from tests.support.engine_contract import *  # noqa: F403
from tests.support.engine_contract import PROMPT, changed, error_of, until
from tests.support.engine_replica import Replica, request
from tests.support.sglang_replica import replica_config, server_processes

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    replica = await Replica.start(replica_config(checkpoint))
    yield replica
    await replica.close()


async def test_ids_that_begin_alike_are_aborted_one_by_one(replica, initial):
    """SGLang would take them for one."""
    await replica.sync(initial)
    await replica.engine.submit([request("s/1", PROMPT, 100), request("s/12", PROMPT, 100)])
    answers = {}
    await until(replica, answers, lambda: len(answers) == 2)
    await replica.engine.abort(["s/1"])
    await replica.collect({"s/1", "s/12"}, answers)
    assert answers["s/1"].finish is FinishReason.ABORT
    assert answers["s/12"].finish is FinishReason.LENGTH


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


async def test_streams_in_larger_pieces_lose_nothing(replica, reference, initial, monkeypatch):
    """As where no request is ever kept over a sync: of many tokens each event."""
    monkeypatch.setattr(replica.engine, "_stream_interval", 16)
    await replica.sync(initial)
    await replica.engine.submit([request("cut", PROMPT, 200), request("whole", PROMPT, 50)])
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
    first = await replica.intake.live_checksums("target")
    await replica.sync(initial)
    assert await replica.intake.live_checksums("target") == first
    one = "model.layers.1.mlp.down_proj.weight"
    await replica.sync(dict(initial) | {one: initial[one] + 1})
    now = await replica.intake.live_checksums("target")
    assert {name for name in first if now[name] != first[name]} == {one}


async def test_a_delivery_that_is_lost_fails_the_sync(replica, reference, initial, monkeypatch):
    await replica.sync(initial)
    deliver = replica.intake._deliver

    async def lose(parcel):
        parcel._places = [place for place in parcel._places if "layers.2.mlp.up_proj" not in place.name]
        await deliver(parcel)

    monkeypatch.setattr(replica.intake, "_deliver", lose)
    with pytest.raises(SyncError, match=r"phase verify, replica/0.*layers\.2\.mlp\.gate_proj.*no live parameter is it"):
        await replica.sync(changed(initial, 82))
    assert not replica.fleet.routable
    monkeypatch.undo()
    weights = changed(initial, 83)
    await replica.sync(weights)
    answer = (await replica.generate([request("mended", PROMPT, 12)]))["mended"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_an_update_that_was_left_open_can_be_made_again(replica, reference, initial):
    await replica.engine._client.post("/begin_weight_update")  # as by a session that was given up here
    weights = changed(initial, 84)
    await replica.sync(weights)
    answer = (await replica.generate([request("again", PROMPT, 12)]))["again"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_the_kv_cache_goes_and_comes_back(replica, reference, initial):
    await replica.sync(initial)
    await replica.engine.pause("wait", 30)
    held = (await replica.engine.stats()).kv_bytes
    assert held > 8 * 256 * 2 * 4 * 2 * 32 * 4  # eight slots of 256 tokens: keys and values, 4 layers, 2 heads of 32
    await replica.engine.release_kv()
    assert (await replica.engine.stats()).kv_bytes == 0
    with pytest.raises(EngineError, match="restore_kv first"):
        await replica.engine.resume(replica.version)
    await replica.engine.restore_kv()
    await replica.engine.resume(replica.version)
    assert (await replica.engine.stats()).kv_bytes == held
    answer = (await replica.generate([request("back", PROMPT, 12)]))["back"]
    assert error_of(reference, initial, PROMPT, answer) < 1e-4


async def test_kept_requests_keep_their_kv_cache(replica, initial):
    """SGLang's scheduler would end itself if it were told to free it."""
    await replica.sync(initial)
    await replica.engine.submit([request("kept", PROMPT, 60)])
    await replica.engine.pause("keep", 30)
    with pytest.raises(EngineError, match="1 requests stay over this pause"):
        await replica.engine.release_kv()
    await replica.engine.resume(replica.version)
    answer = (await replica.collect({"kept"}))["kept"]
    assert answer.finish is FinishReason.LENGTH


async def test_strangers_are_kept_out(replica):
    """The server asks for a key that is on no command line, and listens on this machine alone."""
    port = int(replica.engine._client._url.rpartition(":")[2])
    server, *_ = server_processes()
    listening = {c.laddr.ip for c in server.net_connections() if c.status == "LISTEN" and c.laddr.port == port}
    assert listening == {"127.0.0.1"}
    key = replica.engine._client._key
    assert not any(key in word for process in server_processes() for word in process.cmdline())
    with pytest.raises(EngineError, match="401"):
        await type(replica.engine._client)(replica.engine._client._url, "guessed").get("/model_info")


async def test_a_killed_scheduler_is_told_and_leaves_nothing_behind(replica, initial):
    """The replica cannot go on; whoever runs it starts another."""
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


async def gone(processes, within_s=30):
    deadline = time.monotonic() + within_s
    while (alive := [p for p in processes if is_alive(p)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    for process in alive:
        process.kill()
    assert not alive


def is_alive(process):
    """Whether it can do anything: who adopts orphans here may not bury them."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
