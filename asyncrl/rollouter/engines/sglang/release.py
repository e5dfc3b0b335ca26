"""Releases of SGLang that the engine works with."""

from __future__ import annotations

from packaging.version import Version

from asyncrl.rollouter.engines.releases import installed_release

DISTRIBUTIONS = frozenset({"sglang"})
OLDEST = Version("0.5.20")  # with the pause modes, and spans of weight versions in the outputs
SESSIONS_SINCE = Version("0.5.22")  # weight updates stand between begin and end


def check_release() -> Version:
    """The installed release. Raises EngineError for one that is too old."""
    return installed_release("SGLang", DISTRIBUTIONS, OLDEST)
