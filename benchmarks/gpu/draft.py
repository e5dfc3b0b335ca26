"""The quickstart's trained draft over syncs, with and without unloading the KV cache and reloading the draft."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from asyncrl.config.load import load_config
from asyncrl.models.checkpoint import is_draft
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.versions import PolicyVersion
from benchmarks.generation import generate, load_model, make_core
from benchmarks.gpu.models import Run
from benchmarks.mtp import Task
from benchmarks.quickstart import ROOT, ensure_inputs

ARMS = {"neither": (False, False), "unload": (True, False), "reload": (False, True), "both": (True, True)}
CHECKPOINT, DATA = ROOT / "checkpoints/arith-mimo", ROOT / "data/arithmetic"


def draft(run: Run) -> dict[str, Any]:
    """The quickstart's task is trained with its draft; every step's weights are kept. Each arm then generates the same
    requests under them, one sync before each batch: with the KV cache unloaded in it or not, and the draft reloaded or
    as it was. Figures of the last third: accepted share of drafted tokens, and tokens per second without the sync.
    ``none``: the same without speculation."""
    steps, groups = (3, 4) if run.tiny else (30, 16)
    ensure_inputs(CHECKPOINT, DATA)
    config = load_config(
        ROOT / "configs/quickstart.yaml",
        [
            f"model.path={CHECKPOINT}",
            f"data.train_files=[{DATA / 'train.jsonl'}]",
            f"trainer.device={run.device}",
            f"trainer.mini_batch_groups={groups}",
            "trainer.optimizer.lr=6e-4",  # so that the policy moves far from the draft
            "checkpoint.every_steps=0",
            "mtp.enable_train=true",
            "mtp.num_speculative_tokens=1",
        ],
    )
    task, recorder = Task(config), Recorder("engine")
    model = load_model(CHECKPOINT, device=run.device)
    core = make_core(model, 1, recorder)
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    weights: list[dict[str, torch.Tensor]] = []
    rewards: list[float] = []
    for number in range(1, steps + 1):
        prompts, requests = task.requests(groups, config.rollout.n)
        responses, _ = generate(core, requests)
        buffers, reward = task.groups(prompts, requests, responses, PolicyVersion(0, number - 1))
        rewards.append(reward)
        rank.train(number, buffers)
        weights.append({name: tensor.clone() for name, tensor in rank.export()})
        for name, view in model.named_views().items():
            view.copy_(weights[-1][name])
        core.start(PolicyVersion(0, number))
    rank.close()
    _, requests = task.requests(groups, config.rollout.n)
    figures: dict[str, Any] = {"reward": [round(rewards[0], 3), round(rewards[-1], 3)]}
    for arm, (unload, reload) in {"none": (False, False), **ARMS}.items():
        model = load_model(CHECKPOINT, device=run.device)
        core, views = make_core(model, int(arm != "none"), recorder), model.named_views()
        accepted, rates = [], []
        for number, sent in enumerate(weights, start=1):
            if unload:
                core.release_kv()
            for name, view in views.items():
                if reload or not is_draft(name):
                    view.copy_(sent[name])
            core.kv.restore()
            core.start(PolicyVersion(0, number))
            recorder.drain()
            responses, seconds = generate(core, requests)
            rates.append(sum(len(tokens) for tokens, _ in responses.values()) / seconds)
            accepted.append(engine_metrics(recorder.drain().counters).get("rollout/spec_accept_rate", 0.0))
        last = max(len(weights) // 3, 1)
        figures[arm] = {
            "accepted": round(statistics.median(accepted[-last:]), 3),
            "tokens_per_s": round(statistics.median(rates[-last:])),
        }
    return figures
