"""Options by dotted key."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pydantic.fields import FieldInfo

from asyncrl.config.fields import fields_of
from asyncrl.config.schema import Config


def options(section: Any = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Dotted key of every option and group of options → its pydantic field."""
    found = {}
    for name, field in fields_of(section).items():
        found[prefix + name] = field
        if dataclasses.is_dataclass(field.annotation):
            found |= options(field.annotation, f"{prefix}{name}.")
    return found


@functools.cache
def known_keys() -> dict[str, Any]:
    """Dotted key of every option and group of options → its type."""
    return {key: field.annotation for key, field in options().items()}
