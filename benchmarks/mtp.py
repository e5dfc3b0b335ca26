"""Measures the benefit of a draft that is trained and synced with the policy. The last line is JSON.

    python -m benchmarks.mtp

Everything runs in one process with one thread, engine and trainer alternating, so that nothing disturbs the timings.
The guard that stops unprofitable speculation is off, but for ``guarded_b32``.

1. *Learning*: the quickstart's task and schedule, from a shorter warm start and with a larger learning rate, so that
   the policy moves far and no stale draft stays accurate. Three arms: the draft is trained and reloaded at each sync
   (``trained``), reloaded but not trained (``frozen``), or trained but never reloaded (``stale``). An arm's figures
   are those of its last third. ``acceptance_gain``: trained over stale. ``throughput_gain``: generated tokens per
   second, trained over stale. ``throughput_of_predicted``: that gain divided by the one that both arms' tokens per
   verification predict at equal step cost. ``acceptance_of_refit``: the trained arm's final draft, over the same draft
   fitted further with the same loss on samples of the final policy alone until it hardly improves; both on the same
   prompts. ``train_step_with_over_without``: step time of the trained arm, which passes over each batch twice
   (``mtp.passes``), over the frozen arm's.
2. *Speed*: speculation against none with the same weights, a trunk of 8 layers and a draft trained with it, at 1, 8
   and 32 sequences; ``speedup_b*``: speedup of the best number of drafted tokens in the table; ``guarded_b32``: speedup
   with the guard, which chooses that number, with the steps in which it tries others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncrl.config.load import load_config
from asyncrl.config.schema import Config
from asyncrl.data.order import PromptOrder
from asyncrl.data.prompts import load_prompts
from asyncrl.models.checkpoint import is_draft, load_decoder
from asyncrl.models.decoder import Decoder, DraftTargets
from asyncrl.models.layout import PackedLayout
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.rollouter.engine_metrics import engine_metrics
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.core import Core
from asyncrl.rollouter.rewards.arithmetic import score
from asyncrl.rollouter.sampling import random_key
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from benchmarks.generation import generate, load_model, make_core
from benchmarks.quickstart import ROOT, ensure_inputs

ARMS = {"trained": (True, True), "frozen": (False, True), "stale": (True, False)}  # MTP training, reload
DRAFTED, GUARD = (1, 2, 3), "guard"  # tokens per step
PASSES = 2  # of the draft over each batch, since the policy moves far in every step
REFIT_STEPS, REFIT_BATCH, REFIT_PROMPTS, REFIT_RATE = 1600, 16, 800, 1e-3


class Task:
    """The quickstart's prompts, and groups of samples for them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._tokenizer = PromptTokenizer(config.model.path)
        self._prompts = PromptOrder(load_prompts(config.data.train_files, config.data), config.seed)
        self._sampling = SamplingParams(stop_token_ids=self._tokenizer.stop_token_ids)

    def requests(self, prompts: int, samples: int) -> tuple[list[Prompt], list[Request]]:
        chosen, longest = list(islice(self._prompts, prompts)), self._config.rollout.max_response_tokens
        requests = []
        for prompt in chosen:
            tokens = self._tokenizer.encode(prompt)
            for i in range(samples):
                key = random_key(self._config.seed, prompt.uid, i)
                name = f"{prompt.uid}/{i}"
                requests.append(Request(name, prompt.uid, tokens, len(tokens), key, 0, longest, self._sampling))
        return chosen, requests

    def groups(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], responses: dict[str, Any], version: PolicyVersion
    ) -> tuple[list[bytes], float]:
        """Groups to train on, and the share of correct answers."""
        samples, tokens_of = {p.uid: [] for p in prompts}, {p.uid: np.empty(0, np.int32) for p in prompts}
        by_uid = {p.uid: p for p in prompts}
        for request in requests:
            tokens, logprobs = responses[request.id]
            stopped = tokens[-1] in self._sampling.stop_token_ids
            reward = score(by_uid[request.group], self._tokenizer.decode(np.array(tokens)))["reward"]
            tokens_of[request.group] = request.tokens
            samples[request.group].append(
                Sample.single(
                    index=len(samples[request.group]),
                    tokens=np.array(tokens, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    loss_mask=np.ones(len(tokens), bool),
                    spans=[VersionSpan(0, version)],
                    finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    reward=reward,
                )
            )
        rewards = [s.reward for group in samples.values() for s in group]
        buffers = [
            Group.from_samples(p.uid, p.prompt_id, version.number, tokens_of[p.uid], samples[p.uid]).to_bytes()
            for p in prompts
        ]
        return buffers, float(np.mean(rewards))


@dataclass
class Arm:
    """Figures by step. ``accepted``: share of drafted tokens accepted; ``length``: tokens per verification."""

    accepted: list[float] = field(default_factory=list)
    length: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    train_s: list[float] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)

    def last(self, name: str) -> float:
        """Median of the last third."""
        values = getattr(self, name)
        return statistics.median(values[-max(len(values) // 3, 1) :])


def learn(config: Config, train_draft: bool, reload: bool, k: int, folder: Path) -> Arm:
    """Train for ``total_steps``; writes the final policy and its draft to ``folder``."""
    config.mtp.enable_train, config.mtp.num_speculative_tokens = train_draft, k
    recorder, task, arm = Recorder("engine"), Task(config), Arm()
    core = make_core(load_model(config.model.path), k, recorder)
    views = core.model.named_views()
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer"))
    try:
        for step in range(1, config.trainer.total_steps + 1):
            version = PolicyVersion(0, step - 1)
            prompts, requests = task.requests(config.trainer.mini_batch_groups, config.rollout.n)
            responses, seconds = generate(core, requests)
            spec = engine_metrics(recorder.drain().counters)
            arm.accepted.append(spec["rollout/spec_accept_rate"])
            arm.length.append(spec["rollout/spec_accept_length"])
            arm.tokens_per_s.append(sum(len(tokens) for tokens, _ in responses.values()) / seconds)
            buffers, reward = task.groups(prompts, requests, responses, version)
            arm.reward.append(reward)
            began = time.perf_counter()
            rank.train(step, buffers)
            arm.train_s.append(time.perf_counter() - began)
            for name, tensor in rank.export():
                if reload or not is_draft(name):
                    views[name].copy_(tensor)
            core.start(PolicyVersion(0, step))
        rank.export_hf(folder)
    finally:
        rank.close()
    return arm


class Studied(NamedTuple):
    """Sample of T tokens, the trunk's hidden states [T, M], and the positions from which its response is drafted."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    draft_positions: torch.Tensor


@torch.no_grad()
def studied(decoder: Decoder, prompt: list[int], response: list[int]) -> Studied:
    tokens = torch.tensor(prompt + response)
    hidden = decoder.hidden_states(tokens, PackedLayout.from_lengths(np.array([len(tokens)])))
    return Studied(tokens, hidden, torch.arange(len(prompt) - 2, len(tokens) - 2))


def refit(config: Config, final: Path, steps: int) -> tuple[float, float]:
    """Acceptance of the final draft, and of the same draft fitted further on samples of the final policy alone.

    The fit starts from the final draft, with the loss it was trained with and a learning rate that decays to zero. Both
    are measured with the same prompts and random numbers."""
    recorder, model = Recorder("engine"), load_model(final)
    core, task = make_core(model, config.mtp.num_speculative_tokens, recorder), Task(config)
    _, held_out = task.requests(64, 4)
    generate(core, held_out)
    before = engine_metrics(recorder.drain().counters)["rollout/spec_accept_rate"]

    _, requests = task.requests(REFIT_PROMPTS, 4)
    responses, _ = generate(core, requests)
    decoder = load_decoder(final)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(is_draft(name))
    fitted = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    study = [studied(decoder, r.tokens.tolist(), responses[r.id][0]) for r in requests]
    optimizer = torch.optim.AdamW(fitted.values(), lr=REFIT_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    order = np.random.default_rng(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = REFIT_RATE * (1 - step / steps)
        chosen = [study[i] for i in order.choice(len(study), REFIT_BATCH, False)]
        lengths = [len(s.tokens) for s in chosen]
        starts = np.cumsum([0, *lengths])
        draft_positions = torch.cat([s.draft_positions + int(start) for s, start in zip(chosen, starts)])
        tokens = torch.cat([s.tokens for s in chosen])
        (draft,) = decoder.score_drafts(
            torch.cat([s.hidden for s in chosen]),
            tokens,
            PackedLayout.from_lengths(np.array(lengths)),
            [DraftTargets(draft_positions, tokens[draft_positions + 2])],
            config.rollout.temperature,
        )
        optimizer.zero_grad()
        (draft.loss / len(draft_positions)).backward()
        optimizer.step()
    views = model.named_views()
    for name, parameter in fitted.items():
        views[name].copy_(parameter.detach())
    core.start(PolicyVersion(0, 1))
    recorder.drain()
    generate(core, held_out)
    return before, engine_metrics(recorder.drain().counters)["rollout/spec_accept_rate"]


def speedups(config: Config, checkpoint: Path, drafted: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows by batch size and number of drafted tokens, or `GUARD`: tokens per verification, tokens/s, speedup over no
    drafts."""
    model, recorder = load_model(checkpoint), Recorder("engine")
    for batch in (1, 8, 32):
        cores: dict[Any, Core] = {k: make_core(model, k, recorder, slots=batch) for k in (0, *drafted)}
        cores[GUARD] = make_core(model, max(drafted), recorder, slots=batch, guard=True)
        rates: dict[Any, list[float]] = {k: [] for k in cores}
        for number in range(rounds + 1):
            _, requests = Task(config).requests(max(batch, 4), 4 if batch > 1 else 2)  # several for each slot
            for k, core in cores.items():
                recorder.drain()
                responses, seconds = generate(core, requests)
                if number:
                    rates[k].append(sum(len(tokens) for tokens, _ in responses.values()) / seconds)
                lengths = engine_metrics(recorder.drain().counters)
                if k:
                    yield {"batch": batch, "k": k, "length": lengths["rollout/spec_accept_length"]}
        for k in (*drafted, GUARD):
            ratio = statistics.median(ours / plain for ours, plain in zip(rates[k], rates[0]))
            yield {"batch": batch, "k": k, "speedup": ratio, "tokens_per_s": statistics.median(rates[k])}


def draw(arms: dict[str, Arm], path: Path) -> None:
    import plotly.graph_objects as go  # here, because other benchmarks import this file where it is not installed

    figure = go.Figure()
    for name, arm in arms.items():
        figure.add_scatter(x=list(range(1, len(arm.accepted) + 1)), y=arm.accepted, name=name, mode="lines")
    figure.update_layout(
        title="Accepted share of drafted tokens",
        xaxis_title="train step",
        yaxis_title="acceptance",
        template="simple_white",
    )
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--drafted", type=int, default=1, help="tokens drafted per step while learning")
    parser.add_argument("--start-steps", type=int, default=250, help="warm-start steps of the policy that learns")
    parser.add_argument("--deep-steps", type=int, default=300, help="warm-start steps of the 8-layer model")
    parser.add_argument("--refit-steps", type=int, default=REFIT_STEPS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path, default=ROOT / "runs/mtp_acceptance.html")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoints/arith-mimo", help="made if absent")
    parser.add_argument("--data", type=Path, default=ROOT / "data/arithmetic", help="made if absent")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ensure_inputs(args.checkpoint, args.data)

    def options(start: Path) -> Config:
        return load_config(
            ROOT / "configs/quickstart.yaml",
            [
                f"model.path={start}",
                f"data.train_files=[{args.data / 'train.jsonl'}]",
                f"trainer.total_steps={args.steps}",
                "trainer.mini_batch_groups=16",
                "trainer.optimizer.lr=6e-4",
                "checkpoint.every_steps=0",
                f"mtp.passes={PASSES}",
            ],
        )

    with tempfile.TemporaryDirectory() as folder:
        start = make_checkpoint(Path(folder) / "start", 1, args.start_steps)
        arms = {}
        print(
            f"{'arm':10}{'acceptance':>12}{'tokens/verify':>15}{'tokens/s':>10}{'train s':>9}{'reward':>8}", flush=True
        )
        for name, (train_draft, reload) in ARMS.items():
            arms[name] = arm = learn(options(start), train_draft, reload, args.drafted, Path(folder) / name)
            print(
                f"{name:10}{arm.last('accepted'):12.3f}{arm.last('length'):15.3f}{arm.last('tokens_per_s'):10.0f}"
                f"{arm.last('train_s'):9.3f}{arm.last('reward'):8.3f}",
                flush=True,
            )
        args.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(arms, args.figure)
        config = options(start)
        config.mtp.num_speculative_tokens = args.drafted
        with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as beside:  # neither is timed
            made = beside.submit(make_checkpoint, Path(folder) / "deep", 1, args.deep_steps, layers=8)
            own, fitted = refit(config, Path(folder) / "trained", args.refit_steps)
            deep = made.result()
        print(f"\nfinal draft {own:.3f}, refitted {fitted:.3f}; acceptance over steps: {args.figure}\n", flush=True)

        print(f"{'batch':>5}{'drafted':>9}{'tokens/verify':>15}{'tokens/s':>10}{'speedup':>9}")
        rows: dict[tuple[int, int | str], dict[str, Any]] = {}
        for row in speedups(options(deep), deep, DRAFTED, args.rounds):
            rows.setdefault((row["batch"], row["k"]), {}).update(row)
        for (batch, k), row in rows.items():
            print(f"{batch:5}{k:9}{row['length']:15.3f}{row['tokens_per_s']:10.0f}{row['speedup']:9.2f}")

    trained, stale = arms["trained"], arms["stale"]
    gain = trained.last("tokens_per_s") / stale.last("tokens_per_s")
    figures = {
        "acceptance_gain": trained.last("accepted") / stale.last("accepted"),
        "throughput_gain": gain,
        "throughput_of_predicted": gain / (trained.last("length") / stale.last("length")),
        "acceptance_of_refit": own / fitted,
        **{f"speedup_b{batch}": max(rows[batch, k]["speedup"] for k in DRAFTED) for batch in (1, 8, 32)},
        "guarded_b32": rows[32, GUARD]["speedup"],
        "train_step_with_over_without": trained.last("train_s") / arms["frozen"].last("train_s"),
        "acceptance_gain_over_frozen": trained.last("accepted") / arms["frozen"].last("accepted"),
    }
    print("\n" + json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
