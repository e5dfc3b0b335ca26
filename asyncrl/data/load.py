"""All prompts of a run: those of its files, or those that its data source generates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import DataError, load_prompts
from asyncrl.data.sources.base import Row, SourceError, generated
from asyncrl.types.prompts import Message, Prompt


class RunPrompts(NamedTuple):
    """``held_out`` is empty if the run does not validate."""

    train: list[Prompt]
    held_out: list[Prompt]


def load_run_prompts(config: DataConfig) -> RunPrompts:
    """The same prompts in the same order in each process. Raises DataError; its message begins with the option."""
    train, held_out = _generated(config) if config.source else (_read("train_files", config), [])
    if config.validation_files:
        held_out = _read("validation_files", config)
    return RunPrompts(train, held_out)


def _read(option: str, config: DataConfig) -> list[Prompt]:
    try:
        return load_prompts(getattr(config, option), config)
    except DataError as e:
        raise DataError(str(e) if str(e).startswith("data.") else f"data.{option}: {e}") from None


def _generated(config: DataConfig) -> tuple[list[Prompt], list[Prompt]]:
    try:
        train, held_out = generated(config.source, config.source_args)
    except SourceError as e:
        raise DataError(str(e)) from None
    return _prompts(train, config), _prompts(held_out, config)


def _prompts(rows: Sequence[Row], config: DataConfig) -> list[Prompt]:
    return [_prompt(row, config.apply_chat_template) for row in rows]


def _prompt(row: Row, chat: bool) -> Prompt:
    messages: tuple[Message, ...] = ({"role": "user", "content": row.question},) if chat else ()
    text = None if chat else row.question
    extra = dict(row.columns)
    return Prompt(row.id, row.id, messages, row.answer, data_source=row.data_source, text=text, extra=extra)
