"""The native engine behind its interface: events, pause modes, KV release, weight updates, failures."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.config.schema import EngineConfig, MTPConfig
from asyncrl.models.checkpoint import is_draft, read_tensors, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.buckets import Bucket, TensorPart
from asyncrl.param_sync.digest import digest_tensors
from asyncrl.param_sync.manifest import Manifest, ManifestError, TensorSpec
from asyncrl.rollouter.engines.base import EngineError, Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

SPECULATION = MTPConfig(enable_rollout=True, num_speculative_tokens=2)
V0, V1 = PolicyVersion(0, 0), PolicyVersion(0, 1)
RAW = {
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": True,
}


def _save(path: Path, seed: int) -> Path:
    config = DecoderConfig.from_dict(RAW)
    decoder = Decoder(config)
    decoder.init_weights(seed, std=0.3)
    save_checkpoint(path, dict(decoder.named_parameters()), config)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("mimo"), seed=1)


@pytest.fixture
async def start(checkpoint):
    """Builds engines, and closes them after the test."""
    engines = []

    def build(slots=4, context=256, path=checkpoint, load_weights=True, **options):
        made_with = {name: options.pop(name) for name in ("recorder", "load_tokenizer", "mtp") if name in options}
        config = EngineConfig(slots=slots, max_context_tokens=context, **options)
        engine = NativeEngine(path, config, load_weights=load_weights, **made_with)
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        await engine.close()


def _request(id, new=10, tokens=(1, 2, 3), *, position=0, resumed=0, key=0, **sampling) -> Request:
    sampled = SamplingParams(**sampling)
    return Request(id, id, np.array(tokens, np.int32), 0, key, position, new, sampled, resumed=resumed)


class Collected:
    """Collects an engine's events, by request."""

    def __init__(self, engine):
        self.engine, self.tokens, self.versions, self.finish, self.errors = engine, {}, {}, {}, {}

    async def until(self, *ids):
        """Read events until these requests have ended."""
        while not all(id in self.finish for id in ids):
            self.add(await asyncio.wait_for(self.engine.events(), 20))
        return self

    async def until_tokens(self, id, count):
        while len(self.tokens.get(id, ())) < count:
            self.add(await asyncio.wait_for(self.engine.events(), 20))
        return self

    def add(self, events):
        for e, id in enumerate(events.ids):
            new = events.tokens[events.offsets[e] : events.offsets[e + 1]].tolist()
            self.tokens.setdefault(id, []).extend(new)
            self.versions.setdefault(id, []).extend([(events.versions[e], events.mixed_kv[e])] * len(new))
            if events.finish[e] is not None:
                self.finish[id] = events.finish[e]
        self.errors |= events.errors


async def test_requests_wait_for_the_first_version_and_every_token_carries_it(start):
    engine = start()
    await engine.submit([_request("a"), _request("b", 300)])
    assert (engine._core.waiting, engine._core.running, engine._core.version) == (2, 0, None)
    await engine.resume(V0)
    collected = await Collected(engine).until("a", "b")
    assert len(collected.tokens["a"]) == 10
    assert len(collected.tokens["b"]) == 253  # to the end of the context
    assert set(collected.versions["a"] + collected.versions["b"]) == {(V0, False)}
    assert engine._core.generated_tokens == 263


async def test_stop_tokens_end_a_request_and_stay_in_it(start):
    engine = start()
    await engine.resume(V0)
    await engine.submit([_request("free", 30)])
    free = (await Collected(engine).until("free")).tokens["free"]
    stop = free[7]
    await engine.submit([_request("stopped", 30, stop_token_ids=(stop,))])
    collected = await Collected(engine).until("stopped")
    assert collected.tokens["stopped"] == free[: free.index(stop) + 1]
    assert collected.finish["stopped"] is FinishReason.STOP


