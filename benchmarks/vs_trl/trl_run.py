"""Trains the quickstart's task with TRL's GRPOTrainer, in the environment of `make venv-trl`:

    python -m benchmarks.vs_trl.trl_run OPTIONS OUT

``OPTIONS``: `TrlOptions` as JSON. Writes weights every few steps to OUT/step_000004 and so on, as Hugging Face folders,
and OUT/steps.json: seconds of training until the end of each step, without the time in which weights are written.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from asyncrl.data.arithmetic import final_answer
from asyncrl.models.checkpoint import is_draft, read_tensors


@dataclass(frozen=True)
class TrlOptions:
    """``prompts`` per step with ``n`` samples each. ``micro_batch``: samples per forward pass. The learning rate falls
    linearly from ``lr`` to ``min_lr_ratio · lr`` over ``schedule_steps``."""

    checkpoint: str
    train_file: str
    seed: int
    lr: float
    min_lr_ratio: float
    schedule_steps: int
    steps: int
    save_every: int
    prompts: int
    n: int
    max_response_tokens: int
    micro_batch: int
    threads: int


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times steps and writes weights between them."""

    def __init__(self, options: TrlOptions, out: Path) -> None:
        self._options, self._out = options, out
        self._source = Path(options.checkpoint)
        self._draft = {name: tensor for name, tensor in read_tensors(self._source).items() if is_draft(name)}
        self._began_s = self._stopped_s = 0.0
        self.seconds: dict[int, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        now_s = time.perf_counter()
        step = state.global_step
        self.seconds[step] = now_s - self._began_s - self._stopped_s
        if step % self._options.save_every == 0:
            self._write(model, self._out / f"step_{step:06}")
        print(f"step {step}: {self.seconds[step]:.1f} s", flush=True)
        self._stopped_s += time.perf_counter() - now_s

    def _write(self, model: Any, folder: Path) -> None:
        weights = {k: v.detach().contiguous() for k, v in model.state_dict().items()}
        folder.mkdir(parents=True)
        for file in self._source.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, folder)
        save_file(weights | self._draft, folder / "model.safetensors", {"format": "pt"})


def reward(completions: Any, answer: list[str], **columns: Any) -> list[float]:
    return [float(final_answer(c[0]["content"]) == int(a)) for c, a in zip(completions, answer, strict=True)]


def main() -> None:
    options, out = TrlOptions(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(options.threads)
    samples = options.prompts * options.n
    config = GRPOConfig(
        output_dir=str(out / "trl"),
        seed=options.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        learning_rate=options.lr,
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={
            "num_stable_steps": 0,
            "num_decay_steps": options.schedule_steps,
            "min_lr_ratio": options.min_lr_ratio,
            "decay_type": "linear",
        },
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=samples // options.micro_batch,
        num_generations=options.n,
        max_completion_length=options.max_response_tokens,
        temperature=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    clock = Clock(options, out)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.checkpoint, padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=options.train_file, split="train"),
        callbacks=[clock],
    )
    trainer.train()
    (out / "steps.json").write_text(json.dumps(clock.seconds))


if __name__ == "__main__":
    main()
