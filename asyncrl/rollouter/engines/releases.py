"""Installed releases of the packages that engines run on."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from packaging.version import Version

from asyncrl.rollouter.engines.base import EngineError


def installed_release(title: str, distributions: Iterable[str], oldest: Version) -> Version:
    """Release of the first of ``distributions`` that is installed. Raises EngineError if there is none, or one older
    than ``oldest``."""
    for name in sorted(distributions):
        try:
            found = Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        if found.release < oldest.release:
            raise EngineError(f"{title} {found}: expected at least {oldest}, which reports weight versions")
        return found
    raise EngineError(f"{title} is not installed in this environment; runtime_env/ has an environment for its replicas")
