"""The SGLang adapter's requests, checked by a small fake server.

It answers as SGLang 0.5.20 and 0.5.22 do (before 0.5.22 there are no update sessions), and unpacks tensors as SGLang's
workers do."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.schema import (
    Config,
    EngineConfig,
    ModelConfig,
    ParamSyncConfig,
    RolloutConfig,
)
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import AdapterSpec, TensorSpec
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.transports import gloo
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.rollouter.engines.base import EngineDied, EngineError, Grammar
from asyncrl.rollouter.engines.sglang.client import Client
from asyncrl.rollouter.engines.sglang.delivery import ByMemory, Parcel, SharedParcel
from asyncrl.rollouter.engines.sglang.engine import SGLangEngine
from asyncrl.rollouter.engines.sglang.group_delivery import ByGroup
from asyncrl.rollouter.engines.sglang.lora import adapter_name, load_adapter
from asyncrl.rollouter.engines.sglang.receiver import ServerReceiver
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion
from tests.support.engine_replica import TensorRank, request
from tests.support.stuck_channel import StuckChannel

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.layers.0.mlp.gate_proj.weight": torch.full((2, 3), 2.0),
    "model.layers.0.mlp.up_proj.weight": torch.full((2, 3), 3.0),
    "model.mtp_layers.0.input_proj.weight": torch.full((3, 6), 4.0),
}


class SGLang:
    """A fake server that holds tensors by role, and reports their checksums as SGLang reports those of its models."""

    def __init__(self, sessions: bool, draft: bool) -> None:
        self.sessions, self.draft = sessions, draft
        self.open = False
        self.calls: list[str] = []
        self.live: dict[str, dict[str, torch.Tensor]] = {"target": {}, "draft": {}}
        self.version = "default"
        self.drops = ""  # a tensor that its loader skips
        self.joins = False  # its workers join a group; else they hang
        self.queues = False  # as on a GPU: copies are made only at a synchronization
        self.queued: list[tuple[str, str, torch.Tensor]] = []
        self.app = web.Application(client_max_size=1 << 30)
        self.app.router.add_post("/update_weights_from_tensor", self.update)
        self.app.router.add_post("/weights_checker", self.check)
        self.app.router.add_post("/update_weight_version", self.set_version)
        self.app.router.add_get("/model_info", self.info)
        self.app.router.add_post("/init_weights_update_group", self.join_group)
        self.app.router.add_post("/load_lora_adapter_from_tensors", self.load_adapter)
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        if sessions:
            self.app.router.add_post("/begin_weight_update", self.begin)
            self.app.router.add_post("/end_weight_update", self.end)

    async def begin(self, request):
        if self.open:
            return web.json_response({"success": False, "message": "a session is already open"}, status=400)
        self.open = True
        self.calls.append("begin")
        return web.json_response({"success": True})

    async def end(self, request):
        self.open = False
        self.calls.append("end")
        return web.json_response({"success": True})

    async def update(self, request):
        body = await request.json()
        if self.sessions and not self.open:
            return web.json_response({"success": False, "message": "must run between begin and end"}, status=400)
        assert body["load_format"] == "flattened_bucket"
        assert body["flush_cache"] is False
        self.calls.append(f"update {body['selector']}")
        for name, tensor in opened(body["serialized_named_tensors"][0]):
            role = "draft" if "mtp" in name else "target"
            if name != self.drops and body["selector"] in (role, "all") and (role == "target" or self.draft):
                self.queued.append((role, name, tensor))
        if not self.queues:
            self.synchronize()
        return web.json_response({"success": True, "message": "Success"})

    async def join_group(self, request):
        if not self.joins:
            await asyncio.sleep(60)
        return web.json_response({"success": True})

    async def load_adapter(self, request):
        body = await request.json()
        assert body["load_format"] == "flattened_bucket"
        assert body["config_dict"] == {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}
        first, second = ([*opened(payload)] for payload in body["serialized_named_tensors"])
        assert [name for name, _ in first] == [name for name, _ in second]
        sums = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in first}
        assert body["expected_checksums"] == sums
        self.adapters[body["lora_name"]] = {name: tensor.clone() for name, tensor in first}
        return web.json_response({"success": True})

    def synchronize(self):
        for role, name, tensor in self.queued:
            self.live[role][name] = tensor.clone()
        self.queued.clear()

    async def check(self, request):
        body = await request.json()
        self.synchronize()
        if body.get("skip_tensor_list") == [""]:
            return web.json_response({"success": True, "ranks": [{"checksums": {}}]})
        role = body["selector"]
        live = dict(self.live[role])
        if role == "target":
            fused = [live.pop(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up")]
            live["model.layers.0.mlp.gate_up_proj.weight"] = torch.cat(fused)
        sums = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in live.items()}
        return web.json_response({"success": True, "ranks": [{"checksums": sums}]})

    async def set_version(self, request):
        self.version = (await request.json())["new_version"]
        self.calls.append("version")
        return web.json_response({"success": True})

    async def info(self, request):
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"weight_version": self.version})


def opened(payload):
    bucket = pickle.load(io.BytesIO(base64.b64decode(payload)))
    for place in bucket["metadata"]:
        flat = bucket["flattened_tensor"][place.start_idx : place.end_idx]
        yield place.name, flat.view(place.dtype).reshape(place.shape)


class Paused:
    """An idle engine's part in a session."""

    def __init__(self, receiver: ServerReceiver) -> None:
        self.receiver = receiver

    async def pause(self, mode, deadline_s):
        return 0

    async def resume(self, version): ...
    async def release_kv(self):
        return 0

    async def restore_kv(self): ...
    async def flush_kv(self): ...
    async def digest(self, role):
        return await self.receiver.digest(role)


