"""Compares the cost of syncing adapters with that of whole weights. The last line is JSON.

    python -m benchmarks.lora_sync

A torch trainer and a native engine, in separate processes with one thread each, sync over shared memory: without LoRA,
with LoRA merged by the trainer, and with adapters alone, which the engine merges. Digests and checksums are on;
nothing is generated. Medians over syncs after the first, which sends the base in each case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.checks import sends_adapters
from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.sender import Sender
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.param_sync.session_protocol import Offer, SendPlan, SendReport
from asyncrl.param_sync.transports.choose import make_writer
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.versions import PolicyVersion
from benchmarks.remote import Remote

MIB = 1024 * 1024
CASES = {"whole weights": (0, "adapter"), "LoRA, merged": (1, "merged"), "LoRA, adapters": (1, "adapter")}


class Replica:
    def __init__(self, config: Config) -> None:
        lora = config.model.lora if sends_adapters(config) else None
        engine = NativeEngine(config.model.path, config.rollout.engine, lora=lora)
        self._session = EngineSession("replica/0", engine, engine.weight_receiver("replica/0", "shared_memory"))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._session, method)


class Rank:
    def __init__(self, config: Config) -> None:
        self._rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
        self._sender = Sender("trainer/0", make_writer("shared_memory", 0, config.param_sync.bucket_bytes, "127.0.0.1"))

    async def offer(self) -> Offer:
        return Offer(self._rank.manifest(), self._sender.address)

    async def send(self, plan: SendPlan) -> SendReport:
        self._sender.open(plan)
        return await asyncio.to_thread(self._sender.send, self._rank.export(plan.manifest.sends_base))

    async def close(self) -> None:
        self._sender.close()


def make_checkpoint(folder: Path, hidden: int, layers: int) -> str:
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 8192,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "max_position_embeddings": 256,
    }
    model = Decoder(DecoderConfig.from_dict(raw))
    model.init_weights(seed=0)
    save_checkpoint(folder, model.named_parameters(), model.config)
    return str(folder)


async def syncs(checkpoint: str, rank: int, adapters: str, count: int) -> list[SyncReport]:
    config = Config()
    config.model.path, config.model.lora.rank = checkpoint, rank
    config.trainer.device = config.rollout.engine.device = "cpu"
    config.rollout.engine.slots = 1
    config.param_sync.adapters, config.param_sync.pause = adapters, "abort"
    trainer, replica, fleet = Remote(Rank, config), Remote(Replica, config), Fleet()
    fleet.add("replica/0", replica)
    session = lambda n: SyncSession({"trainer/0": trainer}, fleet, config.param_sync).run(PolicyVersion(0, n))
    try:
        return [await session(n) for n in range(1 + count)][1:]
    finally:
        await trainer.close()
        for remote in (trainer, replica):
            remote.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, float] = {}
    print(f"adapters of rank {args.rank}, medians of {args.syncs} syncs\n")
    print(f"{'':18}{'MiB':>10}{'sync ms':>10}{'paused ms':>11}{'commit ms':>11}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), args.hidden, args.layers)
        for case, (on, adapters) in CASES.items():
            reports = asyncio.run(syncs(checkpoint, on * args.rank, adapters, args.syncs))
            median = lambda value, of=reports: statistics.median(map(value, of)) * 1e3
            total, paused = median(lambda r: r.total_s), median(lambda r: sum(r.paused_s.values()))
            nbytes, commit = reports[0].nbytes, median(lambda r: r.seconds["commit"])
            print(f"{case:18}{nbytes / MIB:10.1f}{total:10.1f}{paused:11.1f}{commit:11.1f}")
            key = case.replace("LoRA, ", "").replace(" ", "_")
            figures |= {f"{key}_mib": nbytes / MIB, f"{key}_ms": total, f"{key}_paused_ms": paused}
    figures["adapters_over_whole"] = figures["whole_weights_ms"] / figures["adapters_ms"]
    print("\n" + json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
