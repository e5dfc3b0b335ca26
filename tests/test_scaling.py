"""The number of replicas changes while a run goes on: on request, by autoscale, and when one is preempted."""

import asyncio
import json
import signal
import subprocess
import sys
import threading

import pytest

import asyncrl.cli.ledger
from asyncrl.cli.main import main
from asyncrl.config.load import ConfigError, load_config
from asyncrl.disk.files import write_whole
from asyncrl.observability.efficiency import RECENT_STEPS, EfficiencyTracker
from asyncrl.rollouter.limiter import InFlightLimiter
from asyncrl.run.driver_epoch import DriverEpoch
from asyncrl.run.placement_plan import PlacementError
from asyncrl.run.scaling import NotScaled, Scaling, ask
from tests.support.faults import FaultyRun, trained_steps
from tests.support.scripted import until
from tests.support.tiny import make_inputs, overrides


class World:
    """Supervisor and cluster. It has room for ``room`` replicas."""

    def __init__(self, *names, room=4):
        self.replica_names, self.room = list(names), room
        self.dying = set()

    @property
    def serving(self):
        return set(self.replica_names) - self.dying

    async def started(self):
        pass

    async def add_replicas(self, names):
        if len(self.replica_names) + len(names) > self.room:
            raise PlacementError("the rollout pool was not placed within 30 s: it needs 8 GPU (free: 2)")
        self.replica_names += names

    async def remove_replica(self, name):
        self.replica_names.remove(name)


@pytest.fixture
def folder(tmp_path):
    """The folder of a run whose driver this process is."""
    (tmp_path / "config.yaml").touch()
    epoch = DriverEpoch.take(tmp_path, 0)
    yield tmp_path
    epoch.end()


@pytest.fixture
def config(tmp_path):
    def with_options(*options):
        return load_config(None, overrides(tmp_path, tmp_path / "run", *options))

    return with_options


async def scale(world, config, folder, *numbers, tracker=None):
    """Lines of `ask` for each of the numbers, or its error."""
    serving = asyncio.create_task(Scaling(config, folder, world, world, lambda: tracker).run())
    await asyncio.sleep(0)
    lines = []
    for number in numbers:
        try:
            lines += await asyncio.to_thread(lambda n=number: list(ask(folder, n)))
        except NotScaled as e:
            lines.append(str(e))
    serving.cancel()
    await asyncio.wait([serving])
    return lines


async def test_replicas_join_and_leave_on_request(folder, config):
    world = World("replica/0", "replica/2")
    assert await scale(world, config(), folder, 4, 4, 1) == [
        "adding replica/1, replica/3",
        "the run has 4 replicas, and new ones serve after their first sync",
        "the run has 4 replicas",
        "removing replica/3",
        "removing replica/1",
        "removing replica/2",
        "the run has 1 replica",
    ]
    assert world.replica_names == ["replica/0"]
    assert not list((folder / "scaling").iterdir())


async def test_each_shard_keeps_a_replica(folder, config):
    world = World("replica/0", "replica/1", "replica/3")  # replica/2 is lost, so the second shard has one
    assert await scale(world, config("rollout.shards=2", "rollout.replicas=4"), folder, 1, 2) == [
        "replicas: expected at least 2, one for each of 2 rollout.shards; found 1",
        "removing replica/1",
        "the run has 2 replicas",
    ]
    assert world.replica_names == ["replica/0", "replica/3"]


async def test_a_replica_that_does_not_serve_leaves_first(folder, config):
    world = World("replica/0", "replica/1", "replica/2")
    world.dying = {"replica/0"}
    assert await scale(world, config(), folder, 1) == [
        "removing replica/0",
        "removing replica/2",
        "the run has 1 replica",
    ]


async def test_what_cannot_be_scaled_is_refused_in_one_line(folder, config, tmp_path):
    world = World("replica/0")
    assert await scale(world, config(), folder, 0, 9, 10**9) == [
        "replicas: expected at least 1, which serves whole groups; found 0",
        "the rollout pool was not placed within 30 s: it needs 8 GPU (free: 2)",
        "replicas: expected at most 10000, found 1000000000",
    ]
    with pytest.raises(NotScaled, match="expected the folder of a run"):
        list(ask(tmp_path / "elsewhere", 2))


