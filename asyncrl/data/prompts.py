"""Prompt files: reads JSONL or Parquet rows as `Prompt`s; errors name file and line.

A row has a prompt (a string, used verbatim, or a list of chat messages), an answer, an optional ``id`` and
``data_source``, and any other columns, which reach the reward and the agent loop as ``Prompt.extra``::

    {"prompt": [{"role": "user", "content": "Compute 34+7"}], "answer": "41", "level": 1}

    prompts = load_prompts(config.data.train_files, config.data)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import DataConfig
from asyncrl.types.prompts import Message, Prompt

ID_COLUMN = "id"

SHARD = re.compile(r"[-_.]?\d+-of-\d+$")  #: end of the name of a data set's file that is one of several


class DataError(ValueError):
    """A prompt file is missing, empty or malformed, or a prompt is invalid; the message names file and line."""


def load_prompts(files: Sequence[str | Path], config: DataConfig) -> list[Prompt]:
    """All rows of ``files``, in order. ``prompt_id`` is the row's ``id``, or ``<file stem>:<row>``, counted from 0.

    With ``apply_chat_template`` off, messages are joined into ``Prompt.text``. Raises DataError, naming file and line
    (for Parquet the row, from 0), for a missing, empty or malformed file and for a repeated id."""
    if not files:
        raise DataError("expected at least one prompt file, found none; set data.train_files to JSONL or Parquet files")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in map(Path, files):
        before = len(prompts)
        for number, (where, row) in enumerate(read_rows(file)):
            prompt = _prompt(row, file.stem, number, where, config)
            if prompt.prompt_id in seen:
                raise DataError(
                    f"{where}: expected unique prompt ids, found {prompt.prompt_id!r} again, first at "
                    f"{seen[prompt.prompt_id]}; give each row its own {ID_COLUMN!r}, or rename the files"
                )
            seen[prompt.prompt_id] = where
            prompts.append(prompt)
        if len(prompts) == before:
            raise DataError(f"{file}: expected at least one prompt, found no rows")
    return prompts


def read_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line for error messages, row). Skips blank lines of JSONL files."""
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    if file.suffix == ".jsonl":
        yield from _jsonl_rows(file)
    elif file.suffix == ".parquet":
        yield from _parquet_rows(file)
    else:
        raise DataError(f"{file}: expected a .jsonl or a .parquet file")


def _jsonl_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as e:  # not JSON, or not UTF-8
                raise DataError(f"{where}: expected a JSON object, found invalid JSON ({e})") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: expected a JSON object, found {type(row).__name__}")
            yield where, row


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as parquet

    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    yield f"{file}: row {number}", row
                    number += 1
    except (pyarrow.ArrowInvalid, OSError) as e:
        raise DataError(f"{file}: cannot be read as Parquet after row {number} ({e})") from None


def _prompt(row: dict[str, Any], file: str, number: int, where: str, config: DataConfig) -> Prompt:
    columns = dict(row)
    for key in (config.prompt_key, config.answer_key):
        if columns.get(key) is None:
            raise DataError(f"{where}: expected a column {key!r}, found {', '.join(sorted(row)) or 'none'}")
    content, answer = columns.pop(config.prompt_key), columns.pop(config.answer_key)
    prompt_id = columns.pop(ID_COLUMN, None)
    prompt_id = f"{file}:{number}" if prompt_id is None else str(prompt_id)
    source = columns.pop(config.source_key, None)
    if not (source is None or isinstance(source, str)):
        raise DataError(f"{where}: {config.source_key!r}: expected a string, found {source!r}")
    if isinstance(answer, dict | list):
        raise DataError(f"{where}: {config.answer_key!r}: expected a string or a number, found {type(answer).__name__}")
    source = source or SHARD.sub("", file) or file
    messages: tuple[Message, ...] = ()
    text = None
    if isinstance(content, str):
        text = content
    else:
        messages = _messages(content, where, config.prompt_key)
        if not config.apply_chat_template:
            text, messages = "".join(m["content"] for m in messages), ()
    if text == "":
        raise DataError(f"{where}: expected a prompt, found an empty one")
    return Prompt(
        prompt_id,
        prompt_id,
        messages,
        str(answer),
        data_source=source,
        text=text,
        extra=columns,
    )


def _messages(content: Any, where: str, key: str) -> tuple[Message, ...]:
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}: {key!r}: expected a string or a list of chat messages, found {content!r}")
    for message in content:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise DataError(f"{where}: expected a chat message with string 'role' and 'content', found {message!r}")
    return tuple(content)