class Joined:
    """A sender, a receiver and a fake server; each `sync` is a session."""

    def __init__(self, server: SGLang, client: Client, workers: int) -> None:
        self.server = server
        delivery = ByMemory(client, "cpu", workers)
        delivery.parcels = SharedParcel("cpu", 128), SharedParcel("cpu", 128)  # small, so that there are many
        self.receiver = ServerReceiver(
            client,
            "replica/0",
            make_reader("shared_memory", "replica/0"),
            delivery,
            shapes={name: tuple(t.shape) for name, t in TENSORS.items()},
            dtype="float32",
            device="cpu",
            workers=workers,
            draft=server.draft,
            sessions=server.sessions,
        )
        self.fleet = Fleet()
        self.fleet.add("replica/0", EngineSession("replica/0", Paused(self.receiver), self.receiver))
        self.rank = TensorRank("shared_memory")
        self.number = 0

    async def sync(self, tensors):
        self.number += 1
        self.rank.tensors = tensors
        settings = ParamSyncConfig(pause="abort")
        return await SyncSession({"trainer/0": self.rank}, self.fleet, settings).run(PolicyVersion(0, self.number))


@pytest.fixture
async def join():
    opened = []

    async def begin(*, sessions: bool = True, draft: bool = True, workers: int = 1) -> Joined:
        sglang = SGLang(sessions, draft)
        server = TestServer(sglang.app)
        await server.start_server()
        client = Client(str(server.make_url("")), "secret")
        opened.append((Joined(sglang, client, workers), client, server))
        return opened[-1][0]

    yield begin
    for joined, client, server in opened:
        await joined.receiver.close()
        joined.rank.close()
        await client.close()
        await server.close()


@pytest.mark.parametrize("sessions", [False, True], ids=["0.5.20", "0.5.22"])
async def test_every_tensor_reaches_its_model(join, sessions):
    joined = await join(sessions=sessions)
    for scale in (1, 2):  # the memory is reused
        weights = {name: scale * t for name, t in TENSORS.items()}
        report = await joined.sync(weights)
        assert not report.evicted
        held = {**joined.server.live["target"], **joined.server.live["draft"]}
        assert held.keys() == weights.keys()
        assert all(torch.equal(held[name], weights[name]) for name in weights)
        assert joined.server.version == f"0.{scale}"
    updates = ["update all", "update all", "update draft"]
    expected = ["begin", *updates, "end", "version"] if sessions else [*updates, "version"]
    assert joined.server.calls == 2 * expected


