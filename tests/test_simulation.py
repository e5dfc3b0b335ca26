"""The control plane of a run in virtual time, against engines and ranks whose speed is known."""

import asyncio
import dataclasses
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli.main import main as cli
from asyncrl.config.load import ConfigError, load_config
from asyncrl.observability.run_profile import run_profile
from asyncrl.observability.telemetry import clock
from asyncrl.observability.telemetry.linear_fit import LinearFit
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.simulation.deaths import Deaths
from asyncrl.simulation.engine import SimulatedEngine
from asyncrl.simulation.profile import (
    EngineFigures,
    GroupFigures,
    Profile,
    ProfileError,
    SampleFigures,
    SyncFigures,
    TrainerFigures,
    Turn,
)
from asyncrl.simulation.simulate import simulate
from asyncrl.simulation.sweep import Combination, best, combinations
from asyncrl.simulation.virtual_loop import Stuck, run_virtually
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

ROOT = Path(__file__).parent.parent
ENGINE = EngineFigures(step_s=0.01, row_s=0.001, context_token_s=0.0, prefill_token_s=0.0, report_s=0.2)
TRAINER = TrainerFigures(ranks=1, step_s=0.0, part_s=0.0, token_s=1e-4, stage_s=0.0)
SYNC = SyncFigures(4_000_000, 4e8, 0.01, 0.005, 0.005, 0.0, 0.01, 0.005, 0.005, 0.005)


def profile(*lengths, samples=4, **changes):
    """Groups of equal samples, one for each of ``lengths`` (tokens, or turns)."""
    turns = [(Turn(length),) if isinstance(length, int) else length for length in lengths]
    groups = tuple(
        GroupFigures(10, tuple(SampleFigures(of, float(index % 2)) for index in range(samples))) for of in turns
    )
    return replace(Profile(ENGINE, TRAINER, SYNC, groups, reward_s=0.01, flush_s=0.002), **changes)


def config(*options):
    return load_config(
        str(ROOT / "configs/quickstart.yaml"),
        [
            "model.path=none",
            "data.train_files=[none]",
            "rollout.n=4",
            "rollout.engine.slots=16",
            "trainer.mini_batch_groups=16",
            "trainer.total_steps=8",
            *options,
        ],
    )


# -- time --------------------------------------------------------------------------------------------------------------


def test_waiting_takes_no_time_and_events_come_in_their_order():
    async def work():
        order = []

        async def note(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, clock.now_s(), clock.unix_s()))

        await asyncio.gather(*(note(seconds) for seconds in (3600.0, 0.5, 7200.0)))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(86400):
                await asyncio.Event().wait()
        assert await asyncio.to_thread(lambda: 5) == 5
        return order, clock.now_s()

    began_s = time.monotonic()
    order, ended_s = run_virtually(work)
    assert order == [(s, pytest.approx(s), pytest.approx(s)) for s in (0.5, 3600.0, 7200.0)]
    assert ended_s == pytest.approx(7200 + 86400)
    assert time.monotonic() - began_s < 60
    assert clock.now_s() == pytest.approx(time.monotonic(), abs=5)


def test_what_would_wait_for_ever_raises():
    with pytest.raises(Stuck, match="no timer is set"):
        run_virtually(lambda: asyncio.Event().wait())


def test_timers_are_due_after_any_time():
    """From half a year on, a float's steps are larger than a nanosecond."""

    async def work():
        await asyncio.sleep(2**25)
        await asyncio.sleep(0.001)
        return clock.now_s()

    assert run_virtually(work) == pytest.approx(2**25)


# -- the engine --------------------------------------------------------------------------------------------------------


def request(uid, index=0, limit=1000, done=0, attempt=0):
    return Request(
        f"{uid}/0/{index}/1#{attempt}",
        f"{uid}/0",
        np.ones(10 + done, np.int32),
        10,
        0,
        done,
        limit - done,
        SamplingParams(),
        resumed=done,
    )


