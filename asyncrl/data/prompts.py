"""Read prompt files: JSONL or Parquet rows become `Prompt`s, and a bad row is named by file and line.

A row holds a prompt (a string, used as it is, or a list of chat messages), an answer, perhaps an ``id``, and any
further columns, which reach the reward and the agent loop as ``Prompt.extra``::

    {"prompt": [{"role": "user", "content": "Compute 34+7"}], "answer": "41", "level": 1}

    prompts = load_prompts(config.data.train_files, config.data)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import DataConfig
from asyncrl.sample import Message, Prompt

ID_COLUMN = "id"


class DataError(ValueError):
    """A prompt file is missing, empty or malformed, or a prompt does not fit; the message names the place."""


def load_prompts(files: Sequence[str | Path], config: DataConfig) -> list[Prompt]:
    """All rows of ``files``, in order. ``prompt_id`` is the row's ``id``, or ``<file stem>:<row>`` counted from 0.

    With ``apply_chat_template`` off, messages are joined into ``Prompt.text`` here, so that nobody else needs to ask.
    Raises DataError naming file and line (of a Parquet file: row, from 0) for a missing, empty or malformed file and
    for an id that was there before."""
    if not files:
        raise DataError("no prompt files are named; set data.train_files to JSONL or Parquet files")
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for file in map(Path, files):
        before = len(prompts)
        for number, (where, row) in enumerate(_rows(file)):
            prompt = _prompt(row, f"{file.stem}:{number}", where, config)
            if prompt.prompt_id in seen:
                raise DataError(
                    f"{where}: prompt id {prompt.prompt_id!r} was given before, at {seen[prompt.prompt_id]}; give each "
                    f"row its own {ID_COLUMN!r}, or files of different names"
                )
            seen[prompt.prompt_id] = where
            prompts.append(prompt)
        if len(prompts) == before:
            raise DataError(f"{file}: no rows; expected at least one prompt")
    return prompts


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place for error messages, row). Blank lines of a JSONL file are skipped."""
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
                raise DataError(f"{where}: not a JSON value ({e})") from None
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
        raise DataError(f"{file}: not a readable Parquet file after row {number} ({e})") from None


def _prompt(row: dict[str, Any], default_id: str, where: str, config: DataConfig) -> Prompt:
    columns = dict(row)
    for key in (config.prompt_key, config.answer_key):
        if columns.get(key) is None:
            raise DataError(f"{where}: no column {key!r}; found {', '.join(sorted(row)) or 'none'}")
    content, answer = columns.pop(config.prompt_key), columns.pop(config.answer_key)
    prompt_id = columns.pop(ID_COLUMN, None)
    prompt_id = default_id if prompt_id is None else str(prompt_id)
    if isinstance(answer, dict | list):
        raise DataError(f"{where}: {config.answer_key!r} must be a string or a number, found {type(answer).__name__}")
    messages: tuple[Message, ...] = ()
    text = None
    if isinstance(content, str):
        text = content
    else:
        messages = _messages(content, where, config.prompt_key)
        if not config.apply_chat_template:
            text, messages = "".join(m["content"] for m in messages), ()
    if text == "":
        raise DataError(f"{where}: the prompt is empty")
    return Prompt(prompt_id, prompt_id, messages, str(answer), text=text, extra=columns)


def _messages(content: Any, where: str, key: str) -> tuple[Message, ...]:
    if not isinstance(content, list) or not content:
        raise DataError(f"{where}: {key!r} must be a string or a list of chat messages, found {content!r}")
    for message in content:
        if not (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        ):
            raise DataError(f"{where}: a chat message has a 'role' and a 'content', both strings; found {message!r}")
    return tuple(content)