async def test_gpu_memory_is_reused_only_after_sglang_has_read_it(join, monkeypatch):
    """Not when SGLang has answered: then its copies are only queued."""
    joined = await join()
    joined.server.queues = True
    monkeypatch.setattr(joined.receiver._delivery, "_device", "cuda")
    monkeypatch.setattr(joined.receiver, "_checksums", None)
    weights = {name: 5 * t for name, t in TENSORS.items()}
    await joined.sync(weights)
    held = {**joined.server.live["target"], **joined.server.live["draft"]}
    assert all(torch.equal(held[name], weights[name]) for name in weights)


async def test_a_server_without_a_draft_is_sent_none(join):
    joined = await join(draft=False)
    assert not (await joined.sync(TENSORS)).evicted
    assert "update draft" not in joined.server.calls


@pytest.mark.parametrize("dropped", TENSORS)
async def test_a_tensor_that_the_server_skips_fails_the_sync(join, dropped):
    joined = await join()
    await joined.sync(TENSORS)
    joined.server.drops = dropped
    with pytest.raises(SyncError, match=rf"phase verify, replica/0.*{dropped}: sent, but no live parameter matches it"):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})
    assert not joined.receiver.intact()
    joined.server.drops = ""
    await joined.sync({name: t + 2 for name, t in TENSORS.items()})
    assert joined.receiver.intact()


async def test_if_values_cannot_be_compared_a_model_that_does_not_change_fails_the_sync(join):
    """For example with workers that hold parts of each tensor."""
    joined = await join(workers=2)
    await joined.sync(TENSORS)
    assert not (await joined.sync(TENSORS)).evicted
    joined.server.drops = "model.mtp_layers.0.input_proj.weight"
    with pytest.raises(SyncError, match="new weights were sent for the draft, but SGLang's did not change"):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})


async def test_if_values_cannot_be_compared_a_parameter_that_does_not_change_fails_the_sync(join):
    joined = await join(workers=2)
    await joined.sync(TENSORS)
    joined.server.drops = "model.embed_tokens.weight"
    with pytest.raises(SyncError, match=r"model\.embed_tokens\.weight: it changed, but SGLang\'s .* did not"):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})


async def test_a_failed_session_is_also_ended_at_the_server(join):
    joined = await join()
    joined.rank.break_at = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(SyncError, match="ran out of memory"):
        await joined.sync(TENSORS)
    assert not joined.server.open
    joined.rank.break_at = ""
    assert not (await joined.sync(TENSORS)).evicted


async def test_every_worker_gets_the_whole_adapter(join):
    joined = await join()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.randn(2, 3), f"{module}.lora_B.weight": torch.randn(5, 2)}
    adapter = AdapterSpec("policy", 2, 4.0, ("self_attn.q_proj",), "float32")
    await load_adapter(joined.receiver._client, adapter, 7, tensors, workers=2)
    (name,) = joined.server.adapters
    assert name == adapter_name(adapter, 7)
    assert all(torch.equal(joined.server.adapters[name][key], tensor) for key, tensor in tensors.items())


async def test_workers_that_do_not_join_a_group_fail_it_in_time(join):
    """No thread keeps waiting for them."""
    delivery = ByGroup((await join()).receiver._client, "gloo", workers=1)
    with pytest.raises(EngineDied, match=r"did not join a gloo group within 0\.5 s; restart the replica"):
        await delivery.open(0.5)
    async with asyncio.timeout(20):
        while any(thread.name.startswith("sglang-group") for thread in threading.enumerate()):
            await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="call `open` first"):
        await delivery.deliver(Parcel("cpu"), "all")


async def test_a_group_that_does_not_end_blocks_no_call(join, monkeypatch):
    joined, channel = await join(), StuckChannel()
    joined.server.joins = True
    monkeypatch.setattr(gloo.TRANSPORT, "open_channel", lambda *_: channel)
    delivery = ByGroup(joined.receiver._client, "gloo", workers=1)
    await delivery.open(60)
    parcel, tensor = delivery.parcels[0], torch.zeros(2)
    parcel.add((TensorSpec("w", "float32", (2,)), tensor))
    with pytest.raises(EngineError, match=r"refuses /update_weights_from_distributed \(404\)"):
        await delivery.deliver(parcel, "all")
    assert not channel.released.is_set()
    channel.released.set()


