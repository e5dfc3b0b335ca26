"""LoRA from the torch trainer to real vLLM on the CPU, over real sessions: as adapters, beside a draft, and merged.

A replica takes adapters, others have a draft that speculates beside them, requests that finish on theirs, or merged
weights; the tests of each go on where the one before ended.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from asyncrl.config.schema import EngineConfig
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.param_sync.adapters import adapter_shapes
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import ManifestError, is_adapter
from asyncrl.rollouter.engines.vllm.engine import VLLMEngine
from asyncrl.telemetry.recorder import Recorder
from asyncrl.trainer.rank import TrainerRank
from tests.support.lora import Heard, LoraTrainer, lora_config, requests, samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


async def started(checkpoint, adapters="adapter", in_flight="move", workers=1, **options):
    """A trainer and an engine; the process group of the trainer is the process's."""
    config = lora_config(str(checkpoint), **options)
    config.param_sync.adapters, config.param_sync.in_flight = adapters, in_flight
    config.async_training.staleness_threshold = 2
    config.rollout.engine = EngineConfig(
        name="vllm",
        slots=8,
        max_context_tokens=1024,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=workers,
        args={"block_size": 32},
    )
    engine = await VLLMEngine.start(config, recorder=Recorder("replica/0"))
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    trainer = LoraTrainer(rank, config)
    trainer.join("replica/0", engine)
    return trainer, engine


async def ended(trainer, engine):
    await trainer.close()
    await engine.close()
    trainer.rank.close()


@pytest_asyncio.fixture(scope="class", loop_scope="module")
async def pair(request, checkpoint):
    made = await started(checkpoint, **request.param)
    yield made
    await ended(*made)


async def follow(trainer, engine, steps):
    """Each version's samples have the trainer's logprobs; returns what each sync sent."""
    sent, before = [], None
    for step in range(steps):
        report = await trainer.sync()
        assert not report.evicted
        temperature = 0.7 if step % 2 else 1.0
        samples = await samples_of(engine, requests(4, temperature=temperature))
        assert trainer.error(samples, temperature) < 1e-4
        assert {span.version for s in samples for span in s.spans} == {trainer.version}
        assert before is None or trainer.error(before, 1.0) > 1e-2  # it is another policy by now
        trainer.learn(samples)
        before = samples if temperature == 1.0 else None
        sent.append(report.nbytes)
    return sent


@pytest.mark.parametrize("pair", [{}], indirect=True)
class TestAdapters:
    async def test_each_version_is_the_base_with_its_adapter_and_the_base_travels_once(self, pair, checkpoint):
        trainer, engine = pair
        sent = await follow(trainer, engine, 5)
        manifest = trainer.rank.manifest()
        assert sent == [manifest.nbytes] + [manifest.without_base().nbytes] * 4
        assert sent[0] >= sum(t.nbytes for t in read_tensors(checkpoint).values())

    async def test_greedy_follows_the_adapter_and_not_a_stale_prefix(self, pair):
        trainer, engine = pair
        for _ in range(2):
            await trainer.sync()
            for _ in range(2):  # the second one from the prefix cache
                samples = await samples_of(engine, requests(2, temperature=0.0))
                assert trainer.error(samples, 1.0) < 1e-4
            trainer.learn(await samples_of(engine, requests(4)))

    @pytest.mark.parametrize("kv", ["recompute", "keep"])
    async def test_requests_that_are_kept_go_on_under_the_new_adapter(self, pair, kv):
        trainer, engine = pair
        await trainer.sync()
        trainer.learn(await samples_of(engine, requests(4)))
        await engine.submit(requests(2, new=300, temperature=0.7))
        heard = Heard(engine)
        await heard.of(["r0", "r1"], tokens=5)
        await trainer.sync(pause="keep", kv=kv)
        for sample in await heard.of(["r0", "r1"]):
            new = sample.spans[-1]
            assert (new.version, new.mixed_kv) == (trainer.version, kv == "keep")
            error = np.abs(trainer.scores([sample], 0.7) - sample.logprobs)[new.start :].max()
            assert (error < 1e-4) == (kv == "recompute")

    async def test_a_sender_that_breaks_off_leaves_the_old_adapter_serving(self, pair):
        trainer, engine = pair
        await trainer.sync()
        served, of_served = trainer.version, trainer.rank.manifest()
        greedy = await samples_of(engine, requests(1, temperature=0.0))
        trainer.learn(await samples_of(engine, requests(4)))
        export = trainer.rank.export

        def broken(base):
            for number, item in enumerate(export(base)):
                if number == 5:
                    raise RuntimeError("the trainer ran out of memory")
                yield item

        trainer.rank.export = broken
        with pytest.raises(SyncError, match="ran out of memory"):
            await trainer.sync()
        assert trainer.fleet.routable == {"replica/0": served}
        again = await samples_of(engine, requests(1, temperature=0.0))
        assert np.array_equal(again[0].tokens, greedy[0].tokens)
        assert again[0].spans[-1].version == served
        trainer.rank.export = export
        report = await trainer.sync()
        assert report.nbytes == of_served.without_base().nbytes
        assert trainer.error(await samples_of(engine, requests(4, temperature=0.7)), 0.7) < 1e-4

    async def test_a_sync_without_its_adapter_is_refused_before_anything_is_paused(self, pair, monkeypatch):
        trainer, engine = pair
        await trainer.sync()
        served, manifest = trainer.version, trainer.rank.manifest()
        lacks = dataclasses.replace(
            manifest, tensors=tuple(t for t in manifest if not t.name.endswith("lora_A.weight"))
        )
        none = dataclasses.replace(lacks, tensors=tuple(t for t in manifest if not is_adapter(t.name)), adapter=None)
        for sent, message in ((lacks, "adapter policy .* is not whole"), (none, "the sender's manifest has none")):
            monkeypatch.setattr(trainer.rank, "manifest", lambda sent=sent: sent)
            with pytest.raises(ManifestError, match=message):
                await trainer.sync()
            assert not engine.paused
        assert trainer.fleet.routable == {"replica/0": served}

    async def test_it_goes_with_the_base_again_where_another_replica_needs_that(self, pair):
        """The sync is planned for all; vLLM drops its adapters when it updates the model."""
        trainer, engine = pair
        trainer._endpoints[0]._intake._has_base = False
        assert (await follow(trainer, engine, 2))[0] == trainer.rank.manifest().nbytes

    async def test_vllm_reads_the_exported_adapter_as_pefts(self, pair, tmp_path):
        trainer, _ = pair
        trainer.rank.export_hf(tmp_path)
        peft = PEFTHelper.from_local_dir(str(tmp_path), None)
        spec = trainer.rank.manifest().adapter
        lora = LoRAModel.from_local_checkpoint(
            str(tmp_path), set(spec.target_modules), peft, lora_model_id=7, device="cpu", dtype=torch.float32
        )
        found = {}
        for module, weights in lora.loras.items():
            shape = (weights.lora_b.shape[0], weights.lora_a.shape[1])
            found |= dict(zip(adapter_shapes(module, shape, spec.r), (weights.lora_a, weights.lora_b), strict=True))
            assert weights.scaling == spec.alpha / spec.r
        sent = {name: tensor for name, tensor in trainer.rank.export(base=False) if is_adapter(name)}
        assert found.keys() == sent.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in sent.items())


