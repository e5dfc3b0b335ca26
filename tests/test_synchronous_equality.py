"""Invariant: with staleness 0 the asynchronous system equals synchronous training, bit for bit.

Runs the whole system (Ray, queue, admission, router, sync sessions) for five steps in deterministic mode, and compares
it with a short loop without any of these: generate a batch, score it, train on it, load the new weights.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from asyncrl.config.checks import derive
from asyncrl.config.load import load_config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from asyncrl.models.checkpoint import read_tensors
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.rollouter.sampling import call_key, random_key
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.tiny import length_reward, make_inputs, overrides

ROOT = Path(__file__).parent.parent
STEPS = 5
QUESTION = [7, 8]  # tokens that the policy reads between its turns


class TwoTurns(MultiTurn):
    """Is asked once more; both agents of this module must make the same samples."""

    async def observe(self, prompt, turns, answer):
        return QUESTION if turns.completions == 1 else None


@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_staleness_zero_equals_a_synchronous_loop_bit_for_bit(tmp_path, turns):
    inputs = make_inputs(tmp_path)
    options = overrides(
        inputs,
        tmp_path / "run",
        f"trainer.total_steps={STEPS}",
        "trainer.mini_batch_groups=4",
        "async_training.staleness_threshold=0",
        "async_training.trigger_parameter_sync_step=1",
        "rollout.engine.deterministic=true",
        # some groups are dropped and refilled, which changes the other groups of a batch
        "algorithm.filter_zero_variance=true",
        "reward.function=tests.test_synchronous_equality:coarse_reward",
        "data.validation_files=[]",
        "reporting.wandb.mode=disabled",
        "reporting.report=false",
        *([f"rollout.agent_loop={__name__}:TwoTurns", "rollout.replicas=2", "rollout.shards=2"] if turns == 2 else []),
        f"rollout.max_response_tokens={12 * turns}",
    )
    ray_dir = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    command = [sys.executable, "-m", "asyncrl.fully_async_main", *options, f"ray.temp_dir={ray_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, env=os.environ)
    shutil.rmtree(ray_dir, ignore_errors=True)
    assert done.returncode == 0, done.stdout + done.stderr

    expected = asyncio.run(train_synchronously(options, tmp_path / "sync", turns))
    found = read_tensors(tmp_path / "run/checkpoints/final/hf")
    start = read_tensors(inputs / "checkpoint")
    assert found.keys() == expected.keys()
    assert any(not torch.equal(start[name], expected[name]) for name in start)
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert different == []


def coarse_reward(prompt, response) -> float:
    """Few values, so that some groups have equal rewards."""
    return float(length_reward(prompt, response)["reward"] > 0.03)


async def train_synchronously(options: list[str], folder: Path, turns: int) -> dict[str, torch.Tensor]:
    """Train five steps with engine and trainer alone; returns the final weights."""
    config = load_config(None, options)
    batch_size, parts = derive(config).groups_per_step, derive(config).parts
    assert len(parts) > 1, "the test needs a batch that comes in parts"
    tokenizer = PromptTokenizer(config.model.path)
    prompts = PromptOrder(load_prompts(config.data.train_files, config.data), config.seed)
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer"))
    sampling = SamplingParams(temperature=config.rollout.temperature, stop_token_ids=tokenizer.stop_token_ids)
    dropped, turns_trained = 0, set()
    try:
        for step in range(1, STEPS + 1):
            rank.export_hf(folder / str(step))
            engine = NativeEngine(folder / str(step), config.rollout.engine)
            version = PolicyVersion(0, step - 1)
            await engine.resume(version)
            batch: list[bytes] = []
            while len(batch) < batch_size:
                for prompt in islice(prompts, batch_size - len(batch)):
                    tokens = tokenizer.encode(prompt)
                    samples = [
                        await make_sample(engine, config, sampling, prompt.uid, tokens, index, version, turns)
                        for index in range(config.rollout.n)
                    ]
                    for s in samples:
                        s.reward = coarse_reward(prompt, tokenizer.decode(s.sequences[0].tokens))
                    if len({s.reward for s in samples}) == 1:
                        dropped += 1
                        continue
                    turns_trained |= {len(s.sequences[0].spans) for s in samples}
                    batch.append(Group.from_samples(prompt.uid, prompt.prompt_id, 0, tokens, samples).to_bytes())
            for part, groups in enumerate(np.split(np.array(batch, object), np.cumsum(parts[:-1]))):
                rank.train(step, groups.tolist(), part=part, parts=len(parts))
            await engine.close()
        rank.export_hf(folder / "final")
    finally:
        rank.close()
    assert dropped > 0, "the test needs groups that are dropped and refilled"
    assert turns_trained == set(range(1, turns + 1)), "the test needs samples of each number of turns"
    return read_tensors(folder / "final")


async def make_sample(engine, config, sampling, uid, prompt, index, version, turns) -> Sample:
    """One sample, alone in the engine; its tokens are spliced by hand."""
    key, most = random_key(config.seed, uid, index), config.rollout.max_response_tokens
    tokens, logprobs, finish = await generate(engine, sampling, uid, prompt, prompt, key, most)
    spans, mask = [VersionSpan(0, version)], [True] * len(tokens)
    if turns == 2 and finish is FinishReason.STOP:
        tokens, logprobs, mask = tokens + QUESTION, logprobs + [0.0, 0.0], mask + [False, False]
        room = most - len(tokens)
        if room > 0:
            context = np.concatenate([prompt, np.array(tokens, np.int32)])
            second = call_key(key, xxhash.xxh3_64_intdigest(context.tobytes()), 0)
            more, of_more, finish = await generate(engine, sampling, uid, prompt, context, second, room)
            spans.append(VersionSpan(len(tokens), version))
            tokens, logprobs, mask = tokens + more, logprobs + of_more, mask + [True] * len(more)
        else:
            tokens, logprobs, mask, finish = tokens[:-2], logprobs[:-2], mask[:-2], FinishReason.LENGTH
    return Sample.single(
        index, np.array(tokens, np.int32), np.array(logprobs, np.float32), np.array(mask), spans, finish
    )


async def generate(engine, sampling, uid, prompt, context, key, limit):
    """Tokens, logprobs and finish reason of one call."""
    await engine.submit([Request(f"{key}", uid, context, len(prompt), key, 0, limit, sampling)])
    tokens: list[int] = []
    logprobs: list[float] = []
    finish: FinishReason | None = None
    while finish is None:
        events = await engine.events()
        for e in range(len(events)):
            tokens += events.tokens[events.offsets[e] : events.offsets[e + 1]].tolist()
            logprobs += events.logprobs[events.offsets[e] : events.offsets[e + 1]].tolist()
            finish = events.finish[e]
    return tokens, logprobs, finish
