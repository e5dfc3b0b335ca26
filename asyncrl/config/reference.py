"""The configuration reference, docs/configuration.md, out of the tree of options and its comments.

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

from asyncrl.config.checks import CHOICES
from asyncrl.config.schema import Config

HEAD = """# Configuration

Every option, with its type, default and meaning. Made by `python -m asyncrl.config.reference` from
[asyncrl/config/schema.py](../asyncrl/config/schema.py); a test holds it against that.

A config file is YAML of these keys; it may begin with `extends: other.yaml` and then says only what differs. Dotted
overrides on the command line win over it, `${oc.env:NAME,default}` reads the environment, and `--print-config` prints
what comes of all. `???` has no default and must be given; `${NAME:-x}` is the environment variable NAME, or x.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *_section(Config, "", "Run"), ""])


def _section(kind: type, prefix: str, title: str) -> Iterator[str]:
    hints, notes = typing.get_type_hints(kind), _notes(kind)
    yield f"## {title}\n"
    if (about := inspect.getdoc(kind)) and not about.startswith(f"{kind.__name__}("):
        yield f"{_cell(about)}\n"
    groups = []
    rows = []
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            groups.append((field.name, typing.cast(type, hints[field.name])))
            continue
        key = prefix + field.name
        meaning = notes.get(field.name, "")
        choices = CHOICES.get(key, ())
        if any(choice not in meaning for choice in choices):
            meaning = f"{' | '.join(choices)}{'; ' if meaning else ''}{meaning}"
        rows.append(f"| `{key}` | {_type(hints[field.name])} | {_default(field)} | {_cell(meaning)} |")
    if rows:
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        yield "\n".join(rows) + "\n"
    for name, group in groups:
        yield from _section(group, f"{prefix}{name}.", f"{prefix}{name}")


def _notes(kind: type) -> dict[str, str]:
    """Option → its comment: on its own line or lines, and those of comments alone above it."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    notes = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while lines[first - 2].lstrip().startswith("#"):
                first -= 1
            told = [comments[line] for line in range(first, (node.end_lineno or first) + 1) if line in comments]
            notes[node.target.id] = " ".join(told)
    return notes


def _default(field: dataclasses.Field[Any]) -> str:
    if told := field.metadata.get("default"):
        return f"`{told}`"
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    return "–" if value == "" else f"`{_cell(str(value).lower() if isinstance(value, bool) else str(value))}`"


def _type(hint: Any) -> str:
    name = str(hint).replace("typing.", "") if typing.get_origin(hint) else hint.__name__
    return {"str": "text", "int": "integer", "float": "number", "bool": "true, false"}.get(
        name, name.replace("str", "text")
    )


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


if __name__ == "__main__":
    print(reference(), end="")