async def serve(engine, *requests):
    """Tokens, time of the report of its end and finish of each request."""
    await engine.submit(requests)
    tokens, ends = dict.fromkeys((r.id for r in requests), 0), {}
    while len(ends) < len(requests):
        batch = await engine.events()
        for e, (id, finish) in enumerate(zip(batch.ids, batch.finish, strict=True)):
            tokens[id] += int(batch.offsets[e + 1] - batch.offsets[e])
            if finish is not None:
                ends[id] = clock.now_s(), finish
    return {id: (tokens[id], *ends[id]) for id in ends}


@pytest.mark.parametrize("context_token_s", [0.0, 1e-5])
def test_an_engine_takes_the_time_of_its_decode_steps(context_token_s):
    figures = replace(ENGINE, context_token_s=context_token_s, prefill_token_s=0.002)

    async def work():
        engine = SimulatedEngine(profile(100, engine=figures), slots=2)
        await engine.resume(PolicyVersion(0, 0))
        began_s = clock.now_s()
        rows = [request("a", index, limit=1000 if index else 60) for index in range(3)]
        found = await serve(engine, *rows)
        return [found[row.id] for row in rows], began_s, engine

    found, began_s, engine = run_virtually(work)

    def steps_s(count, rows, context):  # decode step k reads ``context`` + ``rows`` k tokens
        return sum(0.01 + 0.001 * rows + context_token_s * (context + rows * k) for k in range(count))

    # two run until the first has its 60 tokens; then the third takes its slot, whose prompt is in the cache
    first = began_s + 0.02 + steps_s(60, 2, 20)
    second = first + steps_s(40, 2, 80)
    third = second + steps_s(60, 1, 50)
    expected = [(60, first, FinishReason.LENGTH), (100, second, FinishReason.STOP), (100, third, FinishReason.STOP)]
    for (tokens, at_s, finish), (count, expected_s, reason) in zip(found, expected, strict=True):
        assert (tokens, finish) == (count, reason)
        # an end is reported with the next report if a request waits for its slot; the curve is that of whole steps
        assert -0.02 <= at_s - expected_s <= figures.report_s + 0.02
    assert engine.tokens == 260
    assert engine.busy_s == pytest.approx(third - began_s, abs=0.03)


def test_an_aborted_request_has_the_tokens_that_it_had_time_for_and_continues_from_them():
    async def work():
        engine = SimulatedEngine(profile(100), slots=4)
        await engine.resume(PolicyVersion(0, 0))
        serving = asyncio.create_task(serve(engine, request("a")))
        await asyncio.sleep(0.5)
        assert await engine.pause("abort", 10) == 1
        first = (await serving)["a/0/0/1#0"]
        await engine.resume(PolicyVersion(0, 1))
        rest = await serve(engine, request("a", done=first[0], attempt=1))
        return first, rest["a/0/0/1#1"]

    first, rest = run_virtually(work)
    assert first[0] == pytest.approx(0.5 / 0.011, abs=1.5)
    assert first[2] is FinishReason.ABORT
    assert (first[0] + rest[0], rest[2]) == (100, FinishReason.STOP)


def test_aborted_requests_are_reported_in_the_order_in_which_they_came():
    async def work():
        engine = SimulatedEngine(profile(100), slots=1)
        await engine.resume(PolicyVersion(0, 0))
        serving = asyncio.create_task(serve(engine, *(request(uid) for uid in "abc")))
        await asyncio.sleep(0.5)
        await engine.pause("abort", 10)
        return list(await serving)

    assert run_virtually(work) == ["a/0/0/1#0", "b/0/0/1#0", "c/0/0/1#0"]


@pytest.mark.parametrize(("name", "drained"), [("native", ["a", "b"]), ("other", ["a"])])
def test_a_pause_that_waits_drains_what_the_engine_would(name, drained):
    """Each request takes 1.1 s alone. The last one comes when the engine pauses already."""

    async def work():
        engine = SimulatedEngine(profile(100, about={"engine": name}), slots=1)
        await engine.resume(PolicyVersion(0, 0))
        await engine.submit([request("a"), request("b")])
        await asyncio.sleep(0.5)
        pausing = asyncio.create_task(engine.pause("wait", 10))
        await asyncio.sleep(0.1)
        await engine.submit([request("c")])
        assert await pausing == 2
        paused_s, made = clock.now_s(), engine.tokens
        await asyncio.sleep(10)
        assert engine.tokens == made
        await engine.resume(PolicyVersion(0, 1))
        await asyncio.sleep(10)
        assert engine.tokens == 300
        return paused_s, made

    paused_s, made = run_virtually(work)
    assert made == 100 * len(drained)
    assert paused_s == pytest.approx(1.1 * len(drained), abs=0.05)


