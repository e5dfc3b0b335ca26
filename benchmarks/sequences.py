"""Measures what samples of several sequences cost, and what they promise. The last line is JSON.

    OMP_NUM_THREADS=1 python -m benchmarks.sequences [--trees 10000] [--rounds 7] [--seconds 20]

- ``single_turn_overhead``: time of a train step of the quickstart's size (build, pack, loss, optimizer) on groups of
  plain answers, over that of the same step whose batch is built for one sequence per sample. In turns; the median of
  the rounds.
- ``owned_once``: share of sampled tokens that are trained exactly once, over random trees of turns, branches and
  sub-agents, through builder, buffer and batch.
- ``slots_busy``: mean share of 8 slots of a native engine that have a request, while agents of two turns wait 2 s for
  their tool between them.
- ``prefix_reuse``: share of the prompt tokens of conversations of 8 turns, all turns together, that are not prefilled
  again, beside other conversations that take their slots meanwhile; ``warm_kv_mb``: peak of the memory that finished
  turns take for it; ``warm_speedup``: sampled tokens per second over those of the same run without it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.order import PromptOrder
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.loop import RolloutLoop
from asyncrl.rollouter.rewards.pool import RewardPool
from asyncrl.rollouter.router import Router
from asyncrl.rollouter.samples import SampleMaker
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.sample_queue.messages import Admitted, Recovery, Ticket
from asyncrl.trainer.backends.base import TrainBatch
from asyncrl.trainer.batches import build_batch, offsets
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks.quickstart import ROOT, ensure_inputs

GROUPS, SAMPLES = 64, 8  # of the quickstart's steps
SLOTS, TOOL_S, IN_FLIGHT = 8, 2.0, 400
TURNS, TOLD, CONVERSATIONS = 8, 24, 8  # of a conversation: turns, tokens of each observation; groups at once
V0 = PolicyVersion(0, 0)


# -- single_turn_overhead ----------------------------------------------------------------------------------------------


def plain_batch(groups: Sequence[Group], mask_before: int | None = None) -> TrainBatch:
    """`build_batch` for samples of one sequence each, of one version, after the whole prompt."""
    prompts = np.repeat([len(g.prompt_tokens) for g in groups], [len(g) for g in groups])
    responses = np.concatenate([g.response_lengths for g in groups])
    tokens = [
        part
        for g in groups
        for s in range(len(g))
        for part in (g.prompt_tokens, g.tokens[g.offsets[s] : g.offsets[s + 1]])
    ]
    cu_seqlens, row_offsets = offsets(prompts + responses), offsets(responses)
    first_row = cu_seqlens[:-1] + prompts - 1
    rows = np.arange(row_offsets[-1]) + np.repeat(first_row - row_offsets[:-1], responses)
    samples = len(prompts)
    return TrainBatch(
        tokens=np.concatenate(tokens),
        cu_seqlens=cu_seqlens,
        rows=rows,
        targets=np.concatenate([g.tokens for g in groups]),
        row_offsets=row_offsets,
        loss_mask=np.concatenate([g.loss_mask for g in groups]),
        columns={
            "behaviour_logprobs": np.concatenate([g.logprobs for g in groups]),
            "sampler": np.zeros(row_offsets[-1], np.int32),
        },
        sequence_columns={
            "group": np.repeat(np.arange(len(groups)), [len(g) for g in groups]),
            "sample": np.arange(samples),
            "owned": responses,
            "rewards": np.concatenate([g.rewards for g in groups]),
            "finish": np.concatenate([g.finish for g in groups]),
            "versions": np.ones(samples, np.int64),
            "version_span": np.zeros(samples, np.int64),
        },
    )


def answers(vocabulary: int) -> list[bytes]:
    """Groups of plain answers, like those of a quickstart's step."""
    rng = np.random.default_rng(0)

    def sample(index: int) -> Sample:
        length = int(rng.integers(20, 121))
        columns = rng.integers(0, vocabulary, length), np.full(length, -6.0), np.ones(length, bool)
        return Sample.single(index, *columns, [VersionSpan(0, V0)], FinishReason.STOP, float(index % 2))

    return [
        Group.from_samples(
            f"g{g}", f"p{g}", 0, rng.integers(0, vocabulary, 30), [sample(i) for i in range(SAMPLES)]
        ).to_bytes()
        for g in range(GROUPS)
    ]


