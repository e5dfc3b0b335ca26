"""Measures whether agents' tokens are trained exactly as they were sampled, through deaths, and the endpoint's cost.

    python -m benchmarks.agents [--samples 2000] [--parts faults cost throughput rendering]

1. *Faults*: a real run of agents that take turns in all APIs, call tools, branch, compact their history, start
   sub-agents, cut connections and retry (`tests.support.random_agent`), while two replicas and the rollouter die. Every
   trained token is looked up in the log that the engines wrote themselves.
2. *Cost*: CPU time of the endpoint's process for a call with an answer of 128 tokens.
3. *Throughput*: tokens per second of single turns of 128 tokens, through the endpoint relative to the default agent
   loop, in alternating runs. The policy has as many layers as models of half a billion parameters, though narrow ones:
   one whose engine needs as little as an HTTP call (5 ms for 128 tokens) would measure the agents' Python.
4. *Rendering*: its share of the CPU time of endpoint and engine over a conversation of 64 turns.

The last line is JSON: ``tokens_exact``, ``trained_or_explained``, ``refused``, ``server_cpu_ms_per_call``,
``endpoint_over_direct``, ``render_share``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import ray

from asyncrl.config.load import load_config
from asyncrl.models.make_checkpoint import LAYERS, make_checkpoint
from asyncrl.processes.actor_client import ActorClient, ActorDied, start_ray
from asyncrl.rollouter.actors import EndpointActor
from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.endpoint.link import EndedSession, EndpointLink, FinishedCall, StartedCall
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.endpoint import TEMPLATE
from tests.support.faults import FaultyRun
from tests.support.tiny import overrides
from tests.support.token_audit import audit_tokens

PARTS = ["faults", "cost", "throughput", "rendering"]
CALLS = 20  # of an agent whose calls are measured
DEEP, RUNS = 24, 3  # layers, and runs of each way

N, GROUPS = 4, 16
OPTIONS = (
    f"rollout.n={N}",
    f"trainer.mini_batch_groups={GROUPS}",
    "trainer.max_tokens_per_micro_batch=4096",
    "rollout.max_response_tokens=640",
    "rollout.engine.max_context_tokens=768",
    "rollout.engine.slots=16",
    "rollout.replicas=2",
    "rollout.engine.name=tests.support.logged_engine:NATIVE",
    "rollout.agent.path=tests.support.random_agent:solve",
    "reward.function=none",
    "checkpoint.every_steps=0",
    "async_training.staleness_threshold=2",
    "trainer.optimizer.lr=1e-5",
)


def make_inputs(folder: Path, warm_start_steps: int = 200, layers: int = LAYERS) -> Path:
    """A checkpoint that calls a tool half of the time, once it is warm, and its prompts."""
    demonstrations = "tests.support.random_agent:demonstrations"
    make_checkpoint(folder / "checkpoint", 0, warm_start_steps, demonstrations, layers)
    (folder / "checkpoint/chat_template.jinja").write_text(TEMPLATE)
    config = folder / "checkpoint/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 4096}))
    rows = [
        {"prompt": [{"role": "user", "content": f"Compute {a}+{b}"}], "answer": str(a + b)}
        for a in range(10)
        for b in range(10)
    ]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def faults(inputs: Path, folder: Path, samples: int) -> dict[str, float]:
    steps = -(-samples // (N * GROUPS))
    run = FaultyRun(inputs, folder / "faults", *OPTIONS, f"trainer.total_steps={steps}")
    try:
        for number, kind in enumerate(["replica", "rollouter", "replica"], start=1):
            run.until_trained(number * steps // 4, timeout_s=1200)
            run.kill(kind)
            if kind == "rollouter":
                died_s = time.monotonic()  # what it sent last has arrived, and its successor loads its tokenizer
        if status := run.wait(1200):
            raise SystemExit(f"the run exited {status}\n{run.text}")
    finally:
        run.close()
    audit = audit_tokens(folder / "faults", died_s)
    rows = [json.loads(line) for line in (folder / "faults/metrics.jsonl").read_text().splitlines()]
    counted = {k: v for row in rows for k, v in row.items() if k.startswith(("rollout/agent/", "rollout/failed_sam"))}
    for name, value in sorted(counted.items()):
        print(f"{name:<60} {value:>10.0f}")
    for reason, tokens in audit.why.most_common():
        print(f"sampled tokens: {reason:<44} {tokens:>10}")
    never_delivered = counted.get("rollout/agent/untrained_tokens/never_delivered", 0)
    unexplained = audit.unexplained + max(0, audit.why["of several equal calls"] - never_delivered)
    calls = sum(counted.get(f"rollout/agent/{how}", 0) for how in ("rendered", "bridged", "branched"))
    refused = counted.get("rollout/agent/refused", 0)
    print(f"{audit.samples} samples of {audit.sequences} sequences, {audit.trained} trained tokens, {calls:.0f} calls")
    return {
        "tokens_exact": audit.exact / max(audit.trained, 1),
        "trained_or_explained": 1 - unexplained / max(audit.sampled, 1),
        "refused": refused / max(calls + refused, 1),
    }


def endpoint_cpu_ms(inputs: Path, folder: Path) -> float:
    """CPU time of the endpoint's process per call with an answer of 128 tokens, in ms; 16 agents call at once."""
    return asyncio.run(_endpoint_cpu_ms(inputs, folder))