async def test_a_refusal_contains_the_server_s_message(join):
    joined = await join()
    client = Client(str(joined.receiver._client._url), "wrong")
    try:
        with pytest.raises(EngineError, match=r"refuses /model_info \(401\): Unauthorized"):
            await client.get("/model_info")
    finally:
        await client.close()
    client = Client("http://127.0.0.1:9", "key")
    try:
        with pytest.raises(EngineDied, match="does not answer /model_info"):
            await client.get("/model_info")
    finally:
        await client.close()


async def test_a_model_that_is_sent_unchanged_is_not_hashed_again(join, monkeypatch):
    joined = await join()
    await joined.sync(TENSORS)
    asked = []
    ask = joined.receiver.live_checksums
    monkeypatch.setattr(joined.receiver, "live_checksums", lambda role: asked.append(role) or ask(role))
    drafts = {name: t + 1 for name, t in TENSORS.items() if "mtp" in name}
    await joined.sync({**TENSORS, **drafts})
    assert asked == ["draft"]
    joined.rank.break_at = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(SyncError):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})
    joined.rank.break_at = ""
    await joined.sync({**TENSORS, **drafts})
    assert asked == ["draft", "target", "draft"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


@pytest.fixture
async def engine(checkpoint):
    """An engine whose server never finishes a pause, and the paths of its calls."""
    calls = []

    async def answer(request):
        calls.append(request.path)
        if request.path == "/pause_generation":
            await asyncio.sleep(60)
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/{path}", answer)
    server = TestServer(app)
    await server.start_server()
    client = Client(str(server.make_url("")), "secret")
    process = SimpleNamespace(client=client, ended=asyncio.get_running_loop().create_future())
    config = Config(
        model=ModelConfig(path=str(checkpoint)),
        rollout=RolloutConfig(engine=EngineConfig(name="sglang", slots=4, device="cpu")),
        param_sync=ParamSyncConfig(pause="keep"),
    )
    engine = SGLangEngine(process, config, "cpu", Recorder("replica/0"))
    yield engine, calls
    await client.close()
    await server.close()


async def test_a_pause_that_times_out_does_not_end_an_earlier_pause(engine):
    engine, calls = engine
    with pytest.raises(TimeoutError):
        await engine.pause("keep", 2.0)
    assert calls == ["/pause_generation"]
    assert engine.paused
    await engine.resume(PolicyVersion(0, 1))
    with pytest.raises(TimeoutError):
        await engine.pause("keep", 2.0)
    assert calls[-2:] == ["/pause_generation", "/continue_generation"]
    assert not engine.paused


async def test_nan_logits_end_a_request_with_an_error(engine):
    """SGLang replaces the sampled token with a stop token, and reports that the request stopped at it."""
    engine, _ = engine
    engine._version = PolicyVersion(0, 1)
    running = engine.request_type(request("nan", [1, 2], 8), PolicyVersion(0, 1), 0)
    engine._running["nan"] = running
    meta = {"completion_tokens": 1, "output_token_logprobs": [[None, 7, None]]}
    meta["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    engine._take(running, {"output_ids": [7], "meta_info": meta})
    batch = await engine.events()
    assert batch.finish == [FinishReason.ERROR]
    assert "its logits are NaN" in batch.errors["nan"]


async def test_a_request_that_sglang_refuses_ends_alone(engine):
    """A malformed grammar: SGLang runs the request for one token, without a logprob."""
    engine, _ = engine
    engine._version = PolicyVersion(0, 1)
    grammar = Grammar("regex", "[")
    running = engine.request_type(request("bad", [1], 8, stop_token_ids=(2,), grammar=grammar), PolicyVersion(0, 1), 0)
    engine._running["bad"] = running
    reason = {"type": "abort", "message": "Failed to compile regex grammar", "status_code": 400}
    spans = [{"version": "0.1", "start": 0, "end": 1}]
    meta = {"completion_tokens": 1, "finish_reason": reason, "weight_versions": spans}
    engine._take(running, {"output_ids": [7], "meta_info": meta})
    batch = await engine.events()
    assert (batch.finish, batch.tokens.tolist()) == ([FinishReason.ERROR], [])
    assert "Failed to compile" in batch.errors["bad"]
    assert not engine._running