@pytest.mark.parametrize("ends", ["deadline", "cancelled"])
def test_an_engine_whose_pause_does_not_complete_goes_on(ends):
    async def work():
        engine = SimulatedEngine(profile(100), slots=1)
        await engine.resume(PolicyVersion(0, 0))
        serving = asyncio.create_task(serve(engine, request("a"), request("b")))
        pausing = asyncio.create_task(engine.pause("wait", 0.5 if ends == "deadline" else 10))
        await asyncio.sleep(0.25)
        if ends == "cancelled":
            pausing.cancel()
        with pytest.raises(TimeoutError if ends == "deadline" else asyncio.CancelledError):
            await pausing
        return [finish for _, _, finish in (await serving).values()], clock.now_s()

    finishes, at_s = run_virtually(work)
    assert finishes == [FinishReason.STOP] * 2
    assert at_s == pytest.approx(2.2, abs=0.3)


def test_an_engine_computes_of_a_later_turn_only_what_is_new_until_its_cache_is_freed():
    turns = (Turn(30, 20), Turn(1, 19), Turn(1, 19), Turn(1))
    figures = replace(ENGINE, prefill_token_s=0.01)

    async def work():
        engine = SimulatedEngine(profile(turns, engine=figures), slots=1)
        await engine.resume(PolicyVersion(0, 0))
        took_s = []
        for context in (10, 60, 80, 100):
            if context == 100:
                await engine.pause("wait", 10)
                await engine.release_kv()
                await engine.resume(PolicyVersion(0, 1))
            began_s = clock.now_s()
            whole = request("a")
            await serve(engine, whole._replace(id=f"a/0/0/{context}#0", tokens=np.ones(context, np.int32)))
            took_s.append(clock.now_s() - began_s)
        return took_s

    first, second, third, last = run_virtually(work)
    assert first == pytest.approx(10 * 0.01 + 30 * 0.011, abs=0.02)
    assert (second, third, last) == pytest.approx((0.2 + 0.011, 0.19 + 0.011, 1.0 + 0.011), abs=0.02)


# -- runs --------------------------------------------------------------------------------------------------------------


def test_equal_arguments_give_an_equal_run():
    of = profile(20, 60, 150)
    one, two = (simulate(config("async_training.staleness_threshold=0.5"), of) for _ in range(2))
    assert [step.at_s for step in one.steps] == [step.at_s for step in two.steps]
    assert one.figures() == two.figures()


@pytest.mark.parametrize("threshold", ["0", "0.5", "1", "3"])
def test_a_run_trains_every_group_once_within_the_bound(threshold):
    run = simulate(config(f"async_training.staleness_threshold={threshold}"), profile(20, 60, 150))
    last = run.steps[-1].metrics
    assert len(run.steps) == 8
    assert last["fully_async/count/trained"] == 8 * 16
    assert not any(value for name, value in last.items() if name.startswith("fully_async/dropped/"))
    ages = [step.metrics["fully_async/staleness/max"] for step in run.steps]
    assert max(ages) <= np.ceil(float(threshold))
    if threshold in ("1", "3"):
        assert max(ages) > 0


def test_pools_that_overlap_take_the_time_of_the_slower_one():
    """16 groups of 4 equal samples: generation takes 4 rounds of 100 steps with 16 rows, 10.4 s. Training takes
    64 × 110 × 1e-4 = 0.7 s, or 10.4 s with as much per token."""
    alone_s = 4 * 100 * 0.026
    slow = replace(TRAINER, token_s=alone_s / (64 * 110))
    for trainer in (TRAINER, slow):
        run = simulate(config("async_training.staleness_threshold=2"), profile(100, trainer=trainer)).figures()
        assert run["step_s"] == pytest.approx(alone_s, rel=0.1)
    apart = simulate(config("async_training.staleness_threshold=0"), profile(100, trainer=slow)).figures()
    assert run["step_s"] < 0.8 * apart["step_s"] < 0.8 * 2.1 * alone_s
    assert apart["staleness_mean"] == 0