async def _endpoint_cpu_ms(inputs: Path, folder: Path) -> float:
    options = [*overrides(inputs, folder / "cost"), "rollout.max_response_tokens=4000"]
    config = load_config(None, [*options, "rollout.agent.path=tests.support.agents:calls"])
    tokenizer = PromptTokenizer(config.model.path)
    rng = np.random.default_rng(0)
    start_ray(num_cpus=2, logging_level="ERROR", _temp_dir=None)
    actor = ActorClient(
        EndpointActor.options(num_cpus=0).remote(config, "endpoint", PromptTokenizer.of(config)), "endpoint"
    )
    await actor.start()
    _, process = await actor.where()
    endpoint = psutil.Process(process.pid)
    link = EndpointLink(actor, 1, ActorDied)  # type: ignore[arg-type]
    running = asyncio.create_task(link.run())
    prompt = Prompt("e0-000000", "row:0", ({"role": "user", "content": "Compute 1+2"},), "3", extra={"calls": CALLS})
    version = [VersionSpan(0, PolicyVersion(0, 0))]

    async def session(number: int) -> int:
        """Answers each call with random tokens, a stop token at their end."""
        calls = 0
        one, events = link.open(f"{number}", prompt, number, None)
        while not isinstance(event := await events.get(), EndedSession):
            assert isinstance(event, StartedCall)
            tokens = rng.integers(3, 300, 128, dtype=np.int32)
            tokens[-1] = tokenizer.stop_token_ids[0]
            logprobs = np.full(128, -1.0, np.float32)
            link.answer(
                FinishedCall(one.address, event.number, Completion(tokens, logprobs, version, FinishReason.STOP))
            )
            calls += 1
        assert event.failure is None, event.failure
        link.end(one)
        return calls

    figures = []
    for repeat in range(4):
        before_s = sum(endpoint.cpu_times()[:2])
        calls = sum(await asyncio.gather(*(session(16 * repeat + i) for i in range(16))))
        figures.append(1000 * (sum(endpoint.cpu_times()[:2]) - before_s) / calls)
    running.cancel()
    ray.shutdown()
    print("CPU ms per call: " + "  ".join(f"{figure:.2f}" for figure in figures))
    return statistics.median(figures[1:])


def throughput(folder: Path) -> float:
    """Tokens per second through the endpoint, relative to the default agent loop's: medians over runs in
    alternation."""
    inputs = make_inputs(folder / "deep", 0, DEEP)
    options = ["rollout.n=8", "trainer.mini_batch_groups=4", "trainer.total_steps=12", "data.validation_files=[]"]
    options += ["rollout.max_response_tokens=128", "rollout.engine.max_context_tokens=192", "rollout.engine.slots=16"]
    options += ["async_training.staleness_threshold=2", "trainer.optimizer.lr=1e-6", "ray.cpus_per_replica=1"]
    ways = {"direct": [], "endpoint": ["rollout.agent.path=tests.support.agents:single_turn"]}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(RUNS):
        for way, more in ways.items():
            rows = _finished(inputs, folder / f"{way}-{repeat}", *options, *more)[2:-2]  # it begins and ends alone
            sampled = sum(row["perf/rollout_tokens_per_s"] * row["perf/step_s"] for row in rows)
            rates[way].append(sampled / sum(row["perf/step_s"] for row in rows))
            print(f"{way:<10} {rates[way][-1]:>8.0f} tokens/s", flush=True)
    return statistics.median(rates["endpoint"]) / statistics.median(rates["direct"])


def render_share(inputs: Path, folder: Path) -> float:
    """CPU time of rendering and parsing over that of endpoint, rollouter and engine, in conversations of 64 turns."""
    options = ["rollout.n=4", "trainer.mini_batch_groups=2", "trainer.total_steps=3", "data.validation_files=[]"]
    options += ["rollout.max_response_tokens=3800", "rollout.engine.max_context_tokens=4096", "rollout.engine.slots=8"]
    options += [
        "reward.function=none",
        "rollout.agent.path=tests.support.agents:dialogue",
        "rollout.agent.args={turns: 64, max_tokens: 48}",
    ]
    run = FaultyRun(inputs, folder / "rendering", *options)
    try:
        for started in ("agents call", "has 100 prompts", "generates with"):
            run.until_printed(started)
        before_s = seconds = _cpu_s(run)
        while run.process.poll() is None:
            seconds = seconds | _cpu_s(run)
            time.sleep(0.5)
        if status := run.wait():
            raise SystemExit(f"the run exited {status}\n{run.text}")
    finally:
        run.close()
    rows = [json.loads(line) for line in (folder / "rendering/metrics.jsonl").read_text().splitlines()]
    rendering_s = max(row.get("rollout/agent/render_s", 0) for row in rows)
    all_s = sum(seconds.values()) - sum(before_s.values())
    print(f"{rendering_s:.1f} s of rendering in {all_s:.1f} s of endpoint, rollouter and engine")
    return rendering_s / all_s


def _cpu_s(run: FaultyRun) -> dict[int, float]:
    """CPU seconds of endpoint, rollouter and engine, by process."""
    found = {}
    for process in (p for kind in ("endpoint", "rollouter", "replica") for p in run.actors(kind)):
        with contextlib.suppress(psutil.Error):
            found[process.pid] = sum(process.cpu_times()[:2])
    return found


def _finished(inputs: Path, folder: Path, *options: str) -> list[dict[str, float]]:
    """Metrics of each step of a run."""
    run = FaultyRun(inputs, folder, *options)
    try:
        if status := run.wait(600):
            raise SystemExit(f"the run exited {status}\n{run.text}")
    finally:
        run.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "perf/rollout_tokens_per_s" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="asyncrl-agents-") as name:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        if "faults" in args.parts:
            figures |= faults(inputs, folder, args.samples)
        if "cost" in args.parts:
            figures["server_cpu_ms_per_call"] = endpoint_cpu_ms(inputs, folder)
        if "throughput" in args.parts:
            figures["endpoint_over_direct"] = throughput(folder)
        if "rendering" in args.parts:
            figures["render_share"] = render_share(inputs, folder)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