@pytest.mark.parametrize("asked", ["1e400", "2.7", "true", '"3"', "null"])
async def test_a_request_for_no_number_is_refused(folder, config, asked):
    world = World("replica/0")
    scaling = Scaling(config(), folder, world, world, lambda: None)
    (folder / "scaling").mkdir()
    serving = asyncio.create_task(scaling.run())
    await asyncio.sleep(0)
    (folder / "scaling/one.json").write_text(f'{{"replicas": {asked}}}')
    answer = folder / "scaling/one.answer.json"
    await until(lambda: answer.exists() and json.loads(answer.read_text())["done"])
    assert 'expected {"replicas": N}' in json.loads(answer.read_text())["error"]
    assert world.replica_names == ["replica/0"]
    serving.cancel()


def test_a_run_that_has_ended_is_not_scaled(folder):
    DriverEpoch(folder, 1).end()
    with pytest.raises(NotScaled, match=r"no driver runs it now; start or resume the run with rollout\.replicas=2$"):
        list(ask(folder, 2))


def test_a_run_that_ends_before_it_answers_says_so(folder):
    threading.Timer(0.7, DriverEpoch(folder, 1).end).start()
    with pytest.raises(NotScaled, match="the run ended before it had 2 replicas"):
        list(ask(folder, 2))


def test_a_request_that_a_starting_driver_removes_is_not_waited_for(folder):
    threading.Timer(0.7, lambda: [path.unlink() for path in (folder / "scaling").glob("*.json")]).start()
    with pytest.raises(NotScaled, match="its driver was just starting"):
        list(ask(folder, 2))


def test_a_request_that_cannot_be_written_is_refused(folder):
    (folder / "scaling").touch()  # root may write everywhere else
    with pytest.raises(NotScaled, match="the request cannot be written"):
        list(ask(folder, 2))


async def test_an_answer_that_cannot_be_written_ends_neither_the_run_nor_the_wait(folder, config, monkeypatch, caplog):
    def full(path, content):
        if path.name.endswith(".answer.json"):
            raise OSError(28, "No space left on device")
        write_whole(path, content)

    monkeypatch.setattr("asyncrl.run.scaling.write_whole", full)
    world = World("replica/0")
    serving = asyncio.create_task(Scaling(config(), folder, world, world, lambda: None).run())
    await asyncio.sleep(0)
    with pytest.raises(NotScaled, match="could not answer; see its log, and ask again"):
        await asyncio.to_thread(lambda: list(ask(folder, 2)))
    await until(lambda: world.replica_names == ["replica/0", "replica/1"])
    assert "No space left on device" in caplog.text
    assert not serving.done()
    serving.cancel()
    await asyncio.wait([serving])


@pytest.mark.parametrize("arguments", [["replicas=0"], ["replicas=many"], ["12"], []])
def test_a_command_without_a_number_is_refused(tmp_path, arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["scale", str(tmp_path), *arguments])
    assert raised.value.code == 2
    assert "replicas=N" in capsys.readouterr().err


# -- autoscale ---------------------------------------------------------------------------------------------------------


def observed(training_s, generating_s, replicas=2, steps=RECENT_STEPS):
    tracker = EfficiencyTracker(1, replicas, "CPU")
    for _ in range(steps):
        tracker.step(max(training_s, generating_s), 1000, training_s, 1000, generating_s, 0.0, True)
    return tracker


@pytest.mark.parametrize(
    ("training_s", "generating_s", "wanted"),
    [(1.0, 1.6, 4), (1.0, 1.05, 2), (1.0, 0.8, 2), (1.0, 0.4, 1), (1.0, 9.0, 5), (9.0, 1.0, 1)],
)
async def test_autoscale_brings_generation_into_balance_within_its_limits(
    folder, config, monkeypatch, training_s, generating_s, wanted
):
    monkeypatch.setattr("asyncrl.run.scaling.POLL_S", 0.01)
    world = World("replica/0", "replica/1", room=9)
    tracker = observed(training_s, generating_s)
    limits = config("rollout.replicas=2", "rollout.autoscale.min=1", "rollout.autoscale.max=5")
    serving = asyncio.create_task(Scaling(limits, folder, world, world, lambda: tracker).run())
    await until(lambda: len(world.replica_names) == wanted)
    await asyncio.sleep(0.1)
    assert len(world.replica_names) == wanted
    assert not serving.done()
    serving.cancel()
    await asyncio.wait([serving])


