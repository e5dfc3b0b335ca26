"""A tiny run for tests: a random model, a handful of problems, rewards that any answer can earn."""

import json
import time
from pathlib import Path

from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.types.prompts import Prompt

MAX_RESPONSE = 24


def make_inputs(folder: Path) -> Path:
    """A checkpoint (random weights) and problems under ``folder``."""
    make_checkpoint(folder / "checkpoint", seed=0, warm_start_steps=0)
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
