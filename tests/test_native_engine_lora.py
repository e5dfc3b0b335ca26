"""LoRA from the torch trainer to the native engine over real sessions, as adapters and merged."""

import numpy as np
import pytest
import torch

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import EngineConfig, MTPConfig
from asyncrl.models.checkpoint import read_tensors
from asyncrl.param_sync.errors import SyncError
from asyncrl.rollouter.engines.base import Scheduling
from asyncrl.rollouter.engines.native.engine import NativeEngine
from tests.support.lora import LoraTrainer, ResponseCollector, breaking_off, lora_config, requests, samples_of
from tests.support.trainer import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture
async def start(start_rank):
    """Builds a trainer and engines, and closes them after the test."""
    opened = []

    def trainer(config, transport="shared_memory"):
        opened.append(LoraTrainer(start_rank(config), config, transport))
        return opened[-1]

    def engine(config, **options):
        lora = config.model.lora if sends_adapters(config) else None
        engine = NativeEngine(config.model.path, EngineConfig(slots=4, max_context_tokens=2048), lora=lora, **options)
        opened.append(engine)
        return engine

    yield trainer, engine
    for one in opened:
        await one.close()


@pytest.mark.parametrize("staging", ["bucket", "full"])
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("adapters", ["adapter", "merged"])
async def test_the_engine_samples_from_the_trained_policy(checkpoint, start, adapters, transport, staging):
    config = lora_config(checkpoint)
    config.param_sync.adapters, config.param_sync.staging = adapters, staging
    new_trainer, new_engine = start
    trainer, engine = new_trainer(config, transport), new_engine(config)
    trainer.join("replica/0", engine)
    whole = sum(t.nbytes for t in read_tensors(checkpoint).values())
    before = None
    for step in range(3):
        report = await trainer.sync()
        assert (report.nbytes >= whole) == (adapters == "merged" or step == 0)
        samples = await samples_of(engine, requests(4, temperature=0.7))
        assert trainer.error(samples, 0.7) < 1e-4
        assert set().union(*(s.versions for s in samples)) == {trainer.version}
        assert {role: await engine.digest(role) for role in report.digests} == report.digests
        trainer.learn(samples)
        assert before is None or trainer.error(before, 0.7) > 0.02  # the policy has changed
        before = samples


async def test_a_replica_that_joins_late_serves_the_same_weights_as_one_that_merged_many_times(checkpoint, start):
    """An adapter is merged into the base, never into weights that an older adapter was merged into."""
    config = lora_config(checkpoint)
    new_trainer, new_engine = start
    trainer, old = new_trainer(config), new_engine(config)
    trainer.join("replica/0", old)
    for _ in range(4):
        await trainer.sync()
        trainer.learn(await samples_of(old, requests(4)))
    late = new_engine(config, load_weights=False)
    trainer.join("replica/1", late)
    assert (await trainer.sync()).evicted == {}
    views = [engine._model.named_views() for engine in (old, late)]
    assert all(torch.equal(view, views[1][name]) for name, view in views[0].items())
    base = read_tensors(checkpoint)
    moved = {name for name, view in views[0].items() if not torch.equal(view, base[name])}
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "o_proj", "gate_proj"}


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_kept_requests_continue_under_the_new_adapter(checkpoint, start, kv):
    config = lora_config(checkpoint)
    new_trainer, new_engine = start
    trainer, engine = new_trainer(config), new_engine(config)
    trainer.join("replica/0", engine)
    await trainer.sync()
    trainer.learn(await samples_of(engine, requests(4)))
    await engine.set_scheduling(Scheduling(progress_every_s=0.0))
    await engine.submit(requests(2, new=1500, temperature=0.7))
    collector = ResponseCollector(engine)
    await collector.of(["r0", "r1"], tokens=5)
    await trainer.sync(pause="keep", kv=kv)
    for sample in await collector.of(["r0", "r1"]):
        new = sample.sequences[0].spans[-1]
        assert (new.version, new.mixed_kv) == (trainer.version, kv == "keep")
        error = np.abs(trainer.scores([sample], 0.7) - sample.sequences[0].logprobs)[new.start :].max()
        assert (error < 1e-4) == (kv == "recompute")


async def test_speculation_works_with_adapters(checkpoint, start):
    config = lora_config(checkpoint, enable_train=True)
    new_trainer, new_engine = start
    trainer = new_trainer(config)
    engine = new_engine(config, mtp=MTPConfig(enable_rollout=True, num_speculative_tokens=2, guard=False))
    trainer.join("replica/0", engine)
    for _ in range(3):
        report = await trainer.sync()
        samples = await samples_of(engine, requests(4, temperature=0.7))
        assert trainer.error(samples, 0.7) < 1e-4
        assert await engine.digest("draft") == report.digests["draft"]
        trainer.learn(samples)


async def test_a_failed_send_leaves_the_old_adapter_serving(checkpoint, start):
    """An adapter is received outside the live weights, which therefore stay at one version."""
    config = lora_config(checkpoint)
    new_trainer, new_engine = start
    trainer, engine = new_trainer(config), new_engine(config)
    trainer.join("replica/0", engine)
    await trainer.sync()
    trainer.learn(await samples_of(engine, requests(4)))
    export = trainer.rank.export

    trainer.rank.export = breaking_off(export)
    served = trainer.version
    with pytest.raises(SyncError, match="ran out of memory"):
        await trainer.sync()
    assert trainer.fleet.routable == {"replica/0": served}
    samples = await samples_of(engine, requests(4, temperature=0.7))
    assert set().union(*(s.versions for s in samples)) == {served}
    trainer.rank.export = export
    await trainer.sync()
    assert trainer.error(await samples_of(engine, requests(4, temperature=0.7)), 0.7) < 1e-4