def test_steps_in_which_nothing_is_generated_have_an_advice():
    options = ("async_training.trigger_parameter_sync_step=12", "trainer.total_steps=12", "rollout.replicas=4")
    run = simulate(config(*options), profile(20, trainer=replace(TRAINER, token_s=5e-3)))
    assert run.advice() == "nothing was generated during the steps that count: simulate more steps"


def test_more_replicas_generate_faster_until_training_binds():
    of = profile(100, trainer=replace(TRAINER, token_s=5e-4))  # 3.5 s
    found = [simulate(config("async_training.staleness_threshold=2", f"rollout.replicas={n}"), of) for n in (1, 2, 4)]
    steps_s = [run.figures()["step_s"] for run in found]
    assert steps_s[0] == pytest.approx(10.4, rel=0.1)
    assert steps_s[1] == pytest.approx(5.2, rel=0.15)
    assert steps_s[2] == pytest.approx(3.52, rel=0.15)
    assert found[0].advice().startswith("generation is the bottleneck")
    assert found[2].advice().startswith(("training is the bottleneck", "the pools are balanced"))


@pytest.mark.parametrize(
    "threshold", [pytest.param("0", marks=pytest.mark.slow), "0.5", pytest.param("2", marks=pytest.mark.slow)]
)
def test_shards_are_as_fast_as_one_rollouter(threshold):
    pools = f"async_training.staleness_threshold={threshold}", "rollout.replicas=16", "trainer.mini_batch_groups=64"
    of = profile(20, 60, 150)
    one, two = (simulate(config(*pools, f"rollout.shards={shards}"), of) for shards in (1, 2))
    assert two.steps[-1].metrics["fully_async/count/trained"] == 8 * 64
    assert two.figures()["step_s"] == pytest.approx(one.figures()["step_s"], rel=0.05)
    assert max(step.metrics["fully_async/staleness/max"] for step in two.steps) <= np.ceil(float(threshold))


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_replicas_that_die_cost_time_and_no_group(shards):
    more = f"rollout.shards={shards}", "supervision.max_restarts=50"
    options = config("async_training.staleness_threshold=1", "rollout.replicas=4", *more)
    of = profile(100, 200, 400)
    lasting, none, *mortal = (
        simulate(options, of, deaths=deaths)
        for deaths in (None, Deaths(after_s=1e9, start_s=5), *[Deaths(after_s=10, start_s=2)] * 2)
    )
    if shards == 1:  # else shards ask in another order
        assert none.figures() == lasting.figures()
    one, two = (run.figures() for run in mortal)
    assert one == two
    assert one["deaths"] > 2
    assert one["step_s"] > 1.1 * lasting.figures()["step_s"]
    last = mortal[0].steps[-1].metrics
    assert last["fully_async/count/trained"] == 8 * 16
    assert max(step.metrics["fully_async/staleness/max"] for step in mortal[0].steps) <= 1


def test_a_run_whose_replica_dies_too_often_would_fail():
    with pytest.raises(ConfigError, match=r"the run would fail: replica/0 died: .*max_restarts is 0"):
        simulate(config("supervision.max_restarts=0"), profile(100), deaths=Deaths(after_s=5, start_s=5))


def test_a_replica_that_takes_too_long_to_start_would_fail():
    with pytest.raises(ConfigError, match=r"the run would fail: replica/0 did not start within 50 s"):
        simulate(
            config("supervision.start_s=50", "supervision.max_restarts=1"),
            profile(100),
            deaths=Deaths(after_s=5, start_s=100),
        )


def test_a_run_whose_syncs_fail_would_restart_its_replicas():
    """A request of 80 s outlives the pause that waits for it, so that every sync fails."""
    options = config(
        "async_training.staleness_threshold=1",
        "async_training.partial_rollout=false",
        "param_sync.deadlines.pause_s=1",
        "rollout.max_response_tokens=4000",
        "rollout.engine.max_context_tokens=4100",
        "supervision.max_restarts=50",
        "trainer.total_steps=3",
    )
    long = profile(4_000, 4_000, 20)
    with pytest.raises(ConfigError, match=r"would restart replica/0, which .*pause.* 1 s.*; --death-every-h and"):
        simulate(options, long)
    run = simulate(options, long, deaths=Deaths(after_s=1e9, start_s=2))
    assert run.deaths > 0
    assert run.steps[-1].metrics["fully_async/count/trained"] == 3 * 16


