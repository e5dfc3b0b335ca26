"""The rollout loop with a real queue and a real engine: groups, drops and refills, drops by reason, validation."""

import asyncio
import itertools
import json
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.rollouter import samples
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.batching_sender import BatchingSender
from asyncrl.rollouter.drops import NothingToTrain
from asyncrl.rollouter.engines.base import SamplingParams
from asyncrl.rollouter.limiter import GroupPlaces, InFlightLimiter
from asyncrl.rollouter.sampling import random_key, training_sampling, validation_sampling
from asyncrl.rollouter.sources import MAX_SOURCES, SourceCounts, several_sources, source_means
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.rollout import System, broken, fine
from tests.support.scripted import ScriptedReplica, until
from tests.support.tiny import MAX_RESPONSE, overrides


def changed(sample: Sample, **columns) -> Sample:
    """With columns of its only sequence replaced by functions of them."""
    (sequence,) = sample.sequences
    return replace(sample, sequences=[replace(sequence, **{k: f(getattr(sequence, k)) for k, f in columns.items()})])


def sampled(sample: Sample, **columns) -> Sample:
    """With columns of its only sequence overwritten by functions of them, as if the engine had returned those."""
    (sequence,) = sample.sequences
    for name, change in columns.items():
        getattr(sequence, name)[:] = change(getattr(sequence, name))
    return sample


class Reshaped(SingleTurn):
    """An agent loop that changes its sample to produce rare cases."""

    async def run(self, prompt, index, generate):
        return self.change(await super().run(prompt, index, generate))


class FirstOneOverlong(Reshaped):
    change = staticmethod(lambda s: replace(s, finish=FinishReason.STOP if s.index else FinishReason.LENGTH))


class FirstOneUntrained(Reshaped):
    change = staticmethod(lambda s: s if s.index else changed(s, loss_mask=np.zeros_like))


class FirstOneCutBySync(Reshaped):
    change = staticmethod(
        lambda s: s if s.index else sampled(s, spans=lambda of: [*of, VersionSpan(1, PolicyVersion(0, 1))])
    )


async def test_groups_hold_all_samples_with_rewards_versions_and_logprobs(inputs):
    async with System(inputs, lambda prompt, i: fine(float(i))) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [0, 1, 2, 3]
            assert group.rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
            assert group.metrics["accuracy"].tolist() == [0.0, 1.0, 2.0, 3.0]
            assert group.trained_versions() == ((0, 0), (0, 0))
            assert (group.logprobs < 0).all()
            assert group.response_lengths.max() <= MAX_RESPONSE
            times = [group.times[f"{what}_s"] for what in ("issued", "started", "generated", "finished")]
            assert times == sorted(times)
        different = {tuple(group.tokens[group.response(s)]) for s in range(4)}
        assert len(different) == 4  # each sample draws its own random numbers


class Rewarded(SingleTurn):
    """Rewards every second sample itself."""

    async def run(self, prompt, index, generate):
        sample = await super().run(prompt, index, generate)
        return replace(sample, reward=float(10 + index), metrics={"tool_calls": 1.0}) if index % 2 else sample


@pytest.mark.parametrize(
    ("options", "rewards", "asked"),
    [
        ([], [0, 11, 2, 13], 2),  # the function scores those that have none
        (["reward.function_share=0.25"], [0, 0.75 * 11 + 0.25, 2, 0.75 * 13 + 0.25 * 3], 4),
    ],
)
async def test_an_agent_s_rewards_stand_alone_or_are_weighted_with_the_function_s(inputs, options, rewards, asked):
    judge = lambda prompt, i: fine(float(2 * i if asked == 2 else i))
    async with System(inputs, judge, *options, agent_loop=Rewarded) as system:
        for group in await system.groups(2):
            assert group.rewards.tolist() == pytest.approx(rewards)
            assert group.metrics["tool_calls"].tolist()[1::2] == [1, 1]
        assert {len(call) for call in system.rewards.calls} == {asked}


