"""The rollout loop with a real queue and a real engine: groups, drops and refills, drops by reason, validation."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.rollouter.agent_loops.single_turn import SingleTurn
from asyncrl.rollouter.engine import SamplingParams
from asyncrl.rollouter.loop import NothingToTrain, truncations
from asyncrl.rollouter.outbox import Outbox
from asyncrl.rollouter.places import Places
from asyncrl.rollouter.samples import random_key
from asyncrl.sample import FinishReason, PolicyVersion, VersionSpan
from tests.support.rollout import System, broken, fine
from tests.support.tiny import MAX_RESPONSE, overrides


class Reshaped(SingleTurn):
    """An agent loop that changes what the engine said in ways only some runs bring about."""

    async def run(self, prompt, index, generate):
        return self.change(await super().run(prompt, index, generate))


class FirstOneOverlong(Reshaped):
    change = staticmethod(lambda s: replace(s, finish=FinishReason.STOP if s.index else FinishReason.LENGTH))


class FirstOneUntrained(Reshaped):
    change = staticmethod(lambda s: s if s.index else replace(s, loss_mask=np.zeros_like(s.loss_mask)))


class FirstOneCutBySync(Reshaped):
    change = staticmethod(lambda s: s if s.index else replace(s, spans=[*s.spans, VersionSpan(1, PolicyVersion(0, 1))]))


async def test_groups_hold_all_samples_with_rewards_versions_and_logprobs(inputs):
    async with System(inputs, lambda prompt, i: fine(float(i))) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [0, 1, 2, 3]
            assert group.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
            assert group.metrics["accuracy"].tolist() == [0.0, 1.0, 2.0, 3.0]
            assert group.oldest_version() == (0, 0)
            assert (group.logprobs < 0).all()
            assert group.response_lengths.max() <= MAX_RESPONSE
            times = [group.times[f"{what}_s"] for what in ("issued", "started", "generated", "finished")]
            assert times == sorted(times)
        different = {tuple(group.tokens[group.response(s)]) for s in range(4)}
        assert len(different) == 4  # each sample draws its own random numbers


async def test_groups_of_equal_rewards_are_dropped_counted_and_refilled(inputs):
    first = {}

    def judge(prompt, i):
        first.setdefault(prompt.uid, len(first))
        return fine(0.0 if first[prompt.uid] % 2 else float(i))  # every second group has equal rewards

    async with System(inputs, judge, "algorithm.filter_zero_variance=true") as system:
        assert len(await system.groups(2)) == 2
        assert (await system.queue.stats())["fully_async/dropped/zero_variance"] >= 1
        assert system.recorder.drain().counters["rollout/zero_variance_groups"] >= 1


@pytest.mark.parametrize(
    ("overlong", "rewards", "kept"),
    [
        ("keep", [1.0, 1.0, 1.0, 1.0], False),
        ("penalize", [1.0, 1.0, 1.0, 1.0], True),  # the penalty makes the difference
        ("penalize", [1.0, 0.5, 0.5, 0.5], False),  # the penalty takes it away
        ("mask", [1.0, 0.5, 0.5, 0.5], False),  # the one that differs does not count
        ("mask", [1.0, 1.0, 0.5, 0.5], True),
    ],
)
async def test_the_filter_looks_at_rewards_as_the_trainer_will_see_them(inputs, overlong, rewards, kept):
    more = (f"algorithm.overlong={overlong}", "algorithm.filter_zero_variance=true", "data.epochs=1")
    more += ("async_training.staleness_threshold=50", "rollout.max_consecutive_drops=100")
    judge = lambda prompt, i: fine(rewards[i])
    async with System(inputs, judge, *more, agent_loop=FirstOneOverlong) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert system.queue.balance()["queued"] == (len(system.prompts) if kept else 0)


async def test_a_sample_without_a_trained_token_is_counted_as_failed(inputs):
    async with System(inputs, lambda p, i: fine(float(i)), agent_loop=FirstOneUntrained) as system:
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [1, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/no_trained_token"] >= 2


async def test_samples_of_more_than_one_version_are_counted(inputs):
    async with System(inputs, lambda p, i: fine(float(i)), agent_loop=FirstOneCutBySync) as system:
        await system.groups(2)
        counters = system.recorder.drain().counters
        assert counters["rollout/partial_samples"] == counters["rollout/groups"] >= 2


async def test_a_prompt_is_encoded_once(inputs):
    more = ("data.epochs=1", "async_training.staleness_threshold=50")
    async with System(inputs, lambda p, i: fine(float(i)), *more) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert len(system.tokenizer.encoded) == len(system.prompts)
        assert set(system.tokenizer.encoded.values()) == {1}


async def test_sampling_that_cuts_the_distribution_is_warned_of_once(inputs, caplog):
    async with System(inputs, lambda p, i: fine(float(i)), "rollout.top_p=0.9", "rollout.top_k=40") as system:
        await system.groups(2)
    assert caplog.text.count("rollout: top_p=0.9, top_k=40 cuts") == 1
    assert truncations(SamplingParams(temperature=0.7)) == []


async def test_groups_of_equal_rewards_are_counted_also_where_they_are_kept(inputs):
    async with System(inputs, lambda prompt, i: fine(1.0), "algorithm.filter_zero_variance=false") as system:
        assert len(await system.groups(2)) == 2
        assert system.recorder.drain().counters["rollout/zero_variance_groups"] >= 2


async def test_a_failed_sample_leaves_its_group_smaller_and_is_counted(inputs):
    judge = lambda prompt, i: broken("reward_timeout") if i == 1 else fine(float(i))
    async with System(inputs, judge) as system:
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [0, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/reward_timeout"] >= 1


async def test_a_group_below_the_minimum_is_dropped_by_the_reason_of_its_samples(inputs):
    seen: list[str] = []

    def judge(prompt, i):
        if prompt.uid not in seen:
            seen.append(prompt.uid)
        return broken("reward_error") if prompt.uid == seen[0] and i else fine(float(i))

    async with System(inputs, judge) as system:
        await system.groups(2)
        assert (await system.queue.stats())["fully_async/dropped/reward_error"] == 1


async def test_dropping_everything_ends_the_run_with_the_reasons(inputs):
    async with System(inputs, lambda p, i: broken("reward_error"), "rollout.max_consecutive_drops=6") as system:
        await asyncio.wait(system.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        with pytest.raises(ExceptionGroup) as e:
            await system.tasks[1]
        leaf = e.value
        while isinstance(leaf, ExceptionGroup):
            leaf = leaf.exceptions[0]
        assert isinstance(leaf, NothingToTrain)
        assert "6 × reward_error" in str(leaf)
        assert "the last one: why" in str(leaf)


async def test_prompts_that_do_not_fit_are_dropped_and_counted(inputs):
    async with System(inputs, lambda p, i: fine(float(i)), "rollout.max_consecutive_drops=4", max_prompt_tokens=3) as s:
        await asyncio.wait(s.tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert s.tasks[1].done()
        assert s.recorder.drain().counters["rollout/failed_samples/prompt_too_long"] == 16


async def test_when_the_prompts_end_everything_finished_is_delivered(inputs):
    more = ("data.epochs=1", "async_training.staleness_threshold=50")
    async with System(inputs, lambda p, i: fine(float(i)), *more) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert system.queue.balance()["queued"] == len(system.prompts)
        assert len(await system.groups(len(system.prompts))) == len(system.prompts)


async def test_validation_answers_every_prompt_and_reports_means(inputs):
    async with System(inputs, lambda p, i: fine(float(i % 2)), "validation.samples=2") as system:
        values = await asyncio.wait_for(system.validation.run(system.prompts[:5]), 60)
        assert values["validation/samples"] == 10
        assert (values["validation/lineage"], values["validation/version"]) == (0, 0)
        ours = [call for call in system.rewards.calls if len(call) == 2]  # training groups have four samples
        assert sorted(ours) == sorted([p.uid] * 2 for p in system.prompts[:5])  # one group at a time, as its timeout is
        assert values["validation/accuracy"] == values["validation/reward"] == pytest.approx(0.5)


def test_random_keys_differ_by_seed_group_and_sample():
    keys = {random_key(seed, uid, i) for seed in range(3) for uid in ("a", "b") for i in range(4)}
    assert len(keys) == 24
    assert all(0 <= key < 2**63 for key in keys)
    assert random_key(1, "a", 2) == random_key(1, "a", 2)


def test_derived_slots_are_always_kept_busy(inputs):
    config = load_config(None, overrides(inputs, inputs / "run"))
    assert derive(config).slots == 8
    two = replace(config, rollout=replace(config.rollout, replicas=2))
    assert derive(two).slots == 2 * 8
    assert np.isclose(float(derive(config).staleness_threshold), 0.0)


async def test_as_many_samples_wait_for_slots_as_end_before_others_can_come():
    places = Places(slots=64, groups=0)
    places.take(64)
    assert await places.free(4) == 1  # a group, as long as nothing is known
    for _ in range(30):  # ten ends each 50 ms
        places.leave(10)
        places.take(10)
        await asyncio.sleep(0.05)
    waiting = 4 * await places.free(4)
    assert 4 < waiting <= 64


async def test_what_is_finished_goes_at_once_where_a_slot_is_idle_else_in_batches():
    delivered, hurry = [], asyncio.Event()

    async def deliver(items):
        delivered.append(items)

    outbox = Outbox(deliver, every_s=30.0, hurry=hurry)
    running = asyncio.create_task(outbox.run())
    outbox.add(1)
    await outbox.emptied()
    for item in (2, 3):
        outbox.add(item)
        await asyncio.sleep(0.01)
    assert delivered == [[1]]
    hurry.set()
    await asyncio.wait_for(outbox.emptied(), 5)
    outbox.add(4)
    await asyncio.wait_for(outbox.emptied(), 5)
    assert delivered == [[1], [2, 3], [4]]
    running.cancel()


async def test_groups_start_as_samples_end_and_a_straggler_holds_one_place_only():
    places = Places(slots=8, groups=0)  # and a group that waits for one of them
    assert await places.free(4) == 3
    for _ in range(3):
        places.take(4)
    waiting = asyncio.create_task(places.free(4))
    await asyncio.sleep(0)
    assert not waiting.done()
    places.leave()
    assert await waiting == 1  # eleven generate: with this group all twelve are covered again
    places.take(4)
    places.leave(3)
    assert not asyncio.create_task(places.free(4)).done()
    few = Places(slots=8, groups=1)
    assert await few.free(4) == 1
