"""A tiny run for tests: a random model, a handful of problems, rewards that any answer can earn."""

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from asyncrl.rollouter.agents.single_turn import SingleTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample

MAX_RESPONSE = 24


def make_inputs(folder: Path, warm_start_steps: int = 0, **options: Any) -> Path:
    """A checkpoint (random weights by default; ``options`` of `make_checkpoint`) and problems under ``folder``."""
    from asyncrl.models.make_checkpoint import make_checkpoint  # reward workers import this module, and it is heavy

    make_checkpoint(folder / "checkpoint", 0, warm_start_steps, **options)
    rows = [
        {"prompt": [{"role": "user", "content": f"Compute {a}+{b}"}], "answer": str(a + b)}
        for a in range(5)
        for b in range(5)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:6]))
    return folder


def overrides(folder: Path, run_dir: Path, *more: str) -> list[str]:
    """Options of a run of five short steps over `make_inputs`, with half a CPU per rank and replica."""
    return [
        f"model.path={folder / 'checkpoint'}",
        f"data.train_files=[{folder / 'train.jsonl'}]",
        f"data.validation_files=[{folder / 'heldout.jsonl'}]",
        f"run_dir={run_dir}",
        "name=tiny",
        "reward.function=tests.support.tiny:length_reward",
        "rollout.n=4",
        f"rollout.max_response_tokens={MAX_RESPONSE}",
        "rollout.engine.slots=8",
        "rollout.engine.max_context_tokens=64",
        "trainer.total_steps=5",
        "trainer.mini_batch_groups=2",
        "trainer.optimizer.lr=1e-3",
        "algorithm.filter_zero_variance=false",
        "ray.cpus_per_rank=0.5",
        "ray.cpus_per_replica=0.5",
        *more,
    ]


def length_reward(prompt: Prompt, response: str) -> dict[str, float]:
    """Share of digits in the text: any answer can earn it, so a random model has something to learn."""
    digits = sum(c.isdigit() for c in response)
    return {"reward": digits / max(len(response), 1), "accuracy": float(digits > 0)}


def failing_reward(prompt: Prompt, response: str) -> float:
    raise ValueError("this reward never works")


class BrokenAgentLoop:
    """An agent loop that always raises; writes the time of the first error (Unix seconds) to ``path``."""

    def __init__(self, tokenizer, max_response_tokens: int, path: str) -> None:
        self._path = Path(path)

    async def run(self, prompt, index, generate):
        if not self._path.exists():
            self._path.write_text(str(time.time()))
        raise ZeroDivisionError("a bug in the agent loop")


def authorized(variable: str, token: str) -> list[str]:
    """Options whose agent loop and reward function need ``token``, and get it as the secret ``variable``."""
    digest = hashlib.sha256(f"Bearer {token}".encode()).hexdigest()
    return [
        "rollout.agent_loop=tests.support.tiny:AuthorizedLoop",
        "reward.function=tests.support.tiny:authorized_reward",
        *(
            f"{option}.{argument}"
            for option in ("rollout.agent_loop_args", "reward.args")
            for argument in (f"headers.Authorization=Bearer ${{secret:{variable}}}", f"sha256={digest}")
        ),
    ]


class AuthorizedLoop(SingleTurn):
    def __init__(self, tokenizer, max_response_tokens: int, headers: dict[str, str], sha256: str) -> None:
        super().__init__(tokenizer, max_response_tokens)
        _authorize(headers, sha256)


def authorized_reward(prompt: Prompt, response: str, headers: dict[str, str], sha256: str) -> dict[str, float]:
    _authorize(headers, sha256)
    return length_reward(prompt, response)


def _authorize(headers: dict[str, str], sha256: str) -> None:
    if hashlib.sha256(headers["Authorization"].encode()).hexdigest() != sha256:
        raise PermissionError("not the token")


class SlowTool:
    """Two turns of six tokens; between them, for the answers 0 and 8, a tool that takes ``slow_s``."""

    def __init__(self, tokenizer, max_response_tokens: int, slow_s: float) -> None:
        self._slow_s = slow_s

    async def run(self, prompt: Prompt, index: int, generate) -> Sample:
        turns = TrajectoryBuilder()
        turns.append(await generate(turns.response, 6))
        await asyncio.sleep(self._slow_s if prompt.answer in ("0", "8") else 0.0)
        turns.append([5])
        turns.append(await generate(turns.response, 6))
        return turns.sample(index, FinishReason.STOP)
