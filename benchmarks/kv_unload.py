"""Measures the memory freed by unloading the KV cache while weights arrive. The last line is JSON.

    python -m benchmarks.kv_unload

A native engine with a full KV cache, in its own process, syncs with a sender in another process over shared memory:
with KV recomputed afterwards (the memory stays), and unloaded (freed before the first bucket, allocated again after
the last). ``peak_mib``: the kernel's peak resident memory of the replica's process while weights arrive;
``saved_of_kv``: the difference of both peaks divided by the size of the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.config.schema import DeadlinesConfig, EngineConfig, ParamSyncConfig
from asyncrl.models.checkpoint import read_tensors, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.param_sync.fleet import Fleet
from asyncrl.param_sync.replica_session import EngineSession
from asyncrl.param_sync.session import SyncReport, SyncSession
from asyncrl.rollouter.engines.base import Request, SamplingParams
from asyncrl.rollouter.engines.native.engine import NativeEngine
from asyncrl.types.versions import PolicyVersion
from benchmarks.param_sync import Rank
from benchmarks.remote import Remote

SLOTS, CONTEXT_TOKENS, MIB = 32, 1024, 1024 * 1024
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT_TOKENS,
}


class Replica:
    """Replica session that measures its process's memory and can fill the engine's KV cache."""

    def __init__(self, folder: str) -> None:
        self._engine = NativeEngine(folder, EngineConfig(slots=SLOTS, max_context_tokens=CONTEXT_TOKENS))
        self._session = EngineSession(
            "replica/0", self._engine, self._engine.weight_receiver("replica/0", "shared_memory")
        )

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self._session, method)

    async def fill(self) -> int:
        """Generate until every slot holds a whole context; returns the cache's size in bytes."""
        prompts = np.random.default_rng(0).integers(0, MODEL["vocab_size"], (SLOTS, CONTEXT_TOKENS - 2))
        requests = [
            Request(f"{i}", f"{i}", prompts[i].astype(np.int32), 0, i, 0, 1, SamplingParams()) for i in range(SLOTS)
        ]
        await self._engine.submit(requests)
        unfinished = SLOTS
        while unfinished:
            unfinished -= sum(finish is not None for finish in (await self._engine.events()).finish)
        return self._engine._core.kv.nbytes

    async def unload(self, *args: Any) -> int:
        freed = await self._session.unload(*args)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        return freed

    async def reload(self, *args: Any) -> None:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        self._peak_bytes = int(found[1]) * 1024
        await self._session.reload(*args)

    async def peak_bytes(self) -> int:
        """Peak resident memory from the unload phase until the last weight arrived."""
        return self._peak_bytes


async def measure(folder: str, rounds: int) -> tuple[int, dict[str, list[tuple[int, SyncReport]]]]:
    """Cache size in bytes, and per KV mode the peak (bytes) and report of each session."""
    rank, engine, fleet = (
        Remote(Rank, functools.partial(read_tensors, folder), 4 * MIB),
        Remote(Replica, folder),
        Fleet(),
    )
    fleet.add("replica/0", engine)
    found: dict[str, list[tuple[int, SyncReport]]] = {"recompute": [], "unload": []}
    config = replace(ParamSyncConfig(), pause="abort", deadlines=DeadlinesConfig())
    await SyncSession({"trainer/0": rank}, fleet, config).run(PolicyVersion(0, 0))
    for number in range(1, 2 * rounds + 1):
        kv = "unload" if number % 2 else "recompute"
        kv_bytes = await engine.fill()
        report = await SyncSession({"trainer/0": rank}, fleet, replace(config, kv=kv)).run(PolicyVersion(0, number))
        assert not report.evicted
        found[kv].append((await engine.peak_bytes(), report))
    for remote in (rank, engine):
        remote.end()
    return kv_bytes, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = DecoderConfig.from_dict(MODEL)
        decoder = Decoder(config)
        decoder.init_weights(seed=0)
        save_checkpoint(folder, dict(decoder.named_parameters()), config)
        kv_bytes, found = asyncio.run(measure(folder, rounds))
    sent = found["unload"][0][1].nbytes
    print(f"KV cache {kv_bytes / MIB:.0f} MiB, weights {sent / MIB:.0f} MiB, {rounds} rounds\n")
    print(
        f"{'':12}{'peak MiB':>10}{'freed MiB':>11}{'unload ms':>11}{'transfer ms':>13}{'reload ms':>11}{'pause ms':>10}"
    )
    figures: dict[str, float] = {"kv_mib": kv_bytes / MIB}
    for kv, rows in found.items():
        median = lambda of: statistics.median(of(*row) for row in rows)  # noqa: B023 (used at once)
        seconds = lambda phase: median(lambda _, report: report.seconds.get(phase, 0.0)) * 1e3  # noqa: B023
        figures[f"peak_mib_{kv}"] = median(lambda peak, _: peak) / MIB
        figures[f"freed_mib_{kv}"] = median(lambda _, report: sum(report.freed_bytes.values())) / MIB
        pause_ms = median(lambda _, report: sum(report.paused_s.values())) * 1e3
        print(
            f"{kv:12}{figures[f'peak_mib_{kv}']:10.0f}{figures[f'freed_mib_{kv}']:11.0f}{seconds('unload'):11.1f}"
            f"{seconds('transfer'):13.1f}{seconds('reload'):11.1f}{pause_ms:10.1f}"
        )
    figures["saved_of_kv"] = (figures["peak_mib_recompute"] - figures["peak_mib_unload"]) / figures["kv_mib"]
    print("\n" + json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
