"""How often and how soon actors are started again, and what a supervisor does about each; the pool is a fake of our own
interface, the deaths in it are as they come from Ray."""

import asyncio
from types import SimpleNamespace

import pytest

from asyncrl.config.schema import SupervisionConfig
from asyncrl.ray_client import ActorDied
from asyncrl.supervision import DiedTooOften, RestartPolicy, Supervisor
from asyncrl.telemetry.recorder import Recorder


def test_the_pause_before_a_restart_doubles_up_to_a_limit_and_each_actor_counts_by_itself():
    policy = RestartPolicy(SupervisionConfig(max_restarts=5, backoff_s=0.5, max_backoff_s=3), clock=lambda: 0.0)
    assert [policy.next_backoff_s("replica/0", "died") for _ in range(5)] == [0.5, 1, 2, 3, 3]
    assert policy.next_backoff_s("replica/1", "died") == 0.5
    with pytest.raises(DiedTooOften, match=r"replica/0 died; restarted 5 times within 600 s \(.*max_restarts is 5\)"):
        policy.next_backoff_s("replica/0", "replica/0 died")


def test_restarts_that_are_long_ago_do_not_count():
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

    async def alive(self) -> None:
        await self.death.wait()
        raise ActorDied(self.name)


class World:
    """Pool and sync group in one: it writes down what the supervisor does."""

    def __init__(self, names=("replica/0", "replica/1")) -> None:
        self.replicas = {name: Replica(name) for name in names}
        self.receivers = dict(self.replicas)
        self.log: list[str] = []
        self.last_sync_s = 0.0
        self.fleet = SimpleNamespace(handles=self.receivers)
        self.queue = SimpleNamespace(alive=asyncio.Event().wait, where=self._where)
        self.rollouter = SimpleNamespace(
            once=SimpleNamespace(run=asyncio.Event().wait),
            silence_s=self._silence_s,
            replace_replica=self._replace,
        )

    async def _where(self):
        return "node", 1

    async def _silence_s(self):
        return {}

    async def _replace(self, name, handle):
        self.log.append(f"replaced {name}")

    async def restart_replica(self, name):
        self.replicas[name] = self.receivers[name] = Replica(name)
        self.log.append(f"restarted {name}")

    def routable(self):
        return list(self.receivers)

    async def leave(self, name):
        self.receivers.pop(name)
        self.log.append(f"left {name}")

    def join(self, name, replica):
        assert replica is self.replicas[name]
        self.log.append(f"joined {name}")


def supervisor(world: World, **options) -> Supervisor:
    config = SupervisionConfig(backoff_s=0.0, **options)
    return Supervisor(config, RestartPolicy(config), world, world, Recorder("driver"))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


LIFE = ["left replica/0", "restarted replica/0", "replaced replica/0", "joined replica/0"]


async def test_a_replica_that_died_leaves_is_started_again_and_joins(caplog):
    world = World()
    running = asyncio.create_task(supervisor(world).run())
    await asyncio.sleep(0)
    world.replicas["replica/0"].death.set()
    await until(lambda: len(world.log) == 4)
    assert world.log == LIFE
    world.replicas["replica/0"].death.set()  # and the new one is watched as well
    await until(lambda: len(world.log) == 8)
    assert "supervision: replica/0 died" in caplog.text
    running.cancel()
    await asyncio.wait([running])


async def test_a_replica_that_dies_too_often_is_left_out_while_others_serve_and_the_last_one_ends_the_run(caplog):
    world = World()
    running = asyncio.create_task(supervisor(world, max_restarts=0).run())
    await asyncio.sleep(0)
    world.replicas["replica/0"].death.set()
    await until(lambda: world.log == ["left replica/0"])
    await asyncio.sleep(0.01)
    assert "the run goes on without it" in caplog.text
    world.replicas["replica/1"].death.set()
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(running, 10)
    assert raised.group_contains(DiedTooOften, match="replica/1 died")
