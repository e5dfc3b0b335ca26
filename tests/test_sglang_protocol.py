"""What the SGLang adapter says to a server, held against a small one of our own: it answers as SGLang 0.5.20 and 0.5.22
do (before 0.5.22 there are no update sessions), and opens what it is sent as SGLang's workers open it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import pickle
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.schema import (
    Config,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    MTPConfig,
    ParamSyncConfig,
    RolloutConfig,
)
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.param_sync.endpoint import ReplicaEndpoint
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.manifest import AdapterSpec, TensorSpec
from asyncrl.param_sync.session import SyncSession
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.rollouter.engine import EngineDied, EngineError
from asyncrl.rollouter.engines.sglang import checksums
from asyncrl.rollouter.engines.sglang.arguments import command_line, server_arguments
from asyncrl.rollouter.engines.sglang.checksums import SentChecksums
from asyncrl.rollouter.engines.sglang.client import Client
from asyncrl.rollouter.engines.sglang.delivery import ByMemory, Parcel, SharedParcel
from asyncrl.rollouter.engines.sglang.group_delivery import ByGroup
from asyncrl.rollouter.engines.sglang.intake import ServerIntake
from asyncrl.rollouter.engines.sglang.lora import adapter_name, load_adapter
from asyncrl.rollouter.engines.sglang.server import Server
from asyncrl.sample import PolicyVersion
from tests.support.engine_replica import TensorRank

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).view(4, 3),
    "model.layers.0.mlp.gate_proj.weight": torch.full((2, 3), 2.0),
    "model.layers.0.mlp.up_proj.weight": torch.full((2, 3), 3.0),
    "model.mtp_layers.0.input_proj.weight": torch.full((3, 6), 4.0),
}


class SGLang:
    """A server that holds tensors by role, and tells of them as SGLang tells of its models'."""

    def __init__(self, sessions: bool, draft: bool) -> None:
        self.sessions, self.draft = sessions, draft
        self.open = False
        self.calls: list[str] = []
        self.live: dict[str, dict[str, torch.Tensor]] = {"target": {}, "draft": {}}
        self.version = "default"
        self.drops = ""  # a tensor that its loader passes over
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
                self.live[role][name] = tensor
        return web.json_response({"success": True, "message": "Success"})

    async def join_group(self, request):
        await asyncio.sleep(60)  # its workers hang

    async def load_adapter(self, request):
        body = await request.json()
        assert body["load_format"] == "flattened_bucket"
        assert body["config_dict"] == {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}
        first, second = ([*opened(payload)] for payload in body["serialized_named_tensors"])
        assert [name for name, _ in first] == [name for name, _ in second]
        sums = {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in first}
        assert body["expected_checksums"] == sums
        self.adapters[body["lora_name"]] = dict(first)
        return web.json_response({"success": True})

    async def check(self, request):
        role = (await request.json())["selector"]
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
        yield place.name, flat.view(place.dtype).reshape(place.shape).clone()


class Paused:
    """An engine's part in a session, of one that has nothing to do."""

    def __init__(self, intake: ServerIntake) -> None:
        self.intake = intake

    async def pause(self, mode, deadline_s):
        return 0

    async def resume(self, version): ...
    async def release_kv(self):
        return 0

    async def restore_kv(self): ...
    async def flush_kv(self): ...
    async def digest(self, role):
        return await self.intake.digest(role)


