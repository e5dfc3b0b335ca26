"""Replicas that sample from another policy than the trainer's: noticed, named, and the run ends."""

import numpy as np
import pytest

from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.mismatch import MismatchAlarm, MismatchError, SamplerKL, by_staleness
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, Sampler, VersionSpan
from tests.support.faults import starting, trained_steps
from tests.support.tiny import make_inputs
from tests.support.trainer import VOCAB, make_config

V2, V3, V4 = (PolicyVersion(0, number) for number in (2, 3, 4))


def kl(value, replica="replica/0", version=V4, tokens=100):
    return SamplerKL(Sampler(replica, version), tokens, value)


def test_one_warning_until_a_replica_is_back_within_the_bound(caplog):
    alarm = MismatchAlarm(0.02, 0.2)
    for value in (0.01, 0.03, 0.03, 0.01, 0.03):
        alarm.observe(7, [kl(value), kl(0.01, "replica/1")], V4, True)
    assert len(caplog.records) == 2
    assert "0.03 nats for replica/0 under version 0.4 (100 tokens)" in caplog.records[0].getMessage()


def test_three_consecutive_measurements_of_a_replica_end_the_run():
    alarm = MismatchAlarm(0.02, 0.2)
    for value in (0.3, 0.3, 0.1, 0.3, 0.3):  # with a good one in between
        alarm.observe(1, [kl(value), kl(value, "replica/1")], V4, True)
        alarm.check()
    alarm.observe(2, [kl(0.4, "replica/2")], V4, True)  # a step without the others changes nothing
    alarm.check()
    alarm.observe(3, [kl(0.3), kl(0.5, "replica/1")], V4, True)
    with pytest.raises(MismatchError, match=r"0\.5 nats for replica/1 under .*, 0\.3 nats for replica/0 .*_stop=0\.2"):
        alarm.check()
    alarm.restored()
    alarm.check()


def test_older_tokens_have_wider_bounds_and_are_pooled(caplog):
    alarm = MismatchAlarm(0.02, 0.2)
    for _ in range(5):
        metrics = alarm.observe(1, [kl(0.0), kl(1.2, version=V3), kl(0.6, version=V2)], V4, True)
        assert metrics == {"mismatch/fresh_tokens": 100, "mismatch/fresh_kl": 0.0, "mismatch/older_kl": 0.9}
        alarm.check()
    for _ in range(3):  # the trainer is between two versions
        assert alarm.observe(2, [kl(1.1)], V4, False) == {"mismatch/fresh_tokens": 0, "mismatch/older_kl": 1.1}
    with pytest.raises(MismatchError, match=r"under version 0\.4"):
        alarm.check()


def test_kl_and_ratio_are_reported_by_age():
    fresh = [kl(0.1, version=V4)._replace(ratio=1.2), kl(0.3, "replica/1", V4, 300), kl(0.0, version=V3)]
    found = [*fresh, kl(0.5, version=V2)]
    assert by_staleness(found, V3) == {
        "fully_async/kl_by_staleness/0": pytest.approx(0.2),
        "fully_async/ratio_by_staleness/0": pytest.approx(1.04),
        "fully_async/kl_by_staleness/1": 0.5,
        "fully_async/ratio_by_staleness/1": 1.0,
    }


def test_few_tokens_are_measured_over_several_steps():
    alarm = MismatchAlarm(0.02, 0.2)
    for step in range(11):
        alarm.observe(step, [kl(0.3, tokens=25)], V4, True)
        alarm.check()
    alarm.observe(12, [kl(0.3, tokens=25)], V4, True)
    with pytest.raises(MismatchError, match="100 tokens"):
        alarm.check()


def test_tokens_from_before_a_restore_are_measured_but_not_judged(caplog):
    alarm = MismatchAlarm(0.02, 0.2)
    for step in range(5):
        metrics = alarm.observe(step, [kl(0.9)], PolicyVersion(1, 4), True)
        assert metrics == {"mismatch/fresh_tokens": 0, "mismatch/older_kl": 0.9}
        alarm.check()
    assert not caplog.records


def test_bounds_of_zero_are_none(caplog):
    alarm = MismatchAlarm(0.0, 0.0)
    for step in range(5):
        alarm.observe(step, [kl(3.0)], V4, True)
        alarm.check()
    assert not caplog.records


def test_a_rank_measures_the_kl_of_each_sampler(checkpoint, start_rank):
    """Groups whose behaviour logprobs are the model's own for one replica, and off by a known amount for another."""
    rng, rank = np.random.default_rng(0), start_rank(make_config(checkpoint, max_tokens_per_micro_batch=40))
    prompt = rng.integers(0, VOCAB, 4)
    tokens = [rng.integers(0, VOCAB, 12) for _ in range(4)]

    def groups(logprobs):
        spans = [VersionSpan(0, V3, False, "replica/0"), VersionSpan(8, V4, False, "replica/1")]
        mixed = [*spans[:1], spans[1]._replace(mixed_kv=True)]
        samples = [
            Sample.single(i, t, p, np.ones(12, bool), spans if i else mixed, FinishReason.LENGTH, float(i))
            for i, (t, p) in enumerate(zip(tokens, logprobs, strict=True))
        ]
        return [Group.from_samples("g0", "p0", 0, prompt, samples)]

    batch = build_batch(groups([np.zeros(12)] * 4))
    own = rank._backend.outputs(batch, 1.0)["logprobs"].reshape(4, 12)
    off = own - np.where(np.arange(12) < 8, 0.0, 0.5)  # the trainer's logprob is higher by 0.5
    rank.train(0, [g.to_bytes() for g in groups(off)])
    first, second = rank.sampler_kl
    assert first == (Sampler("replica/0", V3), 32, pytest.approx(0, abs=1e-6), pytest.approx(1))
    # four tokens of the first sample were drawn over another version's KV cache
    assert second == (
        Sampler("replica/1", V4),
        12,
        pytest.approx(np.exp(0.5) - 1.5, rel=1e-4),
        pytest.approx(np.exp(0.5)),
    )


@pytest.mark.slow
def test_a_run_ends_if_a_replica_samples_at_another_temperature(tmp_path):
    wrong = "rollout.engine.name=tests.support.mismatched:ENGINE"
    with starting(make_inputs(tmp_path), tmp_path / "run", "rollout.replicas=2", "ray.cpus_per_replica=0.25") as start:
        run = start("trainer.total_steps=40", wrong)
        assert run.wait(300) == 1, run.text
        assert "MismatchError: " in run.text
        assert "nats for replica/1 under version" in run.text
        assert "replica/0 under version" not in run.text
        assert max(run.column("mismatch/fresh_kl")) > 0.2
        trained = trained_steps(tmp_path / "run")
        again = start(f"trainer.total_steps={trained + 4}")  # with the cause corrected, and a queue from before
        assert again.wait(300) == 0, again.text
        assert "differs from the one that sampled" not in again.text