SPECULATING = {"enable_rollout": True, "num_speculative_tokens": 2}
LEARNING = {**SPECULATING, "enable_train": True, "learning_rate": 1e-3}


@pytest.mark.parametrize("pair", [SPECULATING, LEARNING], indirect=True, ids=["frozen", "learning"])
class TestDraft:
    async def test_a_draft_that_learns_travels_with_each_adapter(self, pair):
        trainer, engine = pair
        sent = await follow(trainer, engine, 4)
        manifest = trainer.rank.manifest().without_base()
        assert sent[1:] == [manifest.nbytes] * 3
        assert manifest.sends_draft == trainer.config.mtp.enable_train


@pytest.mark.parametrize("pair", [{"in_flight": "finish"}], indirect=True)
class TestFinishing:
    async def test_kept_requests_end_on_the_adapter_they_began_with(self, pair, tmp_path):
        """Beside younger ones, over several syncs; in one the base travels too, and vLLM drops its adapters."""
        trainer, engine = pair
        heard, versions = Heard(engine), []
        for n in range(4):
            trainer._endpoints[0]._intake._has_base = n in (1, 3)
            await trainer.sync(pause="keep", kv="keep")
            versions.append(trainer.version)
            trainer.rank.save(tmp_path / str(n))
            old = [f"{m}/{i}" for m in range(n) for i in range(2)]
            assert not heard.ended(old)
            await engine.submit(requests(2, 700 - 150 * n, f"{n}/", temperature=0.7) + requests(2, 12, f"short {n}/"))
            trainer.learn(await heard.of([f"short {n}/{i}" for i in range(2)]))
            await heard.of(old, tokens=20 * n)
        for n, version in enumerate(versions):
            samples = await heard.of([f"{n}/0", f"{n}/1"])
            trainer.rank.load(tmp_path / str(n))
            assert trainer.error(samples, 0.7) < 1e-4
            assert [span[1:] for s in samples for span in s.spans] == [(version, False)] * 2
        assert engine._adapters.free_idle() == [4]


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"workers": 2} | LEARNING], indirect=True)
class TestTwoWorkers:
    async def test_each_has_its_half_of_every_adapter(self, pair):
        trainer, engine = pair
        sent = await follow(trainer, engine, 3)
        assert await engine._intake.ask("received_bytes") == [sent[-1]] * 2  # each reads it all


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"adapters": "merged"}], indirect=True)
class TestMerged:
    async def test_merged_weights_are_the_policy(self, pair):
        trainer, engine = pair
        assert set(await follow(trainer, engine, 3)) == {trainer.rank.manifest().nbytes}
