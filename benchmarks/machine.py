"""How much slower each of two busy processes is beside the other: what two cores of a machine share, such as caches,
memory and, where they are threads of one core, the arithmetic units. No scheduling of work can win this back."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier

import torch

SECONDS = 1.5
ROUNDS = 3


def _products() -> Callable[[], object]:
    """Products of matrices that fit into a core's own cache."""
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    return lambda: torch.mm(a, b)


def _copies() -> Callable[[], object]:
    """Copies that no cache holds."""
    source, target = torch.randn(1 << 25), torch.empty(1 << 25)
    return lambda: target.copy_(source)


_WORK = {"products": _products, "copies": _copies}


def _per_second(work: str, barrier: Barrier, rates: multiprocessing.Queue[float]) -> None:
    torch.set_num_threads(1)
    run = _WORK[work]()
    run()
    barrier.wait()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        run()
        count += 1
    rates.put(count / (time.perf_counter() - began))


def _rate(work: str, processes: int) -> float:
    """Mean rate of processes that run at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(processes), context.Queue()
    running = [context.Process(target=_per_second, args=(work, barrier, rates)) for _ in range(processes)]
    for process in running:
        process.start()
    found = [rates.get(timeout=60) for _ in running]
    for process in running:
        process.join()
    return statistics.mean(found)


def together_over_alone() -> dict[str, float]:
    """Speed of each of two processes beside the other over its speed alone, by kind of work."""
    return {work: statistics.median(_rate(work, 2) / _rate(work, 1) for _ in range(ROUNDS)) for work in _WORK}


if __name__ == "__main__":
    print(json.dumps({work: round(value, 3) for work, value in together_over_alone().items()}))