def single_turn_overhead(rounds: int, checkpoint: Path) -> float:
    config = load_config(ROOT / "configs/quickstart.yaml", [f"model.path={checkpoint}", "trainer.device=cpu"])
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    groups, ratios = answers(ModelConfig.load(checkpoint).vocab_size), []
    seconds = {"with": 0.0, "without": 0.0}
    for round_ in range(rounds + 1):
        for name, build in (("with", build_batch), ("without", plain_batch)):
            with patch("asyncrl.trainer.rank.build_batch", build):
                started = time.perf_counter()
                rank.train(round_, groups)
                seconds[name] = time.perf_counter() - started
        if round_:  # the first warms up
            ratios.append(seconds["with"] / seconds["without"])
            print(f"step            {seconds['with']:6.2f} s, without sequence columns {seconds['without']:6.2f} s")
    rank.close()
    return statistics.median(ratios)


# -- owned_once --------------------------------------------------------------------------------------------------------


def owned_once(trees: int) -> float:
    rng = np.random.default_rng(0)
    sampled, once = 0, 0
    for number in range(trees):
        fresh = itertools.count(1000)  # a token id for each token, so that each is found again
        builders = [TrajectoryBuilder()]
        for _ in range(int(rng.integers(1, 16))):
            builder = builders[int(rng.integers(len(builders)))]
            action = rng.random()
            if action < 0.2:
                builders.append(builder.branch())
            elif action < 0.3:
                builders.append(builder.start(int(rng.integers(4))))
                builders[-1].append([5])
            elif action < 0.5:
                builder.append(rng.integers(0, 9, int(rng.integers(1, 5))))
            else:
                tokens = np.fromiter(itertools.islice(fresh, int(rng.integers(1, 9))), np.int32)
                logprobs = np.full(len(tokens), -1, np.float32)
                builder.append(Completion(tokens, logprobs, [VersionSpan(0, V0)], FinishReason.STOP))
        drawn = next(fresh) - 1000
        if not drawn:
            continue
        sample = replace(builders[0].sample(0, FinishReason.STOP), reward=0.0)
        group = Group.from_samples(f"t{number}", "p", 0, np.arange(3), [sample])
        batch = build_batch([Group.from_buffer(group.to_bytes())])
        times = Counter(batch.targets[batch.loss_mask].tolist())
        sampled += drawn
        once += sum(times[1000 + token] == 1 for token in range(drawn)) - sum(token < 1000 for token in times)
    print(f"owned once      {once} of {sampled} tokens in {trees} trees")
    return once / sampled


# -- slots_busy --------------------------------------------------------------------------------------------------------


class SlowTool(MultiTurn):
    """Two turns, with a tool of `TOOL_S` between them."""

    async def observe(self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion) -> list[int] | None:
        if turns.completions == 2:
            return None
        await asyncio.sleep(TOOL_S)
        return [5, 6]

    async def grade(self, prompt: Prompt, turns: TrajectoryBuilder) -> float:
        return float(len(turns.response) % 2)


class Budget:
    """A queue that lets ``groups`` be in flight, and keeps none."""

    def __init__(self, groups: int) -> None:
        self._room = asyncio.Semaphore(groups)

    async def issue(self, tickets: Sequence[Ticket], count: int) -> Admitted:
        await self._room.acquire()
        return Admitted([tickets[0].uid], [], tickets[0].place + 1)

    async def put_and_issue(
        self, groups: Sequence[bytes], tickets: Sequence[Ticket], count: int
    ) -> tuple[list[Any], Admitted]:
        await self.drop(groups)
        return [], await self.issue(tickets, count) if tickets else Admitted([], [], 0)

    async def drop(self, drops: Sequence[Any]) -> None:
        for _ in drops:
            self._room.release()

    async def overdue(self) -> list[str]:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    async def snapshot(self, parts: Sequence[Any]) -> None: ...
    async def end(self, reason: str) -> None: ...


@asynccontextmanager
async def rollouts(
    config: Config, agent: MultiTurn, groups: int, warm_bytes: int = 0
) -> AsyncIterator[tuple[NativeEngine, Recorder, RolloutLoop]]:
    """A rollout loop over one native engine, with ``groups`` in flight."""
    recorder = Recorder("rollouter")
    engine = NativeEngine(config.model.path, config.rollout.engine, recorder=recorder, warm_bytes=warm_bytes)
    router = Router({"replica": LeasedEngine(EngineLease(engine), 1)}, lambda e: False)
    tokenizer = PromptTokenizer(config.model.path)
    prompts = [Prompt(f"r:{i}", f"r:{i}", ({"role": "user", "content": f"{i}+1="},), str(i + 1)) for i in range(1000)]
    maker = SampleMaker(config, tokenizer, agent, 64, router, RewardPool(config.reward), recorder)
    loop = RolloutLoop(config, derive(config).slots, PromptOrder(prompts, 0), maker, Budget(groups), recorder)
    await engine.resume(V0)
    running = [asyncio.create_task(router.run()), asyncio.create_task(loop.run(Recovery(0, None, [])))]
    try:
        yield engine, recorder, loop
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        await engine.close()


