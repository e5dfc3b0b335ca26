"""The fields of a section: types and limits in words, and what a wrong value should have been."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


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


def type_name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind)) if typing.get_origin(kind) is None else str(kind).replace("typing.", "")


def expected(error: ErrorDetails, field: FieldInfo, found: Any) -> str:
    """A pydantic error of a field in words: "expected …, found …"."""
    if dataclasses.is_dataclass(field.annotation):
        return f"expected a group of options, found {found!r}"
    if allowed := choices(field):
        unquoted = " (YAML reads an unquoted no, yes, off or on as a boolean)" if isinstance(found, bool) else ""
        return f"expected one of {', '.join(allowed)}; found {found!r}{unquoted}"
    if error["type"] == "finite_number":
        return f"expected {'a finite number' if field.annotation is float else 'finite numbers'}, found {found}"
    if error["type"] in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        return f"expected {limits(field)}, found {found}"
    if error["type"] == "value_error":  # raised by the option's own validator
        return str(error["ctx"]["error"])
    return f"expected {type_name(field.annotation)}, found {found!r}"
