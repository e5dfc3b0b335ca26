"""Contract of engines that keep adapters beside their weights, over real sessions from a torch trainer.

A module derives its test classes from these and provides a fixture ``pair``: a `LoraTrainer` and an engine that has
joined it. Each test of a class continues from the state that the previous one left.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from asyncrl.config.schema import EngineConfig
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.manifest import ManifestError, is_adapter
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.trainer.rank import TrainerRank
from tests.support.engine_contract import events_at_once  # noqa: F401
from tests.support.lora import LoraTrainer, ResponseCollector, breaking_off, lora_config, requests, samples_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


async def started(
    name, checkpoint, adapters="adapter", in_flight="move", pause="abort", workers=1, args=None, **options
):
    """A trainer and an engine. The trainer owns the process group, of which a process can hold only one."""
    config = lora_config(str(checkpoint), **options)
    config.param_sync.adapters, config.param_sync.in_flight, config.param_sync.pause = adapters, in_flight, pause
    config.async_training.staleness_threshold = 2
    config.rollout.engine = EngineConfig(
        name=name,
        slots=8,
        max_context_tokens=1024,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=workers,
        args=args or {},
    )
    engine = await ENGINES.find(config.rollout.engine.name).start(config, Recorder("replica/0"))
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    trainer = LoraTrainer(rank, config)
    trainer.join("replica/0", engine)
    return trainer, engine


async def ended(trainer, engine):
    await trainer.close()
    await engine.close()
    trainer.rank.close()


async def follow(trainer, engine, steps):
    """Check that each version's samples have the trainer's logprobs; returns the bytes that each sync sent."""
    sent, before = [], None
    for step in range(steps):
        report = await trainer.sync()
        assert not report.evicted
        temperature = 0.7 if step % 2 else 1.0
        samples = await samples_of(engine, requests(4, temperature=temperature))
        assert trainer.error(samples, temperature) < 1e-4
        assert set().union(*(s.versions for s in samples)) == {trainer.version}
        assert before is None or trainer.error(before, 1.0) > 1e-2  # the policy has changed
        trainer.learn(samples)
        before = samples if temperature == 1.0 else None
        sent.append(report.nbytes)
    return sent


class AdapterContract:
    async def test_each_version_is_the_base_with_its_adapter_and_the_base_is_sent_once(self, pair, checkpoint):
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

    async def test_a_failed_send_leaves_the_old_adapter_serving(self, pair):
        trainer, engine = pair
        await trainer.sync()
        served, of_served = trainer.version, trainer.rank.manifest()
        greedy = await samples_of(engine, requests(1, temperature=0.0))
        trainer.learn(await samples_of(engine, requests(4)))
        export = trainer.rank.export

        trainer.rank.export = breaking_off(export)
        with pytest.raises(SyncError, match="ran out of memory"):
            await trainer.sync()
        assert trainer.fleet.routable == {"replica/0": served}
        again = await samples_of(engine, requests(1, temperature=0.0))
        assert np.array_equal(again[0].sequences[0].tokens, greedy[0].sequences[0].tokens)
        assert again[0].sequences[0].spans[-1].version == served
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
        for sent, message in ((lacks, "adapter policy .* is incomplete"), (none, "the sender's manifest has none")):
            monkeypatch.setattr(trainer.rank, "manifest", lambda sent=sent: sent)
            with pytest.raises(ManifestError, match=message):
                await trainer.sync()
            assert not engine.paused
        assert trainer.fleet.routable == {"replica/0": served}

    async def test_the_base_is_sent_again_if_any_replica_lacks_it(self, pair):
        """One plan covers all replicas."""
        trainer, engine = pair
        trainer._sessions[0]._receiver._has_base = False
        assert (await follow(trainer, engine, 2))[0] == trainer.rank.manifest().nbytes


class FinishingContract:
    async def test_kept_requests_finish_on_the_adapter_they_started_with(self, pair, tmp_path):
        """Beside newer requests, over several syncs, some of which send the base too."""
        trainer, engine = pair
        collector, versions = ResponseCollector(engine), []
        for n in range(4):
            trainer._sessions[0]._receiver._has_base = n in (1, 3)
            await trainer.sync(pause="keep", kv="keep")
            versions.append(trainer.version)
            trainer.rank.save(tmp_path / str(n))
            old = [f"{m}/{i}" for m in range(n) for i in range(2)]
            assert not collector.ended(old)
            await engine.submit(requests(2, 700 - 150 * n, f"{n}/", temperature=0.7) + requests(2, 12, f"short {n}/"))
            trainer.learn(await collector.of([f"short {n}/{i}" for i in range(2)]))
            await collector.of(old, tokens=20 * n)
        for n, version in enumerate(versions):
            samples = await collector.of([f"{n}/0", f"{n}/1"])
            trainer.rank.load(tmp_path / str(n))
            assert trainer.error(samples, 0.7) < 1e-4
            assert [(x.version, x.mixed_kv) for s in samples for x in s.sequences[0].spans] == [(version, False)] * 2
        assert len(engine._adapters.free_idle()) == 1

    async def test_validation_does_not_use_up_the_slots_of_adapters(self, pair):
        """However many syncs pass it: no staleness bound limits it, as it does training."""
        trainer, engine = pair
        collector = ResponseCollector(engine)
        for n in range(6):
            await trainer.sync(pause="keep", kv="keep")
            assert not n or not collector.ended([f"v{n - 1}/0"])
            for passed in await collector.of([f"v{n - 2}/0"] if n > 1 else []):
                assert len(passed.sequences[0].tokens) < 700
            (validating,) = requests(1, 700, f"v{n}/", temperature=0.7)
            await engine.submit([validating._replace(priority=1), *requests(1, 12, f"t{n}/", temperature=0.7)])
            trainer.learn(await collector.of([f"t{n}/0"]))
            assert list(trainer.fleet.routable.values()) == [trainer.version]
        await engine.abort(["v4/0", "v5/0"])
        await collector.of(["v4/0", "v5/0"])