async def slots_busy(seconds: float, config: Config) -> float:
    agent = SlowTool(None, config.rollout.max_response_tokens)
    async with rollouts(config, agent, IN_FLIGHT) as (engine, _, loop):
        await asyncio.sleep(3 * TOOL_S)  # until as many samples wait for a tool as later on
        busy, in_flight = [], []
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            busy.append(min(engine._core.active, SLOTS) / SLOTS)
            in_flight.append(len(loop.in_flight) * config.rollout.n)
            await asyncio.sleep(0.01)
    share, samples = statistics.mean(busy), statistics.mean(in_flight)
    print(f"slots busy      {share:.3f} of {SLOTS}, with {samples:.0f} samples in flight")
    return share


# -- prefix_reuse ------------------------------------------------------------------------------------------------------


class Conversation(MultiTurn):
    """`TURNS` turns, with `TOLD` tokens between them."""

    async def observe(self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion) -> np.ndarray | None:
        if turns.completions == TURNS:
            return None
        await asyncio.sleep(0.02)
        return np.random.default_rng(turns.completions).integers(20, 60, TOLD)

    async def grade(self, prompt: Prompt, turns: TrajectoryBuilder) -> float:
        return float(len(turns.response) % 2)


async def conversations(seconds: float, config: Config, warm_bytes: int) -> tuple[float, float, float]:
    """(prefix reuse, tokens per second, peak of the warm memory in bytes)."""
    agent = Conversation(None, config.rollout.max_response_tokens)
    async with rollouts(config, agent, CONVERSATIONS, warm_bytes) as (_, recorder, _):
        await asyncio.sleep(seconds / 4)  # until conversations are at all of their turns
        recorder.drain()
        started, peak, counters = time.monotonic(), 0.0, Counter[str]()
        while (passed := time.monotonic() - started) < seconds:
            await asyncio.sleep(0.1)
            batch = recorder.drain()
            counters.update(batch.counters)
            peak = max(peak, batch.gauges.get("rollout/warm_kv_bytes", 0.0))
    return engine_metrics(counters)["rollout/prefix_reuse"], counters["rollout/tokens"] / passed, peak


def prefix_reuse(seconds: float, config: Config) -> dict[str, float]:
    config = replace(config, rollout=replace(config.rollout, max_response_tokens=960))
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(2):  # in turns
        for warm in (True, False):
            found, speed, held = asyncio.run(
                conversations(seconds, config, config.rollout.engine.warm_kv_mb << 20 if warm else 0)
            )
            speeds[warm].append(speed)
            print(f"prefix reuse    {found:.3f}, {speed:6.0f} tokens/s, {held / 2**20:.1f} MiB of warm KV")
            if warm:
                reuse, peak = found, held
    speedup = statistics.mean(speeds[True]) / statistics.mean(speeds[False])
    return {
        "prefix_reuse": round(reuse, 3),
        "warm_kv_mb": round(peak / 2**20, 1),
        "warm_speedup": round(speedup, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trees", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run of slots_busy and prefix_reuse")
    args = parser.parse_args()
    checkpoint, data = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"
    ensure_inputs(checkpoint, data)
    options = [
        f"model.path={checkpoint}",
        f"data.train_files=[{data / 'train.jsonl'}]",
        "data.validation_files=[]",
        "reward.function=none",
        f"rollout.engine.slots={SLOTS}",
        "rollout.n=4",
        "rollout.engine.cpu_priority=normal",
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(ROOT / "configs/quickstart.yaml", [*options, f"run_dir={folder}"])
        busy = asyncio.run(slots_busy(args.seconds, config))
        reuse = prefix_reuse(args.seconds, config)
    result = {
        "single_turn_overhead": round(single_turn_overhead(args.rounds, checkpoint), 4),
        "owned_once": owned_once(args.trees),
        "slots_busy": round(busy, 3),
        **reuse,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
