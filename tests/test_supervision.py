"""Restart limits, and the supervisor's response to each death. The cluster is a fake of our own interface, whose
actors die as they do on Ray."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import ObjectLostError, RayTaskError

from asyncrl.config.schema import RolloutConfig, SupervisionConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.errors import SyncError
from asyncrl.processes.actor_client import (
    ActorBroken,
    ActorClient,
    ActorDied,
    ActorStartFailed,
    DataLost,
    Preempted,
    RestartableClient,
)
from asyncrl.processes.device_errors import is_device_error
from asyncrl.run.restartable import RestartableRanks, RestartableRollouters
from asyncrl.run.rollouters import Rollouters, shard_names
from asyncrl.run.supervision import DiedTooOften, DiskStalled, NotStarted, RestartPolicy, Supervisor
from asyncrl.trainer.actors import RankGroup
from tests.support.scripted import until


def test_the_back_off_doubles_up_to_a_limit_for_each_actor_separately():
    policy = RestartPolicy(SupervisionConfig(max_restarts=5, backoff_s=0.5, max_backoff_s=3), clock=lambda: 0.0)
    assert [policy.next_backoff_s("replica/0", "died") for _ in range(5)] == [0.5, 1, 2, 3, 3]
    assert policy.next_backoff_s("replica/1", "died") == 0.5
    with pytest.raises(DiedTooOften, match=r"replica/0 died; restarted 5 times within 600 s \(.*max_restarts is 5\)"):
        policy.next_backoff_s("replica/0", "replica/0 died")


def test_old_restarts_do_not_count():
    now = [0.0]
    policy = RestartPolicy(SupervisionConfig(max_restarts=1, window_s=60), clock=lambda: now[0])
    policy.next_backoff_s("trainer", "died")
    now[0] = 61.0
    assert policy.next_backoff_s("trainer", "died") == SupervisionConfig().backoff_s
    assert policy.counts["trainer"] == 2


def test_without_restarts_the_first_death_is_the_last():
    with pytest.raises(DiedTooOften, match=r"^replica/0 died \(supervision.max_restarts is 0\)$"):
        RestartPolicy(SupervisionConfig(max_restarts=0)).next_backoff_s("replica/0", "replica/0 died")


class Replica:
    def __init__(self, name: str) -> None:
        self.name, self.handle, self.death = name, f"handle of {name}", asyncio.Event()
        self.last_words = ActorDied(name)

    async def alive(self) -> None:
        await self.death.wait()
        raise self.last_words


class Rollouter(Replica):
    def __init__(self, name: str, log: list[str]) -> None:
        super().__init__(name)
        self.log = log

    async def run(self) -> None:
        self.log.append("rolling out")
        await self.alive()


class World:
    """Fake cluster and sync coordinator; logs the supervisor's calls. ``starts``: for each of an actor's next starts,
    an exception to raise or an event to wait for; any other start succeeds at once."""

    def __init__(self, names=("replica/0", "replica/1"), shards=1) -> None:
        self.replica_names = list(names)
        self.replicas: dict[str, Replica] = {}
        self.sessions = self.replicas
        self.senders: dict[str, Replica] = {}
        self.starts: dict[str, list[Exception | asyncio.Event]] = {}
        self.log: list[str] = []
        self.last_sync_s = 0.0
        self.drained: list[str] = []  # replicas whose machine will be taken away
        self.unfit: dict[str, str] = {}  # reported until the replica is replaced
        self.reporting = asyncio.Event()  # cleared: reports are late
        self.reporting.set()
        self._joined: dict[str, Replica] = {}
        self.fleet = SimpleNamespace(sessions=self._joined)
        self.queue = RestartableClient(None, "queue", once=lambda handle, name: handle)
        self.endpoints: list[RestartableClient] = []
        self.rollouters = Rollouters(
            [self._shard(name) for name in shard_names("rollouter", shards)],
            RolloutConfig(replicas=len(names), shards=shards),
        )

    def _shard(self, name):
        return SimpleNamespace(
            name=name,
            once=None,
            unfit=self._unfit,
            replace_queue=self._replace_queue,
            replace_endpoint=self._replace_endpoint,
            replace_replica=self._replace,
            retire_replica=self._retire,
        )

    async def _unfit(self, silent_s):
        report = dict(self.unfit)
        await self.reporting.wait()
        return report

    async def _replace_queue(self, handle):
        self.log.append("replaced queue")

    async def _replace_endpoint(self, handle):
        self.log.append(f"replaced {handle.name}")

    async def _replace(self, name, handle):
        self.unfit.pop(name, None)
        self.log.append(f"replaced {name}")

    async def _retire(self, name):
        self.log.append(f"retired {name}")

    async def _start(self, name):
        self.log.append(f"starting {name}")
        match self.starts.get(name):
            case [Exception() as error, *rest]:
                self.starts[name] = rest
                raise error
            case [asyncio.Event() as up, *rest]:
                self.starts[name] = rest
                await up.wait()

    async def start_queue(self):
        await self._start("queue")
        self.queue.replace(Queue("queue"))

    async def start_endpoint(self, shard):
        await self._start(self.endpoints[shard].name)
        self.endpoints[shard].replace(Replica(self.endpoints[shard].name))

    async def start_rollouter(self, shard, routable):
        client = self.rollouters.shards[shard]
        await self._start(client.name)
        client.once = Rollouter(client.name, self.log)

    async def start_replica(self, name):
        await self._start(name)
        self.replicas[name] = Replica(name)

    def replica_handle(self, name):
        return self.replicas[name]

    async def start_ranks(self):
        self.senders = {name: Replica(name) for name in ("trainer/0", "trainer/1")}
        await self._start("trainer")

    async def end(self, name, why):
        self.log.append(f"ended {name}")
        if name in self.replicas:
            self.replicas[name].death.set()

    def silent(self, name):
        return name

    def routable(self):
        return list(self._joined)

    async def leave(self, name):
        self._joined.pop(name, None)
        self.log.append(f"left {name}")

    retire = leave

    async def add_replicas(self, names):
        self.replica_names += names

    async def remove_replica(self, name):
        self.replica_names.remove(name)
        self.log.append(f"removed {name}")

    def draining(self):
        return self.drained

    def join(self, name, replica):
        assert replica is self.replicas[name]
        self._joined[name] = replica
        self.log.append(f"joined {name}")

    def of(self, name):
        """Log of one actor."""
        return [line for line in self.log if line.endswith(name)]


class Queue(Replica):
    stalled = 0.0

    async def stalled_s(self):
        return self.stalled


def supervisor(world: World, **options) -> Supervisor:
    config = SupervisionConfig(backoff_s=0.0, **options)
    return Supervisor(config, RestartPolicy(config), world, world, Recorder("driver"))


class Run:
    """Supervisor and rollout loop of a world."""

    def __init__(self, world: World, **options) -> None:
        self.supervisor = supervisor(world, **options)
        self.rollouters = RestartableRollouters(world, self.supervisor, world.routable)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.rollouters.run())
            tasks.create_task(self.supervisor.run())

    async def started(self) -> None:
        await self.rollouters.started()
        await self.supervisor.started()


@asynccontextmanager
async def started(world: World, **options):
    """A run that has started all of ``world``."""
    run = Run(world, **options)
    running = asyncio.create_task(run.run())
    try:
        await asyncio.wait(
            {running, up := asyncio.create_task(run.started())}, return_when="FIRST_COMPLETED", timeout=10
        )
        up.cancel()
        if running.done():
            await running
        assert up.done()
        yield running
    finally:
        running.cancel()
        await asyncio.wait([running])


STARTUP = ["starting replica/0", "replaced replica/0", "joined replica/0"]


async def test_a_dead_replica_leaves_is_restarted_and_joins(caplog):
    world = World()
    async with started(world):
        world.replicas["replica/0"].death.set()
        await until(lambda: len(world.of("replica/0")) == 7)
        world.replicas["replica/0"].death.set()  # the new one is supervised as well
        await until(lambda: len(world.of("replica/0")) == 11)
    assert world.of("replica/0") == STARTUP + (["left replica/0"] + STARTUP) * 2
    assert "supervision: replica/0 died" in caplog.text


async def test_a_replica_that_dies_too_often_is_left_out_while_others_serve_and_the_last_one_ends_the_run(caplog):
    world = World()
    async with started(world, max_restarts=0) as running:
        world.replicas["replica/0"].death.set()
        await until(lambda: "the run continues without it" in caplog.text)
        assert world.log[-1] == "removed replica/0"  # an actor that hung during startup would keep its memory
        world.replicas["replica/1"].death.set()
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(running, 10)
    assert raised.group_contains(DiedTooOften, match="replica/1 died")


@pytest.mark.parametrize("why", ["it got SIGTERM", "Ray drains its machine"])
async def test_a_preempted_replica_hands_its_samples_over_before_it_is_restarted(caplog, monkeypatch, why):
    monkeypatch.setattr("asyncrl.run.supervision.CHECK_EVERY_S", 0.01)
    world = World()
    async with started(world):
        if "SIGTERM" in why:
            world.replicas["replica/0"].last_words = Preempted("replica/0")
            world.replicas["replica/0"].death.set()
        else:
            world.drained = ["replica/0"]
        await until(lambda: len(world.of("left replica/0")) == 1)
        world.drained = []
        await until(lambda: len(world.of("joined replica/0")) == 2)
    assert world.of("replica/0") == [*STARTUP, "retired replica/0", "left replica/0", *STARTUP]
    assert f"supervision: replica/0 is preempted: {why}; restarting it" in caplog.text


async def test_replicas_are_added_to_a_run_and_removed_from_it():
    world = World(["replica/0"])
    run = Run(world)
    running = asyncio.create_task(run.run())
    await run.started()
    await run.supervisor.add_replicas(["replica/1"])
    assert world.of("replica/1") == ["starting replica/1", "replaced replica/1", "joined replica/1"]
    world.replicas["replica/1"].death.set()  # it is supervised like the others
    await until(lambda: len(world.of("joined replica/1")) == 2)
    await run.supervisor.remove_replica("replica/1")
    assert world.of("replica/1")[-3:] == ["retired replica/1", "left replica/1", "removed replica/1"]
    world.replicas["replica/1"].death.set()
    await asyncio.sleep(0.02)
    assert world.of("replica/1")[-1] == "removed replica/1"
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_a_run_goes_on_without_an_added_replica_that_does_not_start(caplog):
    world = World(["replica/0"])
    run = Run(world)
    running = asyncio.create_task(run.run())
    await run.started()
    world.starts["replica/2"] = [ValueError("no room for its KV cache")]
    with pytest.raises(NotStarted, match=r"^replica/2 did not start; the run's log has the reason$"):
        await run.supervisor.add_replicas(["replica/1", "replica/2"])
    assert world.replica_names == ["replica/0", "replica/1"]
    assert "no room for its KV cache; the run continues without it" in caplog.text
    assert not running.done()
    running.cancel()
    await asyncio.wait([running])


async def test_a_shard_without_a_replica_ends_the_run():
    world = World(names=("replica/0", "replica/1", "replica/2"), shards=2)  # the second shard has only replica/1
    async with started(world, max_restarts=0) as running:
        world.replicas["replica/0"].death.set()
        await until(lambda: "removed replica/0" in world.log)
        world.replicas["replica/1"].death.set()
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(running, 10)
    assert raised.group_contains(DiedTooOften, match="replica/1 died")


async def test_a_dead_endpoint_is_restarted_and_the_rollouter_gets_the_new_one():
    world = World(shards=2)
    names = shard_names("endpoint", 2)
    world.endpoints = [RestartableClient(None, name, once=lambda handle, name: handle) for name in names]
    async with started(world):
        await until(lambda: world.of("endpoint/0") == ["starting endpoint/0", "replaced endpoint/0"])
        world.endpoints[0].handle.death.set()
        await until(lambda: world.of("endpoint/0") == ["starting endpoint/0", "replaced endpoint/0"] * 2)
        assert world.of("endpoint/1") == ["starting endpoint/1", "replaced endpoint/1"]


# -- the first start ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["queue", "rollouter", "replica/0"])
async def test_an_actor_that_dies_before_it_is_up_is_restarted(name, caplog):
    world = World()
    world.starts[name] = [ActorDied(name), ActorDied(name)]
    async with started(world):
        pass
    assert world.of(f"starting {name}") == [f"starting {name}"] * 3
    assert caplog.text.count(f"supervision: {name} died: its process was killed") == 2


@pytest.mark.parametrize("name", ["queue", "rollouter", "replica/0"])
async def test_an_actor_that_hangs_before_it_is_up_is_restarted(name, caplog):
    world = World()
    world.starts[name] = [asyncio.Event()]
    async with started(world, start_s=0.05):
        pass
    assert world.of(f"starting {name}") == [f"starting {name}"] * 2
    assert f"supervision: {name} did not start within 0.05 s (supervision.start_s)" in caplog.text


@pytest.mark.parametrize("name", ["queue", "rollouter", "replica/0"])
async def test_an_actor_that_never_comes_up_ends_the_run_after_max_restarts(name):
    world = World()
    world.starts[name] = [ActorDied(name)] * 9
    with pytest.raises(ExceptionGroup) as raised:
        async with started(world, max_restarts=2):
            pass
    assert raised.group_contains(DiedTooOften, match=rf"^{name} died: its process was killed.*; restarted 2 times")
    assert len(world.of(f"starting {name}")) == 3


async def test_a_queue_is_supervised_while_the_rollouter_does_not_answer():
    world = World()

    async def stopped(handle):
        await asyncio.Event().wait()

    world.rollouters.shards[0].replace_queue = stopped
    async with started(world):
        world.queue.handle.death.set()
        await until(lambda: len(world.of("starting queue")) == 2)


async def test_a_rollouter_that_answers_late_uses_the_newest_queue():
    world, answers, used = World(), asyncio.Event(), []

    async def late(handle):
        await answers.wait()
        await asyncio.sleep(0.05 if not used else 0)  # the first call may come last
        used.append(handle)

    world.rollouters.shards[0].replace_queue = late
    async with started(world):
        for count in (2, 3):
            world.queue.handle.death.set()
            await until(lambda count=count: len(world.of("starting queue")) == count)
        answers.set()
        await until(lambda: used)
        await asyncio.sleep(0.1)
        assert used == [world.queue.handle]


@pytest.mark.parametrize("error", [ActorStartFailed("replica/0", "ImportError: no"), ValueError("no such layer")])
async def test_an_exception_in_an_actor_s_startup_ends_the_run_at_once(error):
    world = World()
    world.starts["replica/0"] = [error]
    with pytest.raises(ExceptionGroup) as raised:
        async with started(world):
            pass
    assert raised.group_contains(type(error), match=str(error))
    assert world.of("starting replica/0") == ["starting replica/0"]


async def test_a_queue_that_keeps_dying_in_its_restarts_ends_the_run():
    world = World()
    async with started(world, max_restarts=2) as running:
        world.starts["queue"] = [ActorDied("queue")] * 9
        world.queue.handle.death.set()
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(running, 10)
    assert raised.group_contains(DiedTooOften, match="queue died.*; restarted 2 times")


async def test_a_disk_that_does_not_complete_its_writes_ends_the_run():
    world = World()
    async with started(world, disk_s=0.1) as running:
        world.queue.handle.stalled = 301.0
        with pytest.raises(ExceptionGroup) as raised:
            await asyncio.wait_for(running, 10)
    assert raised.group_contains(DiskStalled, match=r"not completed a write for 301 s \(supervision.disk_s is 0.1\)")


async def test_no_group_starts_before_start_groups_and_a_rollouter_may_die_until_then():
    world = World(shards=2)
    run = Run(world)
    running = asyncio.create_task(run.run())
    await asyncio.wait_for(run.started(), 10)
    world.rollouters.shards[1].once.death.set()
    await until(lambda: len(world.of("starting rollouter/1")) == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert "rolling out" not in world.log
    run.rollouters.start_groups()
    await until(lambda: world.log.count("rolling out") == 2)
    assert len(world.of("starting rollouter/0")) == 1
    running.cancel()
    await asyncio.wait([running])


async def test_all_ranks_are_restarted_if_one_dies_during_startup(caplog):
    """Another rank may fail first, because it lost its peer."""
    world = World()

    class Start(RuntimeError):
        pass

    async def start_ranks():
        world.senders = {name: Replica(name) for name in ("trainer/0", "trainer/1")}
        world.log.append("starting trainer")
        if len(world.log) == 1:
            asyncio.get_running_loop().call_later(0.05, world.senders["trainer/1"].death.set)
            raise Start("connection closed by peer")

    world.start_ranks = start_ranks
    await RestartableRanks(world, supervisor(world)).start()
    assert world.log == ["starting trainer"] * 2
    assert "supervision: trainer/1 died" in caplog.text


async def test_a_replica_that_answers_with_errors_is_replaced_as_a_dead_one_is(caplog, monkeypatch):
    monkeypatch.setattr("asyncrl.run.supervision.CHECK_EVERY_S", 0.01)
    world = World()
    async with started(world):
        world.starts["replica/1"] = [slow := asyncio.Event()]
        world.unfit = {"replica/1": "answers with errors (CUDA error: misaligned address)"}
        await until(lambda: len(world.of("starting replica/1")) == 2)
        await asyncio.sleep(0.05)  # it is still reported, and its successor must not be killed
        slow.set()
        await until(lambda: len(world.of("joined replica/1")) == 2)
    assert world.of("ended replica/1") == ["ended replica/1"]
    assert "supervision: replica/1 answers with errors (CUDA error: misaligned address); restarting it" in caplog.text


async def test_a_late_report_of_a_replica_does_not_end_its_successor(monkeypatch):
    monkeypatch.setattr("asyncrl.run.supervision.CHECK_EVERY_S", 0.01)
    world = World()
    async with started(world):
        world.reporting.clear()
        world.unfit = {"replica/1": "cannot be reached by its rollouter (it died)"}
        await asyncio.sleep(0.05)  # the report is made
        world.replicas["replica/1"].death.set()
        await until(lambda: len(world.of("joined replica/1")) == 2)
        world.reporting.set()
        await asyncio.sleep(0.05)
    assert world.of("ended replica/1") == []


async def test_a_rank_that_fails_a_sync_counts_as_dead():
    world = World()
    await world.start_ranks()
    ranks = RestartableRanks(world, supervisor(world))
    late = SyncError("plan", "trainer/1", None, None, "no answer within the deadline of 60 s")
    assert await ranks.lost(late) == "sync phase plan, trainer/1: no answer within the deadline of 60 s"
    assert world.of("ended trainer/1")
    of_a_replica = SyncError("pause", "replica/0", None, None, "no answer within the deadline of 60 s")
    assert await ranks.lost(of_a_replica) is None


async def test_a_rank_that_lost_its_device_counts_as_dead():
    world = World()
    await world.start_ranks()
    broken = ActorBroken("trainer/0", "RuntimeError: CUDA error: an illegal memory access was encountered")
    assert await RestartableRanks(world, supervisor(world)).lost(broken) == str(broken)


async def test_a_rank_whose_call_does_not_end_counts_as_dead():
    """Its computation hangs, while the actor still answers."""

    async def train(*args):
        return {}, []

    async def hangs(*args):
        await asyncio.Event().wait()

    ranks = [SimpleNamespace(name="trainer/0", train=train), SimpleNamespace(name="trainer/1", train=hangs)]
    broken = r"^trainer/1 is broken: a call has not ended for 0\.02 s \(supervision\.train_s\)$"
    with pytest.raises(ActorBroken, match=broken) as e:
        await RankGroup(ranks, 0.02).train(1, [], None, 0.0)
    assert await RestartableRanks(World(), supervisor(World())).lost(e.value) == str(e.value)


async def test_lost_data_of_a_call_ends_no_run(monkeypatch):
    """A call that may be repeated is; ranks go back to the last checkpoint; what an actor has recorded is left out."""
    monkeypatch.setattr("asyncrl.processes.actor_client.REPEAT_S", 0.0)
    lost = ObjectLostError("00", None, "")
    outcomes = [lost, RayTaskError("train", "", lost), 7]

    class Handle:
        async def remote(self, *args):
            if isinstance(outcome := outcomes.pop(0), Exception):
                raise outcome
            return outcome

    assert await RestartableClient(SimpleNamespace(stats=Handle()), "queue").stats() == 7
    outcomes += [RayTaskError("train", "", lost)]
    with pytest.raises(DataLost) as e:
        await RankGroup([ActorClient(SimpleNamespace(train=Handle()), "trainer/0")]).train(1, [], None, 0.0)
    assert await RestartableRanks(World(), supervisor(World())).lost(e.value) == str(e.value)


@pytest.mark.parametrize(
    ("error", "is_fatal"),
    [
        (RuntimeError("CUDA error: device-side assert triggered"), True),
        (ExceptionGroup("several", [ValueError(), RuntimeError("NCCL error in: x.cpp, unhandled system error")]), True),
        (RuntimeError("expected a tensor on cuda"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (ValueError("CUDA error: not from torch"), False),
    ],
)
def test_only_errors_that_cost_the_device_make_a_process_useless(error, is_fatal):
    outer = RuntimeError("training failed")
    outer.__cause__ = error
    assert is_device_error(error) == is_device_error(outer) == is_fatal


async def test_ranks_that_raise_while_all_are_alive_end_the_run_at_once():
    world = World()
    world.starts["trainer"] = [ValueError("no such layer")]
    with pytest.raises(ValueError, match="no such layer"):
        await RestartableRanks(world, supervisor(world)).start()
    assert world.log == ["starting trainer"]
