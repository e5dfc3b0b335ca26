"""The run folder's ``trajectories/``: samples as Parquet, files per train step and of failures, and how to select."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

FOLDER = "trajectories"

_PART = pa.struct(
    [
        ("sequence", pa.int32()),
        ("start", pa.int32()),
        ("tokens", pa.int32()),
        ("kind", pa.string()),
        ("text", pa.string()),
        ("version", pa.string()),
        ("mixed_kv", pa.bool_()),
        ("replica", pa.string()),
        ("reward", pa.float64()),
        ("logprob", pa.float64()),
    ]
)
SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("uid", pa.string()),
        ("prompt_id", pa.string()),
        ("data_source", pa.string()),
        ("epoch", pa.int64()),
        ("sample", pa.int32()),
        ("prompt", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("prompt_tokens", pa.int64()),
        ("response_tokens", pa.int64()),
        ("trained_tokens", pa.int64()),
        ("finish", pa.string()),
        ("failure", pa.string()),
        ("error", pa.string()),
        ("versions", pa.list_(pa.string())),
        ("parts", pa.list_(_PART)),
    ]
)


def write_step(run_dir: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the samples of a step, in place of those of an earlier run of the same step."""
    _write(run_dir / FOLDER / f"step-{step:08d}.parquet", rows)


def step_files(run_dir: Path) -> list[Path]:
    """Those of steps, in their order."""
    return sorted((run_dir / FOLDER).glob("step-*.parquet"))


def failed_files(run_dir: Path) -> list[Path]:
    """Those of failed samples, in the order of writing."""
    return sorted((run_dir / FOLDER).glob("failed-*.parquet"))


def write_failed(run_dir: Path, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes failed samples to the file of this number."""
    _write(run_dir / FOLDER / f"failed-{number:08d}.parquet", rows)


def row_count(file: Path) -> int:
    """0 for a damaged file."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowInvalid, OSError):
        return 0


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(pa.Table.from_pylist([_clean(row) for row in rows], SCHEMA), partial)
    os.replace(partial, path)


def _clean(value: Any) -> Any:
    """``value`` with text that UTF-8 can hold: a model may sample half of a surrogate pair."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {name: _clean(item) for name, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Filter:
    """What to select; None selects all. Ranges include both ends. ``failure``: a reason, or "any"."""

    reward: tuple[float, float] | None = None
    tokens: tuple[float, float] | None = None
    step: tuple[float, float] | None = None
    source: str | None = None
    finish: str | None = None
    failure: str | None = None
    uid: str | None = None

    def expression(self) -> ds.Expression:
        field = ds.field
        parts = [
            (field(column) >= of[0]) & (field(column) <= of[1])
            for column, of in (("reward", self.reward), ("response_tokens", self.tokens), ("step", self.step))
            if of is not None
        ]
        equal = {"data_source": self.source, "finish": self.finish, "uid": self.uid}
        parts += [field(column) == value for column, value in equal.items() if value is not None]
        if self.failure is not None:
            parts.append(field("failure").is_valid() if self.failure == "any" else field("failure") == self.failure)
        chosen = ds.scalar(True)
        for part in parts:
            chosen = chosen & part
        return chosen


class Trajectories(NamedTuple):
    """Failed samples, then the others in order of their steps. ``damaged``: what is wrong with files that are
    missing here, one line each. ``selected``: how many there are with those that were not asked for."""

    table: pa.Table
    damaged: list[str]
    selected: int

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def rows(self, which: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """All, or those of these numbers."""
        table = self.table if which is None else self.table.take(pa.array(which, pa.int64()))
        return [row | {"metrics": dict(row["metrics"] or ())} for row in table.to_pylist()]


def read(run_dir: Path, where: Filter | None = None, last: int | None = None) -> Trajectories:
    return read_files([*failed_files(run_dir), *step_files(run_dir)], where, last)


def read_files(files: Sequence[Path], where: Filter | None = None, last: int | None = None) -> Trajectories:
    """The selected samples, or only the ``last`` ones: of the others no text is read."""
    chosen = where.expression() if where is not None else None
    tables, damaged, selected, left = [SCHEMA.empty_table()], [], 0, last
    for file in reversed(files):
        try:
            found = ds.dataset(file, schema=SCHEMA, format="parquet")
            if left == 0:
                selected += found.count_rows(filter=chosen)
                continue
            table = found.to_table(filter=chosen)
        except (pa.ArrowInvalid, OSError) as e:
            damaged.append(f"{file} cannot be read and is left out: {e}")
            continue
        selected += table.num_rows
        if left is not None:
            table = table.slice(max(0, table.num_rows - left))
            left -= table.num_rows
        tables.append(table)
    return Trajectories(pa.concat_tables(reversed(tables)), damaged[::-1], selected)
