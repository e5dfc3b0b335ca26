"""Releases of SGLang that the engine works with."""

from __future__ import annotations

from packaging.version import Version

from asyncrl.rollouter.engines.releases import installed_release

DISTRIBUTIONS = frozenset({"sglang"})
OLDEST = Version("0.5.20")  # first with pause modes and weight versions in outputs
SESSIONS_SINCE = Version("0.5.22")  # weight updates need a begin and an end call


def check_release() -> Version:
    """The installed release. Raises EngineError for one that is too old."""
    return installed_release("SGLang", DISTRIBUTIONS, OLDEST)
