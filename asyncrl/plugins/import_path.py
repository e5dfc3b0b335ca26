"""Objects by import path, ``package.module:name``."""

from __future__ import annotations

import importlib
from typing import Any


class ImportPathError(ValueError):
    """The path cannot be imported; the message says which half is wrong."""


def load(path: str) -> Any:
    """The object at ``package.module:name``. Raises ImportPathError."""
    module, _, name = path.partition(":")
    if not module or not name or ":" in name:
        raise ImportPathError(f"expected an import path such as package.module:name, found {path!r}")
    try:
        found = importlib.import_module(module)
    except Exception as e:  # a module may raise anything
        message = " ".join(str(e).split())
        raise ImportPathError(f"{path}: module {module} does not import ({type(e).__name__}: {message})") from e
    if not hasattr(found, name):
        raise ImportPathError(f"{path}: module {module} has no {name}")
    return getattr(found, name)