class Joined:
    """A sender, an intake and a server of ours, in a sync session each time."""

    def __init__(self, server: SGLang, client: Client, workers: int) -> None:
        self.server = server
        delivery = ByMemory(client, "cpu", workers)
        delivery.parcels = SharedParcel("cpu", 128), SharedParcel("cpu", 128)  # so that there are many
        self.intake = ServerIntake(
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
        self.fleet.add("replica/0", ReplicaEndpoint("replica/0", Paused(self.intake), self.intake))
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
        await joined.intake.close()
        joined.rank.close()
        await client.close()
        await server.close()


@pytest.mark.parametrize("sessions", [False, True], ids=["0.5.20", "0.5.22"])
async def test_every_tensor_reaches_the_model_that_it_is_for(join, sessions):
    joined = await join(sessions=sessions)
    for scale in (1, 2):  # the memory is used again
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


async def test_a_server_without_a_draft_is_sent_none(join):
    joined = await join(draft=False)
    assert not (await joined.sync(TENSORS)).evicted
    assert "update draft" not in joined.server.calls


@pytest.mark.parametrize("dropped", TENSORS)
async def test_a_tensor_that_the_server_passes_over_fails_the_sync(join, dropped):
    joined = await join()
    await joined.sync(TENSORS)
    joined.server.drops = dropped
    with pytest.raises(SyncError, match=rf"phase verify, replica/0.*{dropped}: sent, and no live parameter is it"):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})
    assert not joined.intake.intact()
    joined.server.drops = ""
    await joined.sync({name: t + 2 for name, t in TENSORS.items()})
    assert joined.intake.intact()


async def test_where_values_cannot_be_compared_a_model_that_does_not_change_fails_the_sync(join):
    """As with workers that have a part of each tensor."""
    joined = await join(workers=2)
    await joined.sync(TENSORS)
    assert not (await joined.sync(TENSORS)).evicted
    joined.server.drops = "model.mtp_layers.0.input_proj.weight"
    with pytest.raises(SyncError, match="the draft was sent other weights, and SGLang's are what they were"):
        await joined.sync({name: t + 1 for name, t in TENSORS.items()})


async def test_a_session_that_breaks_is_ended_at_the_server_too(join):
    joined = await join()
    joined.rank.break_at = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(SyncError, match="ran out of memory"):
        await joined.sync(TENSORS)
    assert not joined.server.open
    joined.rank.break_at = ""
    assert not (await joined.sync(TENSORS)).evicted


async def test_an_adapter_is_handed_over_whole_to_every_worker(join):
    joined = await join()
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": torch.randn(2, 3), f"{module}.lora_B.weight": torch.randn(5, 2)}
    adapter = AdapterSpec("policy", 2, 4.0, ("self_attn.q_proj",), "float32")
    await load_adapter(joined.intake._client, adapter, 7, tensors, workers=2)
    (name,) = joined.server.adapters
    assert name == adapter_name(adapter, 7)
    assert all(torch.equal(joined.server.adapters[name][key], tensor) for key, tensor in tensors.items())


async def test_workers_that_do_not_join_a_group_are_given_up_in_time(join):
    """And nobody goes on waiting for them here."""
    delivery = ByGroup((await join()).intake._client, "gloo", workers=1)
    with pytest.raises(EngineDied, match=r"did not join a gloo group within 0\.5 s; the replica has to be started"):
        await delivery.open(0.5)
    async with asyncio.timeout(20):
        while any(thread.name.startswith("sglang-group") for thread in threading.enumerate()):
            await asyncio.sleep(0.05)
    with pytest.raises(EngineError, match="a session begins with `open`"):
        await delivery.deliver(Parcel("cpu"), "all")


async def test_a_refusal_says_what_the_server_said(join):
    joined = await join()
    client = Client(str(joined.intake._client._url), "wrong")
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


SERVER_WITH_A_CHILD = """
import multiprocessing, time

def run_server(arguments):
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("later_s", [0.0, 3.0], ids=["at-once", "later"])
def test_a_server_s_children_end_with_it_however_early_it_is_killed(tmp_path, later_s):
    """These never come to what SGLang's own do about it when they have imported everything."""
    modules = {
        "launch_server": SERVER_WITH_A_CHILD,
        "srt/plugins": "def load_plugins(): pass",
        "srt/server_args": "def prepare_server_args(words): return words",
    }
    for name, text in modules.items():
        path = tmp_path / "sglang" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    server = subprocess.Popen(
        [sys.executable, "-m", "asyncrl.rollouter.engines.sglang.serve", str(os.getpid())],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # as a replica starts it
    )
    with server:
        print("[]", file=server.stdin, flush=True)
        server.stdin.close()
        child = psutil.Process(int(server.stdout.readline()))
        time.sleep(later_s)
        server.kill()
    deadline = time.monotonic() + 30
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    left = child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    if left:
        child.kill()
    assert not left


