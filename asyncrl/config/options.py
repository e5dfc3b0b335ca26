"""Options by dotted key, with their types and limits in words."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Mapping
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

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


def fields_of(section: Any) -> Mapping[str, FieldInfo]:
    """The pydantic fields of a section's class."""
    return typing.cast(Mapping[str, FieldInfo], section.__pydantic_fields__)


def choices(field: FieldInfo) -> tuple[Any, ...]:
    """Values of a closed choice; empty for an open one."""
    return typing.get_args(field.annotation) if typing.get_origin(field.annotation) is typing.Literal else ()


def limits(field: FieldInfo) -> str:
    """Bounds in words, such as ``at least 1``; empty without any."""
    words = []
    for bound in field.metadata:
        match bound:
            case Gt(gt=least) if field.annotation is int:
                words.append(f"at least {int(typing.cast(int, least)) + 1}")
            case Gt(gt=least):
                words.append(f"more than {least:g}")
            case Ge(ge=least):
                words.append(f"at least {least:g}")
            case Lt(lt=most):
                words.append(f"less than {most:g}")
            case Le(le=most):
                words.append(f"at most {most:g}")
    return " and ".join(words)