def test_a_run_that_goes_on_generates_for_later_steps():
    """Bound by training: until its last steps, a run generates as many samples as it trains."""
    of = profile(100, trainer=replace(TRAINER, token_s=5e-3))
    options = config("async_training.staleness_threshold=2", "rollout.replicas=4")
    ends, goes_on = (simulate(options, of, goes_on=goes_on).figures() for goes_on in (False, True))
    assert goes_on["tokens_per_s"] == pytest.approx(100 * goes_on["samples_per_s"], rel=0.02)
    assert ends["tokens_per_s"] < 0.8 * goes_on["tokens_per_s"]
    assert ends["step_s"] == pytest.approx(goes_on["step_s"], rel=0.02)


def test_the_time_of_a_sync_is_that_of_a_session():
    once, seldom = (
        simulate(config(f"async_training.trigger_parameter_sync_step={steps}"), profile(20)).figures()["sync_s"]
        for steps in (1, 4)
    )
    assert seldom == pytest.approx(once, rel=0.05)
    assert once > 0


def test_an_error_of_an_engines_model_is_none_of_an_engine():
    class Broken(SimulatedEngine):
        async def events(self):
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as raised:
        simulate(config(), profile(100), Broken)
    assert raised.group_contains(ZeroDivisionError)


def test_agents_wait_for_their_tools():
    turns = (Turn(30, 10, wait_s=2.0), Turn(30, 10, wait_s=2.0), Turn(30))
    run = simulate(config("trainer.total_steps=4", "rollout.engine.slots=64"), profile(turns))
    sampled = run.steps[-1].generated / (4 * 64)
    assert sampled >= 90  # of each trained sample; more are under way
    assert run.figures()["step_s"] > 4


# -- profiles and the command ------------------------------------------------------------------------------------------


