"""The configuration reference, docs/configuration.md, generated from the options and their comments.

python -m asyncrl.config.reference > docs/configuration.md
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import tokenize
import typing
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo

from asyncrl.algorithms.options import readers
from asyncrl.config.fields import choices, fields_of, limits
from asyncrl.config.schema import Config

HEAD = """# Configuration

Every option, with its type and limits, default and meaning. `python -m asyncrl.config.reference` generates this page
from [asyncrl/config/schema.py](../asyncrl/config/schema.py); a test fails when it is out of date.

A config file is YAML of these keys. It may begin with `extends: other.yaml`, a path relative to itself, and then
contains only what differs. Dotted overrides on the command line take precedence, `${oc.env:NAME,default}` reads an
environment variable, `${secret:NAME}` [names a secret](cluster.md#secrets), and `--print-config` prints the resulting
configuration. A default of `???` means that the option must be given; `${NAME:-x}` is the environment variable NAME, or
x if it is unset.
"""

_TYPES = {"str": "text", "int": "integer", "float": "number", "bool": "true, false"}


def reference() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *_section(Config, "", "Run"), ""])


def _section(kind: type, prefix: str, title: str) -> Iterator[str]:
    comments = {name: text for base in reversed(kind.__mro__) for name, text in _comments(base).items()}
    own = inspect.get_annotations(kind)
    yield f"## {title}\n"
    if kind.__doc__:
        yield f"{_cell(kind.__doc__)}\n"
    groups = []
    rows = []
    for name, field in sorted(fields_of(kind).items(), key=lambda option: option[0] not in own):
        if dataclasses.is_dataclass(field.annotation):
            groups.append((name, typing.cast(type, field.annotation)))
        else:
            cells = (f"`{prefix}{name}`", _type(name, field), _default(field), _cell(comments.get(name, "")))
            rows.append(f"| {' | '.join(cells)} |")
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    for name, group in groups:
        yield from _section(group, f"{prefix}{name}.", f"{prefix}{name}")


def _comments(kind: type) -> dict[str, str]:
    """Option that a class declares → its comments: those on its own lines, and whole-line comments directly above; for
    the options of items of algorithms also the items that read it."""
    if not (dataclasses.is_dataclass(kind) and inspect.get_annotations(kind)):
        return {}
    items = f" ({', '.join(found)})" if (found := readers(kind)) else ""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    texts = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            own = [comments[line] for line in range(first, (node.end_lineno or first) + 1) if line in comments]
            texts[node.target.id] = " ".join(own) + items
    return texts


def _default(field: FieldInfo) -> str:
    if isinstance(field.json_schema_extra, dict):  # see `asyncrl.config.section.from_env`
        return f"`{field.json_schema_extra['default']}`"
    value: Any = field.get_default(call_default_factory=True)
    return "–" if value == "" else f"`{_cell(str(value).lower() if isinstance(value, bool) else str(value))}`"


def _type(name: str, field: FieldInfo) -> str:
    if allowed := choices(field):
        return ", ".join(f"`{choice}`" for choice in allowed)
    hint = field.annotation
    kind = str(hint).replace("typing.", "") if typing.get_origin(hint) else getattr(hint, "__name__", str(hint))
    kind = _TYPES.get(kind, kind.replace("str", "text").replace("int", "integer"))
    if kind == "number" and name.endswith("_s"):
        kind = "seconds"
    return ", ".join(filter(None, (kind, limits(field))))


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(reference(), end="")