def test_checksums_know_what_is_fused_and_what_is_shared():
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("v", "q", "k")]
    tensors = {name: torch.randn(2, 3, generator=generator) for name in [*names, "model.norm.weight"]}
    tensors["mtp.layers.0.fc.weight"] = torch.randn(2, 3, generator=generator)
    specs = {n: TensorSpec(n, "float32", (2, 3), "draft" if "mtp" in n else "target") for n in tensors}
    sent = SentChecksums(specs.values())
    for name, tensor in tensors.items():
        sent.add(specs[name], tensor)

    def live(*parts):
        return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]

    v, q, k, norm, fc = tensors.values()
    assert sent.differences("target", [live(q, k, v), live(norm)]) == []
    assert sent.differences("target", [live(q), live(k), live(v), live(norm)]) == []
    (stale,) = sent.differences("target", [live(q, k, v), live(norm), live(norm + 1)])
    assert stale == "1 live parameters of the target are none that were sent"
    assert sent.differences("target", [live(q, k, v)]) == ["model.norm.weight: sent, and no live parameter is it"]
    assert len(sent.differences("target", [live(k, q, v), live(norm)])) == 4
    assert sent.differences("draft", [live(fc), live(norm)], shared=True) == []
    later = SentChecksums([specs["mtp.layers.0.fc.weight"]], sent)  # the draft alone, beside the same target
    later.add(specs["mtp.layers.0.fc.weight"], fc + 1)
    assert later.differences("draft", [live(fc + 1), live(norm)], shared=True) == []
    assert len(sent.differences("draft", [live(fc), live(norm)])) == 1