def test_a_profile_survives_its_file(tmp_path):
    of = profile(20, (Turn(5, 3, 0.5), Turn(7)), about={"device": "two cores"})
    of.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == of


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda p: p["engine"].pop("row_s"), r"engine.row_s: .* found None; a finished run of at least three steps"),
        (lambda p: p["trainer"].update(stage_s="1"), r"trainer.stage_s: .* found '1'; a run that saved a checkpoint"),
        (lambda p: p.update(reward_s=-1), r"reward_s: expected a number of at least 0, found -1"),
        (lambda p: p["engine"].update(report_s=0), r"engine.report_s: expected a number above 0, found 0"),
        (lambda p: p["sync"].update(bytes_per_s=0.0), r"sync.bytes_per_s: expected a number above 0, found 0.0"),
        (lambda p: p.update(groups=[[10, [[0.5, [5, 0, -1.0]]]]]), r"groups: .*less than nothing"),
        (lambda p: p.update(about=None), r"about: expected a JSON object, found None"),
        (lambda p: p.pop("sync"), r"sync: expected a JSON object, found None; a finished run of at least three steps"),
        (lambda p: p.update(groups=[]), r"groups: expected at least one, found none"),
        (lambda p: p.update(groups=[[10, [[0.5]]]]), r"groups: expected \[prompt tokens.*without tokens"),
        (lambda p: p["engine"].update(step_s=0, row_s=0), r"engine: expected a decode step that takes some time"),
    ],
)
def test_a_profile_that_lacks_a_figure_says_what_would_measure_it(tmp_path, capsys, change, problem):
    path = tmp_path / "profile.json"
    profile(20).write(path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ProfileError, match=problem):
        Profile.read(path)
    arguments = ["simulate", "--config", str(ROOT / "configs/quickstart.yaml"), "--profile", str(path)]
    assert cli(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_configuration_that_needs_more_than_the_profile_has_says_so(tmp_path):
    path = tmp_path / "profile.json"
    for name, part, options in (
        ("part_s", "trainer", ["async_training.staleness_threshold=0.5"]),
        ("stage_s", "trainer", ["checkpoint.every_steps=2"]),
        ("load_s", "sync", ["param_sync.staging=full"]),
    ):
        of = profile(20)
        lacking = replace(of, **{part: replace(getattr(of, part), **{name: math.nan})})
        lacking.write(path)
        simulate(config("async_training.staleness_threshold=1", "checkpoint.every_steps=0"), Profile.read(path))
        needing = config("async_training.staleness_threshold=1", "checkpoint.every_steps=0", *options)
        with pytest.raises(ProfileError, match=rf"lacks {part}\.{name}.*a run .* measures it"):
            simulate(needing, Profile.read(path))


# -- measuring ---------------------------------------------------------------------------------------------------------


def test_a_fit_finds_what_the_observations_determine():
    fit, recorder, numbers = LinearFit("fit", ("a", "b", "never", "c", "d")), Recorder("x"), np.random.default_rng(0)
    for _ in range(50):
        a, b, c = numbers.random(3)
        fit.observe(recorder, 2 * a + 3 * b + 5 * c, a, b, 0.0, c, 7 * c)
    counters = recorder.drain().counters
    found = fit.coefficients(counters)
    assert found["a"] == pytest.approx(2, rel=1e-3)
    assert found["b"] == pytest.approx(3, rel=1e-3)
    assert found["c"] + 7 * found["d"] == pytest.approx(5, rel=1e-3)
    assert found["c"] == pytest.approx(7 * found["d"])
    assert fit.not_told_apart(counters) == ["c", "d"]
    assert "never" not in found
    assert fit.coefficients({}) == {}
    assert fit.not_told_apart({}) == []


def test_a_bounded_coefficient_of_a_fit_is_at_most_the_mean_of_the_other():
    """What an engine that is always full shows: the same batch at each step, few prompts, and noise."""
    terms, numbers = ("step_s", "row_s", "prefill_token_s"), np.random.default_rng(0)
    free, bounded = LinearFit("fit", terms), LinearFit("fit", terms, at_most=("prefill_token_s", "row_s"))
    recorder, open_ = Recorder("x"), Recorder("x")
    for _ in range(50):
        steps, prompts = numbers.integers(10, 30), numbers.integers(0, 60)
        bounded.observe(recorder, 0.005 * steps + 0.0004 * prompts, steps, 48 * steps, prompts)
        rows = numbers.integers(1, 48) * steps
        bounded.observe(open_, 0.002 * steps + 1e-4 * rows + 5e-5 * prompts, steps, rows, prompts)
    counters = recorder.drain().counters
    assert free.coefficients(counters)["prefill_token_s"] == pytest.approx(4e-4)
    found = bounded.coefficients(counters)
    assert found["prefill_token_s"] == pytest.approx(found["row_s"] + found["step_s"] / 48)
    assert 5e-3 / 48 < found["prefill_token_s"] < 1.5 * 5e-3 / 48
    told_apart = {"step_s": 0.002, "row_s": 1e-4, "prefill_token_s": 5e-5}
    assert bounded.coefficients(open_.drain().counters) == pytest.approx(told_apart)


@pytest.mark.parametrize(("partial", "pause_s"), [("true", 40.0), ("false", 0.0)])
def test_the_wait_for_running_samples_is_no_figure_of_a_sync(partial, pause_s):
    """A simulation waits for its own samples."""
    phases = dict.fromkeys(("plan", "pause", "verify", "commit", "resume", "transfer"), 0.1) | {"pause": 40.0}
    syncs = [{f"param_sync/{phase}_s": s for phase, s in phases.items()} | {"param_sync/total_s": 41.0}] * 2
    syncs = [{**sync, "param_sync/bytes": 1000} for sync in syncs]
    options = config(f"async_training.partial_rollout={partial}", "async_training.staleness_threshold=1")
    found = run_profile({}, syncs, [], 0.002, options)["sync"]
    assert (found["pause_s"], found["resume_s"]) == (pause_s, 0.1)


def test_a_fit_has_no_negative_coefficient():
    fit, recorder, numbers = LinearFit("fit", ("a", "b")), Recorder("x"), np.random.default_rng(0)
    for _ in range(50):
        a, b = numbers.random(2)
        fit.observe(recorder, 2 * a - 0.5 * b, a, b)
    found = fit.coefficients(recorder.drain().counters)
    assert found["b"] == 0
    assert 1 < found["a"] < 2


def test_the_figures_of_a_run_predict_it():
    """What the control plane measures in a simulated run are the figures that it was simulated with. At a threshold of
    0 the number of running requests changes, which tells an engine's figures apart."""
    engine = EngineFigures(step_s=0.01, row_s=0.001, context_token_s=2e-5, prefill_token_s=1e-3, report_s=0.2)
    trainer = TrainerFigures(ranks=1, step_s=0.1, part_s=0.02, token_s=5e-4, stage_s=0.03)
    lengths = (15, 40, 90, 150, (Turn(20, 5, 0.7), Turn(60)))
    of = profile(*lengths, engine=engine, trainer=trainer, reward_s=0.04)
    options = config("async_training.staleness_threshold=0", "checkpoint.every_steps=3", "trainer.total_steps=12")
    run = simulate(options, of)
    syncs = [step.metrics for step in run.steps if "param_sync/total_s" in step.metrics]
    found = run_profile(run.counters, syncs, run.groups, 0.002, options)
    for name, expected in dataclasses.asdict(engine).items():
        tolerance = 0.2 if name in ("context_token_s", "prefill_token_s") else 0.1  # they are small here
        assert found["engine"][name] == pytest.approx(expected, rel=tolerance), name
    assert found["trainer"] == pytest.approx(dataclasses.asdict(trainer), rel=0.02)
    assert found["reward_s"] == pytest.approx(0.04, rel=0.02)
    assert found["sync"]["nbytes"] / found["sync"]["bytes_per_s"] == pytest.approx(0.01, rel=0.1)
    turns = [sample[1:] for _, group in found["groups"] for sample in group]
    shapes = {tuple((sampled, observed) for sampled, observed, _ in of_sample) for of_sample in turns}
    assert shapes == {((15, 0),), ((40, 0),), ((90, 0),), ((150, 0),), ((20, 5), (60, 0))}
    assert {round(of_sample[0][2], 3) for of_sample in turns if len(of_sample) > 1} == {0.7}


def test_the_command_prints_what_binds(tmp_path, capsys):
    profile(100).write(tmp_path / "profile.json")
    arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), "--profile", str(tmp_path / "profile.json")]
    assert cli(["simulate", *arguments, "--steps=4", "trainer.mini_batch_groups=16", "rollout.n=4"]) == 0
    *table, advice, figures = capsys.readouterr().out.splitlines()
    assert table[0].startswith("a step")
    assert "generation is the bottleneck" in advice
    assert json.loads(figures)["rollouter_idle"] < 0.2
    assert cli(["simulate", *arguments, "rollout.n=none"]) == 2
    profile(100, about={"not_told_apart": ["engine.step_s", "engine.row_s"]}).write(tmp_path / "profile.json")
    capsys.readouterr()
    assert cli(["simulate", *arguments, "--steps=3", "trainer.mini_batch_groups=16", "rollout.n=4"]) == 0
    assert "only what engine.step_s, engine.row_s explain together is known" in capsys.readouterr().err
    assert cli(["simulate", *arguments, "rollout.n=none"]) == 2
    assert "rollout.n" in capsys.readouterr().err
    profile(100, samples=1).write(tmp_path / "profile.json")  # all rewards are equal
    options = ("trainer.mini_batch_groups=16", "rollout.n=4", "algorithm.filter_zero_variance=true")
    assert cli(["simulate", *arguments, *options]) == 2
    assert "config: with the rewards of the profile nothing would be trained" in capsys.readouterr().err
    for wrong in ("--steps=2", "trainer.total_steps=500"):
        with pytest.raises(SystemExit, match="2"):
            cli(["simulate", *arguments, wrong])
        assert "steps: expected" in capsys.readouterr().err