async def test_autoscale_goes_on_where_nothing_is_free(folder, config, monkeypatch, caplog):
    monkeypatch.setattr("asyncrl.run.scaling.POLL_S", 0.01)
    world, tracker = World("replica/0", room=1), observed(1.0, 2.0, replicas=1)
    serving = asyncio.create_task(
        Scaling(config("rollout.autoscale.max=2"), folder, world, world, lambda: tracker).run()
    )
    await until(lambda: "autoscale: the rollout pool was not placed" in caplog.text)
    await asyncio.sleep(0.1)
    assert caplog.text.count("autoscale: the rollout pool was not placed") == 1
    assert not serving.done()
    serving.cancel()
    await asyncio.wait([serving])


def test_a_balance_needs_steps_of_the_pools_as_they_are():
    tracker = observed(1.0, 2.0, steps=RECENT_STEPS - 1)
    assert tracker.balance() is None
    tracker.step(2.0, 1000, 1.0, 1000, 2.0, 0.0, True)
    assert tracker.balance() == pytest.approx(2)
    tracker.resize(1, 4)
    assert tracker.balance() is None
    for _ in range(RECENT_STEPS):
        tracker.step(1.0, 1000, 1.0, 1000, 1.0, 0.0, True)
    assert tracker.balance() == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("rollout.replicas=4", "rollout.autoscale.max=3"), "rollout.replicas: expected 1 to 3"),
        (("rollout.autoscale.min=4", "rollout.autoscale.max=3"), "rollout.autoscale.max: expected at least min = 4"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(config, options, problem):
    with pytest.raises(ConfigError, match=problem):
        config(*options)


# -- the parts ---------------------------------------------------------------------------------------------------------


async def test_more_slots_let_waiting_groups_start():
    limiter = InFlightLimiter(4, 0)
    limiter.acquire(8, groups=2)
    waiting = asyncio.create_task(limiter.room(4))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert not limiter.idle.is_set()
    limiter.resize(12)
    assert await waiting == 2
    assert limiter.idle.is_set()


# -- whole runs --------------------------------------------------------------------------------------------------------


def asyncrl_scale(run, number):
    command = [sys.executable, "-m", "asyncrl.cli.main", "scale", str(run.folder), f"replicas={number}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, (done.stdout + done.stderr).splitlines()


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_replicas_join_and_leave_a_run_and_a_preempted_one_hands_its_samples_over(tmp_path):
    inputs, folder = make_inputs(tmp_path / "inputs"), tmp_path / "run"
    cpus = ("ray.cpus_per_rank=0.1", "ray.cpus_per_replica=0.1", "ray.placement_timeout_s=5")
    run = FaultyRun(inputs, folder, "trainer.total_steps=2000", *cpus)
    try:
        run.until_trained(2)
        assert asyncrl_scale(run, 3) == (
            0,
            ["adding replica/1, replica/2", "the run has 3 replicas, and new ones serve after their first sync"],
        )
        run.until(lambda: served(folder) == 3, "was served by all")
        [preempted, *_] = run.actors("replica")
        preempted.send_signal(signal.SIGTERM)
        run.until(lambda: "is preempted: it got SIGTERM; restarting it" in run.text, "noticed the signal")
        status, [*leaving, last] = asyncrl_scale(run, 1)
        assert (status, last) == (0, "the run has 1 replica")
        # the preempted one first, unless it serves again
        assert leaving in ([f"removing replica/{i}" for i in order] for order in ((0, 2), (2, 1)))
        run.until(lambda: len(run.actors("replica")) == 1, "had one replica")  # the preempted one may still start
        status, lines = asyncrl_scale(run, 500)
        assert (status, lines[0]) == (1, "adding 499 replicas")
        assert lines[1].startswith("the rollout pool was not placed within 5 s: it needs 49.9 CPU (free: ")
        run.until_trained(trained_steps(folder) + 2)
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130, run.text
    finally:
        run.close()
    assert asyncrl.cli.ledger.main([str(folder)]) == 0  # all groups add up
    assert asyncrl_scale(run, 2)[0] == 1


def served(folder):
    """Number of replicas that the last step's sync gave a version."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows[-1].get("param_sync/replicas")