def _byte_tokenizer():
    """A real byte-level tokenizer whose 256 tokens are the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


async def test_stop_strings_match_only_the_request_s_own_tokens_even_across_an_abort(start):
    tokenizer = _byte_tokenizer()
    engine = start(load_tokenizer=lambda: tokenizer)
    await engine.resume(V0)
    await engine.submit([_request("free", 60, tokens=(65, 66), key=5)])
    free = (await Collected(engine).until("free")).tokens["free"]
    at = next(i for i in range(20, 58) if "\ufffd" not in tokenizer.decode(free[i : i + 2]))
    stop = tokenizer.decode(free[at : at + 2])
    end = next(n for n in range(1, 61) if stop in tokenizer.decode(free[:n]))
    begun = {"tokens": (65, 66, *free[: end - 1]), "position": end - 1, "key": 5, "stop_strings": (stop,)}
    await engine.submit(
        [
            _request("whole", 60, tokens=(65, 66), key=5, stop_strings=("never there", stop)),
            _request("rest", 60, **begun, resumed=end - 1),
            # the stop string, or its beginning, precedes the request's own tokens: it must not end the request
            _request("after", 3, tokens=(65, 66, *free[:end]), position=end, key=5, stop_strings=(stop,)),
            _request("turn", 1, **begun),
        ]
    )
    collected = await Collected(engine).until("whole", "rest", "after", "turn")
    assert collected.tokens["whole"] == free[:end]
    assert collected.tokens["rest"] == free[end - 1 : end]
    assert collected.finish["whole"] is collected.finish["rest"] is FinishReason.STOP
    assert collected.tokens["after"] == free[end : end + 3]
    assert (collected.tokens["turn"], collected.finish["turn"]) == (free[end - 1 : end], FinishReason.LENGTH)


async def test_a_deterministic_engine_that_computes_a_request_s_tokens_again_shows_that_it_lives(start, monkeypatch):
    monkeypatch.setattr("asyncrl.rollouter.engines.native.engine.ALIVE_EVERY_S", 0.0)
    engine = start(deterministic=True, context=512)
    await engine.resume(V0)
    again = tuple(i % 50 for i in range(200))
    await engine.submit([_request("on", 5, tokens=(1, 2, 3, *again), position=200, resumed=200)])
    batches = []
    while not any(batch.finish for batch in batches):
        batches.append(await asyncio.wait_for(engine.events(), 20))
    assert not batches[0].ids
    assert sum(len(batch.tokens) for batch in batches) == 5


async def test_abort_ends_the_given_requests_with_their_tokens_and_leaves_the_others(start):
    engine = start(slots=2, context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 3000), _request("b", 3000), _request("waiting", 5)])
    collected = await Collected(engine).until_tokens("a", 1)
    await engine.abort(["a", "waiting", "unknown"])
    await collected.until("a", "waiting")
    assert collected.finish == {"a": FinishReason.ABORT, "waiting": FinishReason.ABORT}
    assert 1 <= len(collected.tokens["a"]) < 3000
    assert collected.tokens["waiting"] == []
    count = len(collected.tokens["b"])
    await collected.until_tokens("b", count + 5)


async def test_pause_abort_aborts_all_requests_and_later_ones_wait_for_the_next_version(start):
    engine = start(slots=2, context=4096)
    await engine.resume(V0)
    await engine.submit([_request(str(i), 3000) for i in range(3)])
    collected = await Collected(engine).until_tokens("0", 1)
    assert await engine.pause("abort", 10) == 3
    await engine.submit([_request("later", 5)])
    await collected.until("0", "1", "2")
    assert set(collected.finish.values()) == {FinishReason.ABORT}
    assert engine._core.waiting == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.events(), 0.2)  # no events while paused
    await engine.resume(V1)
    await collected.until("later")
    assert set(collected.versions["later"]) == {(V1, False)}


@pytest.mark.parametrize("mtp", [None, SPECULATION], ids=["plain", "speculative"])
@pytest.mark.parametrize("flush", [False, True])
async def test_pause_keep_continues_under_the_next_version(start, flush, mtp):
    engine = start(context=4096, mtp=mtp)
    await engine.resume(V0)
    await engine.submit([_request("a", 1500)])
    collected = await Collected(engine).until_tokens("a", 1)
    assert await engine.pause("keep", 10) == 1
    if flush:
        await engine.flush_kv()
    await engine.resume(V1)
    await collected.until("a")
    versions = collected.versions["a"]
    assert len(versions) == 1500
    assert versions == sorted(versions)
    assert set(versions) == {(V0, False), (V1, not flush)}


async def test_pause_wait_lets_submitted_requests_finish_and_holds_back_later_ones(start):
    engine = start(slots=2, context=4096)
    await engine.resume(V0)
    await engine.submit([_request(str(i), 400) for i in range(3)])
    pausing = asyncio.ensure_future(engine.pause("wait", 30))
    await asyncio.sleep(0)
    await engine.submit([_request("later", 5)])
    assert await pausing == 3
    collected = await Collected(engine).until("0", "1", "2")
    assert set(collected.finish.values()) == {FinishReason.LENGTH}
    assert (engine._core.running, engine._core.waiting) == (0, 1)
    await engine.resume(V1)
    assert set((await collected.until("later")).versions["later"]) == {(V1, False)}


async def test_pause_wait_raises_at_its_deadline_and_the_engine_continues(start):
    engine = start(context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 4000)])
    with pytest.raises(TimeoutError, match=r"pause\('wait'\) did not complete within 0.05 s, 1 requests run"):
        await engine.pause("wait", 0.05)
    collected = await Collected(engine).until_tokens("a", 1)
    await collected.until_tokens("a", len(collected.tokens["a"]) + 10)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_a_pause_that_is_cancelled_is_taken_back(start, mode):
    engine = start(context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 2000)])
    pausing = asyncio.create_task(engine.pause(mode, 30))
    await asyncio.sleep(0.02 if mode == "wait" else 0)  # the abort has not been answered yet
    pausing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pausing
    await engine.submit([_request("later", 5)])
    assert set((await Collected(engine).until("later")).versions["later"]) == {(V0, False)}


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_release_kv_frees_memory_and_restored_kv_generates_the_same(start):
    engine = start(slots=32, context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 8, key=3)])
    before = (await Collected(engine).until("a")).tokens["a"]
    with pytest.raises(EngineError, match="pause it first"):
        await engine.release_kv()
    await engine.pause("abort", 10)
    engine._core.kv._data.fill_(0.5)  # make every page resident
    held, resident = engine._core.kv.nbytes, _resident_bytes()
    assert held == 2 * 2 * 32 * 1 * 4096 * 32 * 4
    assert await engine.release_kv() == held
    assert engine._core.kv.nbytes == 0
    assert resident - _resident_bytes() > 0.9 * held
    with pytest.raises(EngineError, match="restore_kv first"):
        await engine.resume(V0)
    await engine.restore_kv()
    await engine.resume(V0)
    await engine.submit([_request("a", 8, key=3)])
    assert (await Collected(engine).until("a")).tokens["a"] == before


async def test_kv_of_kept_requests_is_not_released(start):
    engine = start(context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 4000)])
    await Collected(engine).until_tokens("a", 1)
    await engine.pause("keep", 10)
    with pytest.raises(EngineError, match="1 requests still hold KV"):
        await engine.release_kv()


def _bucket(session: str, tensors: dict[str, torch.Tensor]) -> Bucket:
    parts, data = [], bytearray()
    for name, tensor in tensors.items():
        parts.append(TensorPart(name, 0, tensor.nbytes, len(data)))
        data += tensor.contiguous().numpy().tobytes()
    return Bucket(session, 0, 0, tuple(parts), memoryview(data), None)


def _manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    specs = [TensorSpec(n, "float32", tuple(t.shape), "draft" if is_draft(n) else "target") for n, t in tensors.items()]
    return Manifest((*specs, TensorSpec("lm_head.weight", "float32", (256, 64), tied_to="model.embed_tokens.weight")))


@pytest.mark.parametrize("mtp", [None, SPECULATION], ids=["plain", "speculative"])
async def test_a_sync_replaces_the_weights_of_target_and_draft_in_place(start, tmp_path, mtp):
    fresh = _save(tmp_path, seed=2)
    tensors = read_tensors(fresh)
    engine, expected = start(mtp=mtp), start(path=fresh, mtp=mtp)
    assert (engine._core._speculator is not None) == (mtp is not None)
    await engine.resume(V0)
    receiver = engine._weights
    receiver.open("s", _manifest(tensors))
    await engine.pause("abort", 10)
    receiver.take(_bucket("s", tensors))
    receiver.verify()
    receiver.commit(V1)
    with pytest.raises(EngineError, match=r"last committed weights are of version 0\.1"):
        await engine.resume(V0)
    for role in ("target", "draft"):
        of_role = ((n, t) for n, t in tensors.items() if is_draft(n) == (role == "draft"))
        assert await engine.digest(role) == digest_tensors(of_role)
    collected = []
    for e in (engine, expected):
        await e.resume(V1)
        await e.submit([_request("a", 20)])
        collected.append((await Collected(e).until("a")).tokens["a"])
    assert collected[0] == collected[1]


async def test_an_engine_does_not_resume_after_a_sync_that_failed_during_its_transfer(start, checkpoint):
    engine = start()
    tensors = read_tensors(checkpoint)
    receiver = engine._weights
    receiver.open("s", _manifest(tensors))
    receiver.take(_bucket("s", {"model.norm.weight": tensors["model.norm.weight"]}))
    receiver.abort()
    with pytest.raises(EngineError, match="interrupted"):
        await engine.resume(V0)


async def test_a_manifest_that_does_not_fit_the_model_is_refused_by_name(start, checkpoint):
    receiver = start()._weights
    tensors = read_tensors(checkpoint)
    tensors["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(ManifestError, match=r"model\.norm\.weight.*63.*64"):
        receiver.open("s", _manifest(tensors))


async def test_without_loaded_weights_the_engine_generates_only_after_a_commit(start, checkpoint):
    engine = start(load_weights=False)
    with pytest.raises(EngineError, match="nothing was committed"):
        await engine.resume(V0)
    tensors = read_tensors(checkpoint)
    receiver = engine._weights
    receiver.open("s", _manifest(tensors))
    receiver.take(_bucket("s", tensors))
    receiver.verify()
    receiver.commit(V0)
    await engine.resume(V0)
    await engine.submit([_request("a", 3)])
    assert len((await Collected(engine).until("a")).tokens["a"]) == 3


async def test_events_come_in_batches_not_per_step(start):
    engine = start(context=4096)
    await engine.resume(V0)
    await engine.submit([_request("a", 2000)])
    collected, calls = Collected(engine), 0
    begin_s = time.monotonic()
    while "a" not in collected.finish:
        collected.add(await engine.events())
        calls += 1
    assert calls <= (time.monotonic() - begin_s) / 0.05 + 2
    assert calls < 2000


async def test_a_failure_in_the_loop_reaches_every_caller(start):
    engine = start(context=4096)
    await engine.resume(V0)
    listening = asyncio.ensure_future(engine.events())
    await asyncio.sleep(0.02)
    engine._core.model.embed = torch.zeros(1, 64)  # the next step reads past its end
    await engine.submit([_request("a", 5)])
    with pytest.raises(IndexError):
        await asyncio.wait_for(listening, 10)
    for call in (engine.events(), engine.abort([]), engine.submit([]), engine.pause("wait", 1)):
        with pytest.raises(IndexError):
            await call


@pytest.mark.skipif(sys.platform != "linux", reason="needs per-thread priorities")
async def test_the_decoding_thread_has_the_lowest_priority(start):
    engine = start()
    await engine.abort([])  # returns once the thread runs
    niceness = lambda thread: os.getpriority(os.PRIO_PROCESS, thread.native_id)
    assert niceness(engine._thread) == niceness(threading.main_thread()) + 10
    assert os.sched_getscheduler(engine._thread.native_id) != os.SCHED_IDLE
    idle, normal = start(cpu_priority="idle"), start(cpu_priority="normal")
    await asyncio.gather(idle.abort([]), normal.abort([]))
    assert os.sched_getscheduler(idle._thread.native_id) == os.SCHED_IDLE
    assert niceness(normal._thread) == niceness(threading.main_thread())


async def test_a_closed_engine_refuses_calls_and_fails_pending_ones(start):
    engine = start()
    listening = asyncio.ensure_future(engine.events())
    await asyncio.sleep(0.02)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await listening
    with pytest.raises(EngineError, match="closed"):
        await engine.submit([])


async def test_an_abandoned_wait_for_events_loses_none(start):
    engine = start()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.events(), 0.01)
    await engine.submit([_request("a", 40)])
    await engine.resume(V0)
    assert len((await Collected(engine).until("a")).tokens["a"]) == 40


async def test_occupancy_and_token_counts_are_recorded(start):
    recorder = Recorder("replica/0")
    engine = start(slots=4, recorder=recorder)
    await engine.resume(V0)
    await engine.submit([_request("short", 20), _request("long", 200)])
    await Collected(engine).until("short", "long")
    await engine.pause("wait", 10)
    batch = recorder.drain()
    spans = {span.name: span for span in batch.spans}
    assert not batch.open_spans
    assert spans["rollout/half_busy"].start_s >= spans["rollout/generate"].start_s
    assert spans["rollout/half_busy"].end_s < spans["rollout/generate"].end_s
    assert batch.counters["rollout/tokens"] == 220
    assert batch.counters["rollout/prompt/prefilled"] == 4


@pytest.mark.parametrize(
    ("written", "option", "held"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
    ],
)
async def test_weights_are_held_in_the_checkpoint_s_kind_of_dtype_by_default(
    start, checkpoint, tmp_path, written, option, held
):
    dtype = getattr(torch, written)
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(checkpoint).items()}
    save_checkpoint(tmp_path, tensors, DecoderConfig.from_dict({**RAW, "torch_dtype": written}))
    engine = start(path=tmp_path, dtype=option)
    target = [(name, tensor.to(held)) for name, tensor in tensors.items() if not is_draft(name)]
    assert await engine.digest("target") == digest_tensors(target)
    await engine.resume(V0)
    await engine.submit([_request("a", 5)])
    assert len((await Collected(engine).until("a")).tokens["a"]) == 5


def test_a_context_beyond_the_model_s_is_refused(checkpoint):
    with pytest.raises(EngineError, match="5000"):
        NativeEngine(checkpoint, EngineConfig(max_context_tokens=5000))