async def test_without_a_function_samples_without_a_reward_fail(inputs):
    options = ("reward.function=none", "rollout.min_group_size=1", "algorithm.filter_zero_variance=false")
    async with System(inputs, None, *options, agent_loop=Rewarded) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [1, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/no_reward"] >= 4


class Cut(SingleTurn):
    """Rewards its last sample; a limit ends the first one."""

    async def run(self, prompt, index, generate):
        sample = await super().run(prompt, index, generate)
        finish = FinishReason.TURNS if index == 0 else FinishReason.STOP
        return replace(sample, finish=finish, reward=1.0 if index == 3 else None)


async def test_a_sample_that_a_limit_ended_before_its_reward_can_get_a_value(inputs, caplog):
    alone = ("reward.function=none", "rollout.min_group_size=1", "algorithm.filter_zero_variance=false")
    async with System(inputs, None, *alone, agent_loop=Cut) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [3]
    logged = [r.getMessage() for r in caplog.records if "a sample without a reward fails" in r.getMessage()]
    assert len(logged) == 2
    assert "a limit ended the sample (turns): reward.on_failure=value" in logged[0]
    assert logged[1].endswith("the agent loop gave no reward, and reward.function is none")

    async with System(
        inputs, None, *alone, "reward.on_failure=value", "reward.failure_value=-1", agent_loop=Cut
    ) as system:
        for group in await system.groups(2):
            assert (group.sample_index.tolist(), group.rewards.tolist()) == ([0, 3], [-1.0, 1.0])
        assert system.recorder.drain().counters["rollout/failed_rewards/no_reward"] >= 2


class BadReward(SingleTurn):
    async def run(self, prompt, index, generate):
        return replace(await super().run(prompt, index, generate), reward=1.0 if index else float("nan"))


class Invents(Reshaped):
    """Trains a token that the policy did not sample."""

    change = staticmethod(lambda s: s if s.index else changed(s, tokens=lambda of: of + 1))


class ReturnsNothing(SingleTurn):
    async def run(self, prompt, index, generate):
        return await super().run(prompt, index, generate) if index else None


@pytest.mark.parametrize(
    ("agent_loop", "problem"),
    [
        (BadReward, "returned 'reward' = nan, expected a finite number"),
        (Invents, "sequence 0: token 0 is trained, but no call of generate returned it"),
        (ReturnsNothing, "expected a Sample, found NoneType"),
    ],
)
async def test_a_bad_sample_is_refused_by_name_and_its_group_goes_on(inputs, agent_loop, problem, caplog):
    async with System(inputs, lambda prompt, i: fine(float(i)), agent_loop=agent_loop) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [1, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/bad_sample"] >= 2
    assert caplog.text.count("the agent loop returned a bad sample") == 1
    assert f"sample 0: {problem}" in caplog.text


class Widens(SingleTurn):
    """Gives a column whose rows differ from sample to sample, and metrics of ever new names."""

    async def run(self, prompt, index, generate):
        sample = await super().run(prompt, index, generate)
        (q,) = sample.sequences
        columns = {"x": np.zeros((3, 4 if index == 2 else 2)), "moe/y": np.zeros(index)}
        metrics = {f"m{50 * index + i}": 1.0 for i in range(50)}
        return replace(sample, sequences=[replace(q, extras=columns)], metrics=metrics)


async def test_a_column_unlike_the_group_s_first_fails_its_sample(inputs):
    async with System(inputs, lambda prompt, i: fine(float(i)), agent_loop=Widens) as system:
        for group in await system.groups(2):
            assert group.sample_index.tolist() == [0, 1, 3]
            assert group.extras["x"][0].shape == (9, 2)
            assert group.extras["moe/y"][1].tolist() == [0, 0, 1, 4]


async def test_only_the_first_names_of_a_run_are_metrics(inputs, caplog, monkeypatch):
    monkeypatch.setattr(samples, "MAX_METRICS", 120)
    async with System(inputs, lambda prompt, i: fine(float(i)), agent_loop=Widens) as system:
        for group in await system.groups(2):
            assert len(group.metrics) == 120
            assert group.metrics["accuracy"].tolist() == [0.0, 1.0, 2.0]
    assert caplog.text.count("given metrics of 120 names; ignoring others, such as") == 1


class SlowTool(MultiTurn):
    """Two turns, and a tool between that answers when the test says so."""

    waiting: asyncio.Semaphore

    async def observe(self, prompt, turns, answer):
        if turns.completions == 2:
            return None
        await self.waiting.acquire()
        return [5]


async def test_places_are_given_back_once_and_not_taken_after_the_end():
    limiter = InFlightLimiter(slots=8, max_groups=1)
    places = GroupPlaces(limiter, 2)
    places.generates(0, False)
    places.ended(0)
    places.ended(1)
    places.generates(1, True)  # a call that the loop left running
    places.close()
    places.close()
    assert (limiter.samples, await limiter.room(4)) == (0, 1)


async def test_samples_that_wait_for_a_tool_hold_no_place(inputs):
    SlowTool.waiting = asyncio.Semaphore(0)
    options = ("async_training.staleness_threshold=50", "rollout.engine.max_context_tokens=128")
    async with System(inputs, lambda prompt, i: fine(float(i)), *options, agent_loop=SlowTool) as system:
        async with asyncio.timeout(60):  # 8 slots and a group more would be 12 samples
            while len(system.loop.in_flight) < 20:
                await asyncio.sleep(0.01)
        for _ in range(4 * len(system.prompts)):
            SlowTool.waiting.release()
        group = (await system.groups(1))[0]
        assert len(group) == 4


class ClosesItsTool(SingleTurn):
    """Samples clean up slowly when cancelled, except the first of each group."""

    opened = closed = 0

    async def run(self, prompt, index, generate):
        ClosesItsTool.opened += 1
        try:
            await asyncio.Event().wait()
        finally:
            if index:
                await asyncio.sleep(0.02)
                ClosesItsTool.closed += 1


async def test_a_cancelled_group_releases_each_sample_once(inputs):
    options = ("async_training.staleness_threshold=50", "rollout.max_concurrent_groups=3")
    async with System(inputs, lambda prompt, i: fine(float(i)), *options, agent_loop=ClosesItsTool) as system:
        async with asyncio.timeout(30):
            while ClosesItsTool.opened < 12:
                await asyncio.sleep(0.005)
        cancelled = [group.task for group in system.loop.in_flight.values()]
        for task in cancelled:
            task.cancel()
        await asyncio.wait(cancelled)
        async with asyncio.timeout(30):
            while ClosesItsTool.closed < 9 or ClosesItsTool.opened < 24:  # by the groups that follow
                await asyncio.sleep(0.005)
        assert system.loop.limiter.samples == 4 * len(system.loop.in_flight) == 12


async def test_groups_of_equal_rewards_are_dropped_counted_and_refilled(inputs):
    first = {}

    def judge(prompt, i):
        first.setdefault(prompt.uid, len(first))
        return fine(0.0 if first[prompt.uid] % 2 else float(i))  # every second group has equal rewards

    async with System(inputs, judge, "algorithm.filter_zero_variance=true") as system:
        assert len(await system.groups(2)) == 2
        assert (await system.queue.stats())["fully_async/dropped/zero_variance"] >= 1
        assert system.recorder.drain().counters["rollout/zero_variance_groups"] >= 1


async def test_groups_that_are_too_easy_or_too_hard_are_dropped(inputs):
    succeeded = {"easy": 4, "fit": 2, "hard": 1}
    kinds = itertools.cycle(succeeded.items())
    kind_of = defaultdict(lambda: next(kinds))
    judge = lambda prompt, i: fine(float(i < kind_of[prompt.uid][1]))
    options = ("algorithm.filter_success_low=0.3", "algorithm.filter_success_high=0.9", "data.epochs=1")
    async with System(inputs, judge, *options, "algorithm.filter_zero_variance=false") as system:
        for group in await system.groups(2):
            assert kind_of[group.uid][0] == "fit"
            assert group.rewards.tolist() == [1, 1, 0, 0]
        assert (await system.queue.stats())["fully_async/dropped/success_band"] >= 2


@pytest.mark.parametrize(
    ("overlong", "rewards", "kept"),
    [
        ("keep", [1.0, 1.0, 1.0, 1.0], False),
        ("penalize", [1.0, 1.0, 1.0, 1.0], True),  # the penalty makes the difference
        ("penalize", [1.0, 0.5, 0.5, 0.5], False),  # the penalty removes it
        ("mask", [1.0, 0.5, 0.5, 0.5], False),  # the sample that differs does not count
        ("mask", [1.0, 1.0, 0.5, 0.5], True),
    ],
)
async def test_the_variance_filter_uses_the_trainers_effective_rewards(inputs, overlong, rewards, kept):
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


class FirstOneCancelled(SingleTurn):
    """An agent loop whose first sample awaits a cancelled task, as some libraries do."""

    async def run(self, prompt, index, generate):
        if index == 0:
            (task := asyncio.create_task(asyncio.sleep(60))).cancel()
            await task
        return await super().run(prompt, index, generate)


async def test_an_agent_loop_that_raises_cancelled_error_fails_its_sample_alone(inputs):
    async with System(inputs, lambda p, i: fine(float(i)), agent_loop=FirstOneCancelled) as system:
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [1, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/agent_cancelled"] >= 2


class FirstOneRaises(SingleTurn):
    async def run(self, prompt, index, generate):
        if index == 0:
            raise KeyError("no such tool")
        return await super().run(prompt, index, generate)


async def test_an_agent_loop_that_raises_fails_its_sample_alone_and_says_so_once(inputs, caplog):
    async with System(inputs, lambda p, i: fine(float(i)), agent_loop=FirstOneRaises) as system:
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [1, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/agent_error"] >= 2
    assert caplog.text.count("KeyError: 'no such tool'") == 1


class Damaged(SingleTurn):
    """Damages the sample in the first ``times`` attempts at the prompt of ``uid``."""

    uid, times = "e0-000001", 1
    damage = staticmethod(lambda s: sampled(s, logprobs=lambda of: np.full_like(of, np.nan)))
    seen: Counter[tuple[str, int]]

    def __init__(self, *args) -> None:
        super().__init__(*args)
        type(self).seen = Counter()

    async def run(self, prompt, index, generate):
        sample = await super().run(prompt, index, generate)
        self.seen[prompt.uid, index] += 1
        return self.damage(sample) if prompt.uid == self.uid and self.seen[prompt.uid, index] <= self.times else sample


class DamagedToken(Damaged):
    damage = staticmethod(lambda s: sampled(s, tokens=lambda of: np.full_like(of, 2**30)))


class NegativeToken(Damaged):
    damage = staticmethod(lambda s: sampled(s, tokens=lambda of: np.full_like(of, -1)))


class DamagedVersion(Damaged):
    damage = staticmethod(lambda s: sampled(s, spans=lambda _: [VersionSpan(0, PolicyVersion(7, 0))]))


class Poison(Damaged):
    times = 99


@pytest.mark.parametrize(
    ("agent_loop", "reason"),
    [
        (Damaged, "logprob_not_finite"),
        (DamagedToken, "token_out_of_vocabulary"),
        (NegativeToken, "token_out_of_vocabulary"),  # which the tokenizer cannot decode
        (DamagedVersion, "unknown_version"),
    ],
)
async def test_a_corrupt_group_is_refused_and_sampled_again_under_the_same_uid(inputs, agent_loop, reason):
    more = ("data.shuffle=false", "async_training.staleness_threshold=50", "data.epochs=1")
    groups = {}
    for loop in (SingleTurn, agent_loop):
        async with System(inputs, lambda p, i: fine(float(i)), *more, agent_loop=loop) as system:
            await asyncio.wait_for(system.tasks[1], 60)
            groups[loop] = await system.groups(len(system.prompts))
            counters, stats = system.recorder.drain().counters, await system.queue.stats()
    plain, again = groups[SingleTurn], groups[agent_loop]
    assert [g.uid for g in again] == [g.uid for g in plain]  # nothing is missing, and the order of issue is kept
    assert {g.uid: g.attempt for g in again} == {g.uid: int(g.uid == Damaged.uid) for g in plain}
    at = [g.uid for g in plain].index(Damaged.uid)
    assert np.isfinite(again[at].logprobs).all()
    assert again[at].tokens.tolist() != plain[at].tokens.tolist()  # other random numbers
    assert all(a.tokens.tolist() == p.tokens.tolist() for k, (a, p) in enumerate(zip(again, plain)) if k != at)
    assert counters[f"rollout/refused_groups/{reason}"] == 1
    assert stats["fully_async/count/dropped"] == 0


async def test_a_corrupt_group_with_equal_rewards_is_refused_before_it_is_filtered(inputs):
    """Weights that yield NaN yield equal rewards too: the engine is at fault, not the task."""
    more = ("data.epochs=1", "async_training.staleness_threshold=50", "algorithm.filter_zero_variance=true")
    judge = lambda prompt, i: fine(0.0 if prompt.uid == Damaged.uid else float(i))
    async with System(inputs, judge, *more, agent_loop=Damaged) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert system.recorder.drain().counters["rollout/refused_groups/logprob_not_finite"] == 1
        stats = await system.queue.stats()
        assert (stats["fully_async/count/dropped"], stats["fully_async/dropped/zero_variance"]) == (1, 1)


async def test_a_group_that_never_passes_is_dropped_as_poison_and_the_run_continues(inputs):
    more = ("data.epochs=1", "async_training.staleness_threshold=50", "rollout.max_attempts=2")
    async with System(inputs, lambda p, i: fine(float(i)), *more, agent_loop=Poison) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        groups = await system.groups(len(system.prompts) - 1)
        assert Poison.uid not in {g.uid for g in groups}
        assert set(Poison.seen.values()) == {1, 2}
        assert (await system.queue.stats())["fully_async/dropped/poison"] == 1
        assert system.recorder.drain().counters["rollout/refused_groups/logprob_not_finite"] == 2


async def test_samples_of_more_than_one_version_are_counted(inputs):
    async with System(inputs, lambda p, i: fine(float(i)), agent_loop=FirstOneCutBySync) as system:
        await system.queue.announce(PolicyVersion(0, 1))
        await system.groups(2)
        counters = system.recorder.drain().counters
        assert counters["rollout/partial_samples"] == counters["rollout/groups"] >= 2


async def test_a_prompt_is_encoded_once(inputs):
    more = ("data.epochs=1", "async_training.staleness_threshold=50")
    async with System(inputs, lambda p, i: fine(float(i)), *more) as system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert len(system.tokenizer.encoded) == len(system.prompts)
        assert set(system.tokenizer.encoded.values()) == {1}


async def test_only_validations_may_draw_from_the_most_probable_tokens(inputs):
    config = load_config(None, overrides(inputs, Path("run"), "validation.top_p=0.9", "validation.min_p=0.1"))
    assert training_sampling(config, [1]) == SamplingParams(temperature=1.0, stop_token_ids=(1,))
    found = validation_sampling(config, [1])
    assert (found.top_p, found.top_k, found.min_p, found.stop_token_ids) == (0.9, 0, 0.1, (1,))


async def test_groups_of_equal_rewards_are_counted_even_if_kept(inputs):
    async with System(inputs, lambda prompt, i: fine(1.0), "algorithm.filter_zero_variance=false") as system:
        assert len(await system.groups(2)) == 2
        counters = system.recorder.drain().counters
        assert counters["rollout/zero_variance_groups"] == counters["rollout/groups"] >= 2


async def test_a_failed_sample_leaves_its_group_smaller_and_is_counted(inputs, caplog):
    judge = lambda prompt, i: broken("reward_timeout") if i == 1 else fine(float(i))
    async with System(inputs, judge) as system:
        (group, _) = await system.groups(2)
        assert group.sample_index.tolist() == [0, 2, 3]
        assert system.recorder.drain().counters["rollout/failed_samples/reward_timeout"] >= 1
    assert caplog.text.count("a reward failed (reward_timeout): why; further ones are counted") == 1


async def test_a_failed_reward_can_be_replaced_by_a_value(inputs):
    judge = lambda prompt, i: broken("reward_timeout") if i == 1 else fine(float(i))
    more = ("reward.on_failure=value", "reward.failure_value=-1")
    async with System(inputs, judge, *more) as system:
        (group, _) = await system.groups(2)
        assert group.rewards.tolist() == [0.0, -1.0, 2.0, 3.0]
        assert system.recorder.drain().counters["rollout/failed_rewards/reward_timeout"] >= 1


async def test_a_group_below_the_minimum_size_is_dropped_with_the_reason_of_its_samples(inputs):
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


async def test_a_prompt_that_the_chat_template_refuses_fails_and_the_others_go_on(inputs, tmp_path, caplog):
    rows = [
        {"prompt": [{"role": role, "content": f"Compute {i}+1"}], "answer": str(i + 1)}
        for i, role in enumerate(("user", "narrator", "user"))
    ]
    (tmp_path / "roles.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = (f"data.train_files=[{tmp_path / 'roles.jsonl'}]", "data.epochs=1", "async_training.staleness_threshold=50")
    system = System(inputs, lambda p, i: fine(float(i)), *more, "validation.samples=2")
    refuses = "{% if messages[0].role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}"
    system.tokenizer.hf.chat_template = refuses + system.tokenizer.hf.chat_template
    async with system:
        await asyncio.wait_for(system.tasks[1], 60)
        assert len(await system.groups(2)) == 2
        assert (await system.queue.stats())["fully_async/dropped/prompt_refused"] == 1
        assert system.recorder.drain().counters["rollout/failed_samples/prompt_refused"] == 4
        values = await asyncio.wait_for(system.validation.run(system.prompts), 60)
        assert (values["validation/samples"], values["validation/failed"]) == (4, 2)
    assert caplog.text.count("prompt roles:1 cannot be encoded (TemplateError: no narrators)") == 1


async def test_when_the_prompts_end_all_finished_groups_are_delivered(inputs):
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
        assert sorted(ours) == sorted([p.uid] * 2 for p in system.prompts[:5])  # one call per group
        assert values["validation/accuracy"] == values["validation/reward"] == pytest.approx(0.5)


async def test_no_more_prompts_of_a_validation_begin_than_slots_are_free(inputs):
    more = ("validation.samples=3", "rollout.engine.slots=2", "rollout.replicas=1")
    async with System(inputs, lambda p, i: fine(1.0), *more) as system:
        validation, most = system.validation, list[int]()
        answers = validation._answers

        async def observed(*args):
            most.append(validation.limiter.samples)
            return await answers(*args)

        validation._answers = observed
        values = await asyncio.wait_for(validation.run(system.prompts[:6]), 60)
        assert values["validation/samples"] == 18
        assert len(most) == 6
        assert max(most) <= 7  # with its three, a group begins beside at most four: no slot is idle
        assert validation.limiter.samples == 0


class Prepares(SingleTurn):
    """Does something else before its first call."""

    async def run(self, prompt, index, generate):
        await asyncio.sleep(0.05)
        return await super().run(prompt, index, generate)


async def test_agents_of_a_validation_begin_as_slots_are_free(inputs):
    more = ("validation.samples=3", "rollout.engine.slots=2", "rollout.replicas=1")
    async with System(inputs, lambda p, i: fine(1.0), *more, agent_loop=Prepares) as system:
        under_way, most = set(), list[int]()
        answers = system.validation._answers

        async def observed(prompt, *args):
            under_way.add(prompt.uid)
            most.append(len(under_way))
            answered = await answers(prompt, *args)
            under_way.remove(prompt.uid)
            return answered

        system.validation._answers = observed
        values = await asyncio.wait_for(system.validation.run(system.prompts[:8]), 60)
        assert values["validation/samples"] == 24
        assert max(most) <= 4  # of three samples for two slots
        assert system.validation.limiter.samples == 0


async def test_figures_are_told_apart_by_data_source(inputs, tmp_path):
    rows = [
        {"prompt": f"{i}+1=", "answer": "2", "data_source": source} for i in range(6) for source in ("a/sums", "words")
    ]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge = lambda prompt, i: fine(0.5 if prompt.data_source == "a/sums" and i % 2 else 0.0)
    more = (f"data.train_files=[{tmp_path / 'mixed.jsonl'}]", "data.epochs=1", "async_training.staleness_threshold=50")
    async with System(inputs, judge, *more, "validation.samples=2") as system:
        await asyncio.wait_for(system.tasks[1], 60)
        groups = await system.groups(12)
        assert Counter(g.data_source for g in groups) == {"a/sums": 6, "words": 6}
        counters = system.recorder.drain().counters
        assert several_sources(counters)
        means = source_means(counters)
        assert (means["rollout/source/a/sums/reward"], means["rollout/source/a/sums/success"]) == (0.25, 0.5)
        assert means["rollout/source/words/reward"] == means["rollout/source/words/success"] == 0.0
        of_words = [g for g in groups if g.data_source == "words"]
        lengths = sum(len(g.tokens) for g in of_words) / sum(map(len, of_words))
        assert means["rollout/source/words/response_tokens"] == pytest.approx(lengths)
        values = await asyncio.wait_for(system.validation.run(system.prompts), 60)
        assert values["validation/source/a/sums/reward"] == 0.25
        assert values["validation/source/words/success"] == 0.0
        values = await asyncio.wait_for(system.validation.run(system.prompts[:1]), 60)
        assert not any("source" in name for name in values)


async def test_failed_samples_are_reported_with_what_was_sampled(inputs):
    class Breaks(SingleTurn):
        async def run(self, prompt, index, generate):
            await generate(np.empty(0, np.int32), 5)
            generate.save(b"one call")
            await generate(np.empty(0, np.int32), 3)
            raise KeyError("tool")

    async with System(inputs, lambda p, i: fine(0.0), agent_loop=Breaks) as system:
        async with asyncio.timeout(60):
            while not system.recorder._failures:
                await asyncio.sleep(0.01)
        failure = system.recorder.drain().failures[0]
        assert (failure.failure, failure.error) == ("agent_error", "KeyError: 'tool'")
        assert failure.data_source == "train"
        assert "Compute" in failure.prompt
        assert [count for count, _ in failure.sampled] == [5, 3]


def test_sources_beyond_the_limit_are_counted_together():
    counts = SourceCounts()
    for i in range(MAX_SOURCES):
        assert f"rollout/source/s{i}/samples" in counts.of(f"s{i}", [])
    assert all(name.startswith("rollout/source/other/") for name in counts.of("one more", []))
    assert "rollout/source/s3/samples" in counts.of("s3", [])


async def test_an_undecodable_validation_answer_counts_as_failed(inputs):
    class Unreadable(Reshaped):
        change = staticmethod(lambda s: changed(s, tokens=lambda of: np.full_like(of, -1)))

    async with System(inputs, lambda p, i: fine(1.0), agent_loop=Unreadable, total=0) as system:
        values = await asyncio.wait_for(system.validation.run(system.prompts[:2]), 60)
        assert (values["validation/samples"], values["validation/failed"]) == (0, 2)


def test_random_keys_differ_by_seed_group_sample_and_attempt():
    keys = {random_key(s, uid, i, a) for s in range(3) for uid in ("a", "b") for i in range(4) for a in range(3)}
    assert len(keys) == 72
    assert all(0 <= key < 2**63 for key in keys)
    assert random_key(1, "a", 2) == random_key(1, "a", 2)


def test_derived_slots_count_all_replicas(inputs):
    config = load_config(None, overrides(inputs, inputs / "run"))
    assert derive(config).slots == 8
    two = replace(config, rollout=replace(config.rollout, replicas=2))
    assert derive(two).slots == 2 * 8
    assert np.isclose(float(derive(config).staleness_threshold), 0.0)


async def test_the_backlog_grows_with_the_completion_rate():
    limiter = InFlightLimiter(slots=64, max_groups=0)
    limiter.acquire(64, groups=16)
    assert await limiter.room(4) == 1  # one group while the completion rate is unknown
    for _ in range(30):  # ten completions every 50 ms
        limiter.release(10, groups=2)
        limiter.acquire(10, groups=2)
        await asyncio.sleep(0.05)
    waiting = 4 * await limiter.room(4)
    assert 4 < waiting <= 64


async def test_the_sender_sends_at_once_while_urgent_and_in_batches_otherwise():
    sent, urgent = [], asyncio.Event()

    async def send(items):
        sent.append(items)

    sender = BatchingSender(send, interval_s=30.0, urgent=urgent)
    running = asyncio.create_task(sender.run())
    sender.add(1)
    await sender.drained()
    for item in (2, 3):
        sender.add(item)
        await asyncio.sleep(0.01)
    assert sent == [[1]]
    urgent.set()
    await asyncio.wait_for(sender.drained(), 5)
    sender.add(4)
    await asyncio.wait_for(sender.drained(), 5)
    assert sent == [[1], [2, 3], [4]]
    urgent.clear()
    assert not sender.hurry()  # nothing waits
    sender.add(5)
    await asyncio.sleep(0.01)
    assert sent == [[1], [2, 3], [4]]
    assert sender.hurry()
    await asyncio.wait_for(sender.drained(), 5)
    assert sent[3:] == [[5]]
    running.cancel()


class CountedCalls:
    """A queue that counts its calls by name."""

    def __init__(self, queue) -> None:
        self.queue, self.calls = queue, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self.queue, name)


async def test_while_all_slots_are_busy_groups_end_and_start_in_one_call(inputs, monkeypatch):
    """A group waits for a slot, so that none is idle when another ends."""
    monkeypatch.setattr("asyncrl.rollouter.loop._SCORING_S", 60.0)  # slow machines score, too, in that time
    replica = ScriptedReplica()

    async def requests(count: int) -> list[str]:
        await until(lambda: len(replica.requests) == count)
        return list(replica.requests)

    replicas, options = {"r": replica}, ("rollout.engine.slots=4", "async_training.staleness_threshold=50")
    async with System(inputs, lambda prompt, i: fine(float(i)), *options, replicas=replicas) as system:
        system.loop._queue = counted = CountedCalls(system.queue)
        ids = await requests(8)
        at_first = counted.calls["issue"]
        for ended in range(0, 24, 4):
            for id in ids[ended : ended + 4]:
                replica.emit(id, [5], FinishReason.STOP)
            ids = await requests(ended + 12)
        assert (counted.calls["put_and_issue"], counted.calls["issue"]) == (6, at_first)


async def test_groups_start_as_samples_end_and_a_straggler_occupies_one_slot_only():
    limiter = InFlightLimiter(slots=8, max_groups=0)  # plus one waiting group
    assert await limiter.room(4) == 3
    for _ in range(3):
        limiter.acquire(4, groups=1)
    waiting = asyncio.create_task(limiter.room(4))
    await asyncio.sleep(0)
    assert not waiting.done()
    limiter.release(1, groups=0)
    assert await waiting == 1  # eleven samples are in flight, below the limit of twelve
    limiter.acquire(4, groups=1)
    limiter.release(3, groups=0)
    assert not asyncio.create_task(limiter.room(4)).done()
    few = InFlightLimiter(slots=8, max_groups=1)
    assert await few.room(4) == 1
