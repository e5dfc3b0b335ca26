"""The number of replicas of a run, changed while it goes on: by ``asyncrl scale``, or so that generation keeps up with
training (`rollout.autoscale`).

    scaling/<id>.json           a request: {"replicas": 12}
    scaling/<id>.answer.json    the driver's lines so far, and in the end that it is done, or why not
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from asyncrl.config.load import CONFIG_FILE
from asyncrl.config.schema import Config, RolloutConfig
from asyncrl.disk.files import make_folder, write_whole
from asyncrl.observability.efficiency import EfficiencyTracker
from asyncrl.run.driver_epoch import DriverWatch
from asyncrl.run.placement_plan import PlacementError
from asyncrl.run.rollouters import shard_of
from asyncrl.run.supervision import NotStarted

log = logging.getLogger(__name__)

FOLDER = "scaling"
POLL_S = 0.5
MOST_REPLICAS = 10_000  # a number beyond is a mistake, and would keep the driver busy
_MOST_NAMES = 8  # in a line
MARGIN = 1.1  # by which a pool must be too slow, or too large, before the number of replicas changes


class NotScaled(RuntimeError):
    """The number of replicas was not changed, or not as asked."""


@dataclass
class Answer:
    lines: list[str] = field(default_factory=list)
    done: bool = False
    error: str = ""


class ScaledSupervisor(Protocol):
    @property
    def serving(self) -> Collection[str]: ...

    async def started(self) -> None: ...
    async def add_replicas(self, names: Sequence[str]) -> None: ...
    async def remove_replica(self, name: str) -> None: ...


class ScaledCluster(Protocol):
    replica_names: list[str]


class Scaling:
    """``run()`` serves the requests in the folder of the run; ``efficiency()``: the run's, once it is known."""

    def __init__(
        self,
        config: Config,
        run: Path,
        cluster: ScaledCluster,
        supervisor: ScaledSupervisor,
        efficiency: Callable[[], EfficiencyTracker | None],
    ) -> None:
        self._config, self._folder = config, run / FOLDER
        self._cluster, self._supervisor, self._efficiency = cluster, supervisor, efficiency
        self._served: set[Path] = set()  # requests

    async def run(self) -> None:
        self._begin()
        await self._supervisor.started()
        while True:
            await asyncio.sleep(POLL_S)
            for request in await asyncio.to_thread(self._requests):
                await self._serve(request)
            if (advised := self._advised()) is not None:
                await self._autoscale(advised)

    def _begin(self) -> None:
        """Make the folder, and remove requests to an earlier driver."""
        with _logged("make the folder of requests"):
            make_folder(self._folder)
            self._served.update(self._folder.glob("*.json"))
            for left in self._served:
                left.unlink(missing_ok=True)

    def _requests(self) -> list[Path]:
        """New ones, in order."""
        found = []
        with contextlib.suppress(OSError):  # a network disk may answer the next time
            for path in self._folder.glob("*.json"):
                if not path.name.endswith(".answer.json") and path not in self._served:
                    with contextlib.suppress(FileNotFoundError):  # who asked has given up
                        found.append((path.stat().st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    async def _serve(self, request: Path) -> None:
        answer = Answer()
        self._served.add(request)

        async def say(line: str) -> None:
            log.info("scale: %s", line)
            answer.lines.append(line)
            await asyncio.to_thread(_write, request, answer)

        try:
            await self._scale(_asked(request), say)
        except NotScaled as e:
            log.warning("scale: %s", e)
            answer.error = str(e)
        answer.done = True
        await asyncio.to_thread(_write, request, answer)

    async def _autoscale(self, replicas: int) -> None:
        async def say(line: str) -> None:
            log.info("autoscale: %s", line)

        try:
            await self._scale(replicas, say)
        except NotScaled as e:
            log.warning("autoscale: %s", e)
        if (tracker := self._efficiency()) is not None:
            tracker.recent.clear()  # look at further steps before the next change

    async def _scale(self, replicas: int, say: Callable[[str], Awaitable[None]]) -> None:
        """Change the number of replicas. Raises NotScaled."""
        now = list(self._cluster.replica_names)
        shards = self._config.rollout.shards
        if replicas < shards:
            each = "which serves whole groups" if shards == 1 else f"one for each of {shards} rollout.shards"
            raise NotScaled(f"replicas: expected at least {shards}, {each}; found {replicas}")
        if replicas > MOST_REPLICAS:
            raise NotScaled(f"replicas: expected at most {MOST_REPLICAS}, found {replicas}")
        if self._config.ray.share_gpus:
            raise NotScaled("replicas: with ray.share_gpus each shares the GPU of a rank, so their number is fixed")
        if join := [name for name, _ in zip(_free_names(now), range(replicas - len(now)))]:
            await say(f"adding {_named(join)}")
            try:
                await self._supervisor.add_replicas(join)
            except (PlacementError, NotStarted) as e:
                raise NotScaled(str(e)) from None
        leaving = _dispensable(now, self._config.rollout, self._supervisor.serving)
        for name in leaving[: max(0, len(now) - replicas)]:
            await say(f"removing {name}")
            await self._supervisor.remove_replica(name)
        new = ", and new ones serve after their first sync" if join else ""
        await say(f"the run has {_count(len(self._cluster.replica_names))}{new}")

    def _advised(self) -> int | None:
        """The number of replicas that would balance the pools, if it is another one."""
        limits, tracker, now = self._config.rollout.autoscale, self._efficiency(), len(self._cluster.replica_names)
        if not limits.max or tracker is None or (balance := tracker.balance()) is None:
            return None
        least, most = math.ceil(now * balance), math.ceil(now * balance * MARGIN)
        wanted = least if balance > MARGIN else min(most, now)
        wanted = min(max(wanted, limits.min), limits.max)
        return wanted if wanted != now else None


def ask(run: Path, replicas: int) -> Iterator[str]:
    """Ask the driver of the run for this number of replicas; yields what it does. Raises NotScaled."""
    if not os.path.isfile(run / CONFIG_FILE):
        raise NotScaled(f"{run}: expected the folder of a run, found no {CONFIG_FILE} in it")
    driver = DriverWatch(run)
    if not driver.lives():
        raise NotScaled(f"{run}: no driver runs it now; start or resume the run with rollout.replicas={replicas}")
    request = run / FOLDER / f"{uuid.uuid4().hex}.json"
    try:
        make_folder(run / FOLDER)
        write_whole(request, json.dumps({"replicas": replicas}))
    except OSError as e:
        raise NotScaled(f"{run / FOLDER}: the request cannot be written ({e}); ask as the user who runs it") from None
    shown, answer = 0, Answer()
    try:
        while not answer.done:
            alive = driver.lives()  # asked first, so that its last words are read
            answer = _read(request)
            yield from answer.lines[shown:]
            shown = len(answer.lines)
            if not answer.done:
                if not alive:
                    raise NotScaled(f"{run}: the run ended before it had {_count(replicas)}")
                if not request.exists():
                    raise NotScaled(
                        f"{run}: its driver was just starting, or could not answer; see its log, and ask again"
                    )
                time.sleep(POLL_S)
    finally:
        for path in (request, _answer_of(request)):
            with contextlib.suppress(OSError):
                path.unlink()
    if answer.error:
        raise NotScaled(answer.error)


def _free_names(used: Sequence[str]) -> Iterator[str]:
    number = 0
    while True:
        if (name := f"replica/{number}") not in used:
            yield name
        number += 1


def _dispensable(replicas: Sequence[str], config: RolloutConfig, serving: Collection[str]) -> list[str]:
    """Those that may leave, in this order: of the shard that has the most, the newest one that does not serve, then the
    newest; but the last of none."""
    of_shards, found = defaultdict(list), list[str]()
    for age, name in enumerate(replicas):
        of_shards[shard_of(name, config)].append((name not in serving, age, name))
    for shard in of_shards.values():
        shard.sort()
    while len(most := max(of_shards.values(), key=lambda shard: (len(shard), shard[-1]))) > 1:
        found.append(most.pop()[2])
    return found


def _named(replicas: Sequence[str]) -> str:
    return ", ".join(replicas) if len(replicas) <= _MOST_NAMES else _count(len(replicas))


def _count(replicas: int) -> str:
    return f"{replicas} replica" + ("s" if replicas != 1 else "")


def _asked(request: Path) -> int:
    """Raises NotScaled if the file is no request."""
    try:
        asked = json.loads(request.read_bytes())["replicas"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise NotScaled(f'{request}: expected {{"replicas": N}} ({e})') from None
    if type(asked) is not int:
        raise NotScaled(f'{request}: expected {{"replicas": N}}, found {asked!r:.80}')
    return asked


def _answer_of(request: Path) -> Path:
    return request.with_suffix(".answer.json")


def _write(request: Path, answer: Answer) -> None:
    with _logged(f"answer {request.name}"):
        try:
            write_whole(_answer_of(request), json.dumps(asdict(answer)))
        except OSError:
            request.unlink(missing_ok=True)  # so that nobody waits for the answer
            raise


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """A disk that is full, or a folder of another user, ends no run."""
    try:
        yield
    except OSError as e:
        log.warning("scale: cannot %s: %s", what, e)


def _read(request: Path) -> Answer:
    try:
        return Answer(**json.loads(_answer_of(request).read_bytes()))
    except FileNotFoundError:
        return Answer()