# -- sweeps ------------------------------------------------------------------------------------------------------------


def test_a_sweep_has_all_combinations_and_low_to_high_doubles():
    swept = list(combinations(["rollout.replicas=4..20", "async_training.staleness_threshold=0,0.5"]))
    assert [tuple(options.values()) for options in swept] == [(r, s) for r in ("4", "8", "16") for s in ("0", "0.5")]
    for given in (
        "rollout.replicas",
        "=1,2",
        "rollout.replicas=1,,2",
        "rollout.replicas=8..4",
        "rollout.replicas=a..b",
    ):
        with pytest.raises(ValueError, match="--sweep"):
            list(combinations([given]))


def test_the_best_of_a_sweep_is_the_freshest_of_the_fastest():
    speeds = {"a": (100, 1.0), "b": (98, 0.2), "c": (80, 0.0)}
    figures = {x: {"samples_per_s": speed, "staleness_mean": age} for x, (speed, age) in speeds.items()}
    found = [Combination({"x": x}, figures=of) for x, of in figures.items()]
    assert best([*found, Combination({"x": "d"}, refused="why")]).options == {"x": "b"}
    assert best([Combination({"x": "d"}, refused="why")]) is None


def test_a_sweep_over_gpus_names_the_best_split_and_draws_it(tmp_path, capsys):
    of = profile(60, 90, trainer=replace(TRAINER, token_s=2e-4))
    of.write(tmp_path / "profile.json")
    arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), "--profile", str(tmp_path / "profile.json")]
    options = ["--steps=4", "trainer.mini_batch_groups=16", "rollout.n=4", "rollout.engine.slots=16"]
    swept = ["--sweep", "rollout.replicas=1..4", "async_training.staleness_threshold=0,0.5", "--gpus=4"]
    page = tmp_path / "sweep.html"
    assert cli(["simulate", *arguments, *options, *swept, f"--out={page}"]) == 0
    *_, chosen, where, figures = capsys.readouterr().out.splitlines()
    found = json.loads(figures)
    assert where == f"page: {page}"
    ranks = {row["rollout.replicas"]: row.get("trainer.ranks", row.get("refused")) for row in found["combinations"]}
    assert ranks == {"1": "3", "2": "2", "4": "the replicas need 4 GPUs, which leaves none of 4 to train"}
    fastest = max(row.get("samples_per_s", 0) for row in found["combinations"])
    assert found["best"]["samples_per_s"] >= 0.97 * fastest
    assert chosen.startswith(f"best: rollout.replicas={found['best']['rollout.replicas']} ")
    html = page.read_text()
    assert html.count("plotly-graph-div") == 6
    assert "leaves none of 4 to train" in html
    assert cli(["simulate", *arguments, *options, "--sweep", "trainer.ranks=1,2", f"--out={page}"]) == 0
    assert "best: trainer.ranks=" in capsys.readouterr().out
    pauses = ["async_training.partial_rollout=false", "--sweep", "param_sync.pause=abort,wait"]
    assert cli(["simulate", *arguments, *options, *pauses, f"--out={page}"]) == 0
    abort, wait = json.loads(capsys.readouterr().out.splitlines()[-1])["combinations"]
    assert "param_sync.pause: abort leaves samples that span versions" in abort["refused"]  # as a run refuses it
    assert wait["samples_per_s"] > 0
    assert cli(["simulate", *arguments, *options, "--sweep", "rollout.replicas=8", "--gpus=4"]) == 2
    assert "no combination can be simulated" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli(["simulate", *arguments, "--gpus=4"])


def test_deaths_are_given_in_hours_and_told(tmp_path, capsys, caplog):
    profile(60).write(tmp_path / "profile.json")
    arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), "--profile", str(tmp_path / "profile.json")]
    options = ["--steps=4", "trainer.mini_batch_groups=16", "rollout.n=4", "rollout.replicas=4"]
    for wrong in (["--death-every-h=1"], ["--restart-s=5"], ["--death-every-h=0", "--restart-s=5"]):
        with pytest.raises(SystemExit, match="2"):
            cli(["simulate", *arguments, *options, *wrong])
        assert "--death-every-h and --restart-s: expected" in capsys.readouterr().err
    dying = ["--death-every-h=0.001", "--restart-s=0.5", "supervision.max_restarts=50"]
    assert cli(["simulate", *arguments, *options, *dying]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["deaths"] > 0
    assert not caplog.records  # those of simulated events are hidden