def test_what_is_kept_as_one_is_hashed_once_when_that_is_known(monkeypatch):
    hashed = []
    sha256 = checksums._sha256
    monkeypatch.setattr(checksums, "_sha256", lambda tensors: hashed.append(len(tensors)) or sha256(tensors))
    names = [f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    specs = [TensorSpec(name, "float32", (2, 3)) for name in names]
    last = None
    for scale in (1, 2):
        hashed.clear()
        tensors = [scale * (i + 1) * torch.ones(2, 3) for i in range(3)]
        last = SentChecksums(specs, last)
        for spec, tensor in zip(specs, tensors):
            last.add(spec, tensor)
        live = [sha256(tensors[:2]), sha256(tensors[2:])]
        assert last.differences("target", live) == []
        assert last.differences("target", live[1:])[0] == f"{names[0]}: sent, and no live parameter is it"
        assert sorted(hashed) == ([1, 1, 1, 2] if scale == 1 else [1, 2])


async def test_a_model_that_was_sent_again_is_not_hashed_again(join, monkeypatch):
    joined = await join()
    await joined.sync(TENSORS)
    asked = []
    ask = joined.intake.live_checksums
    monkeypatch.setattr(joined.intake, "live_checksums", lambda role: asked.append(role) or ask(role))
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


def test_parcels_without_padding_hold_what_begins_at_a_multiple_of_its_element():
    parcel = Parcel("cpu", 64)
    odd, wide = TensorSpec("odd", "bfloat16", (3,)), TensorSpec("wide", "float32", (1,))
    parcel.add(odd, torch.ones(3, dtype=torch.bfloat16))
    assert not parcel.takes(wide)
    assert parcel.takes(TensorSpec("narrow", "bfloat16", (1,)))
    assert not parcel.takes(TensorSpec("large", "bfloat16", (30,)))
    assert parcel.flat().numel() == odd.nbytes


class TestArguments:
    def config(self, checkpoint, mtp=None, **engine):
        options = {"name": "sglang", "slots": 4, "max_context_tokens": 100, "device": "cpu", **engine}
        return Config(
            model=ModelConfig(path=str(checkpoint)),
            rollout=RolloutConfig(engine=EngineConfig(**options)),
            mtp=mtp or MTPConfig(),
        )

    def test_a_draft_is_a_chain_of_as_many_tokens_as_the_config_says(self, checkpoint):
        plain = server_arguments(self.config(checkpoint), "cpu")
        assert not any(name.startswith("speculative") for name in plain)
        config = self.config(checkpoint, MTPConfig(enable_rollout=True, num_speculative_tokens=3))
        drafting = server_arguments(config, "cuda")
        assert drafting["speculative_algorithm"] == "NEXTN"
        assert drafting["speculative_num_steps"] == 3
        assert drafting["speculative_eagle_topk"] == 1
        assert drafting["speculative_num_draft_tokens"] == 4

    def test_adapters_have_room_beside_what_they_target(self, checkpoint):
        config = self.config(checkpoint)
        assert "enable_lora" not in server_arguments(config, "cpu")
        config.model.lora = LoraConfig(rank=8, target_modules=["self_attn.q_proj", "down_proj"])
        arguments = server_arguments(config, "cuda")
        assert (arguments["max_lora_rank"], arguments["max_loras_per_batch"]) == (8, 2)
        assert arguments["lora_target_modules"] == ["down_proj", "q_proj"]
        assert "lora_backend" not in arguments
        assert server_arguments(config, "cpu")["lora_backend"] == "torch_native"
        config.async_training.staleness_threshold = 2
        config.param_sync.in_flight = "finish"
        assert server_arguments(config, "cuda")["max_loras_per_batch"] == 4

    def test_a_group_over_nccl_leaves_the_first_gpu_to_the_replicas_process(self, checkpoint):
        config = self.config(checkpoint, delivery="nccl")
        assert server_arguments(config, "cuda")["base_gpu_id"] == 1

    def test_what_follows_from_other_options_is_refused(self, checkpoint):
        with pytest.raises(EngineError, match=r"api_key, tp_size follow from other options"):
            server_arguments(self.config(checkpoint, args={"tp_size": 2, "api_key": "x"}), "cpu")
        with pytest.raises(EngineError, match=r"raise rollout\.replicas"):
            server_arguments(self.config(checkpoint, args={"dp_size": 2}), "cpu")

    def test_further_arguments_reach_the_command_line(self, checkpoint):
        options = {"ep_size": 2, "enable_dp_attention": True, "dp_size": 2, "disable_radix_cache": False}
        options |= {"json_model_override_args": {"a": 1}, "cuda_graph_bs_decode": [1, 2], "kv_events_config": "-x"}
        words = command_line(server_arguments(self.config(checkpoint, args=options), "cuda"))
        assert {"--ep-size=2", "--dp-size=2", '--json-model-override-args={"a": 1}', "--kv-events-config=-x"} <= {
            *words
        }
        at = words.index("--cuda-graph-bs-decode")
        assert words[at + 1 : at + 3] == ["1", "2"]
        assert "--enable-dp-attention" in words
        assert not any("radix" in word for word in words)


async def test_a_server_that_does_not_start_is_told_by_its_last_line(capfd):
    """Its whole output is told as it comes."""
    no_python = {"PYTHONHOME": "/nowhere"}
    with pytest.raises(EngineError) as raised:
        await Server.start({"device": "cpu"}, no_python)
    last_line = capfd.readouterr().err.rstrip().splitlines()[-1]
    assert str(raised.value) == (
        f"SGLang's server process is gone (exit status 1) before it was ready; its last line: {last_line} "
        "(without a GPU it needs stand-ins: see configs/sglang_cpu.yaml)"
    )
