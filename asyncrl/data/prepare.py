"""Makes prompt files of published data sets: ``asyncrl data prepare``.

Every split of the data set becomes a JSONL file that `asyncrl.data.prompts` reads. A problem is kept once, however
often it is published. Files are written atomically: there is a whole one or none, also after a power cut.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from asyncrl.data.prompts import SHARD, DataError, read_rows
from asyncrl.data.published import PUBLISHED, Schema, Unusable, field_of
from asyncrl.disk.files import rename, sync

DUPLICATE, CONTRADICTION = "repeated", "repeated with another answer"
BROKEN = "broken Unicode"  # such as half of a surrogate pair, for which JSON has an escape and UTF-8 nothing

_SUFFIXES = (".jsonl", ".parquet")
_HUB_ID = re.compile(r"([\w.-]+/[\w.-]+)((?:/[\w.-]+)*)")


@dataclass
class Prepared:
    """A file that was written. ``dropped``: rows by reason."""

    file: Path
    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        return f"{self.file}: {self.read} rows read, {self.kept} kept" + (f"; dropped: {reasons}" if reasons else "")


def prepare(
    name: str, source: str, out: Path, split: str | None = None, instruction: str | None = None
) -> list[Prepared]:
    """Writes ``out/SPLIT.jsonl`` for each split of ``source``, or for ``split``.

    ``source``: a file, a folder, or ``owner/name`` or ``owner/name/folder`` of a data set on the Hugging Face hub.
    ``instruction``: sentence after each problem, in place of the schema's own. Raises DataError."""
    splits = _splits(_local(source))
    if split is not None and split not in splits:
        raise DataError(f"--split: expected one of {', '.join(sorted(splits))}; found {split}")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(f"--out: expected a folder that can be written, found {out} ({e.strerror})") from None
    chosen = sorted(splits) if split is None else [split]
    return [_written(out / f"{part}.jsonl", name, part, splits[part], instruction) for part in chosen]


def _local(source: str) -> Path:
    """``source`` on this machine; downloads a data set of the hub."""
    path = Path(source)
    if path.exists():
        return path
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None or source.endswith(_SUFFIXES):
        raise DataError(f"--from: expected a file, a folder, or owner/name of a data set on the hub; found {source!r}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise DataError(
            f"--from: {source} is no file here, and data sets of the hub need the package huggingface_hub; "
            "`pip install huggingface_hub` adds it"
        ) from None
    folder = hub_id[2].removeprefix("/")
    patterns = [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in _SUFFIXES]
    try:
        return Path(snapshot_download(hub_id[1], repo_type="dataset", allow_patterns=patterns), folder)
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise DataError(f"--from: {source} is no file here, and the hub says: {' '.join(str(e).split())}") from None


def _splits(source: Path) -> dict[str, list[Path]]:
    """Files of each split."""
    files = [source] if source.is_file() else [p for p in sorted(source.rglob("*")) if p.suffix in _SUFFIXES]
    splits: dict[str, list[Path]] = {}
    for file in files:
        name = SHARD.sub("", file.stem)
        splits.setdefault(file.parent.name if name.isdecimal() or not name else name, []).append(file)
    if not splits:
        raise DataError(f"--from: expected JSONL or Parquet files in {source}, found none")
    return splits


def _written(file: Path, name: str, split: str, sources: Sequence[Path], instruction: str | None) -> Prepared:
    done = Prepared(file)
    staged = file.with_name(f"{file.name}.partial")
    try:
        with staged.open("wb") as lines:
            for row in _prompts(done, name, split, sources, instruction):
                lines.write(row + b"\n")
        if not done.kept:
            raise DataError(f"{done}; expected a prompt")
        sync(staged)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    rename(staged, file)
    return done


def _prompts(
    done: Prepared, name: str, split: str, sources: Sequence[Path], instruction: str | None
) -> Iterator[bytes]:
    """Lines of a prompt file, each problem and each id once."""
    seen, ids = dict[bytes, str](), set[str]()
    for where, row, schema in _rows(name, sources):
        own = f"{name}/{split}/{done.read}"
        done.read += 1
        if schema.instructed and instruction is not None:
            raise DataError(f"--instruction: the prompts of {name} have one; expected none, found {instruction!r}")
        try:
            row = {"id": own, "data_source": name} | schema.convert(row, instruction)
        except Unusable as e:
            done.dropped[str(e)] += 1
            continue
        problem = blake2b(json.dumps(row["prompt"]).encode(), digest_size=16).digest()
        if problem in seen:
            done.dropped[DUPLICATE if seen[problem] == row["answer"] else CONTRADICTION] += 1
            continue
        if row["id"] in ids:  # of another part of the data set
            row["id"] = own
        try:
            line = json.dumps(row, ensure_ascii=False).encode()
        except TypeError as e:
            raise DataError(f"{where}: {e}") from None
        except UnicodeEncodeError:
            done.dropped[BROKEN] += 1
            continue
        seen[problem] = row["answer"]
        ids.add(row["id"])
        done.kept += 1
        yield line


def _rows(name: str, files: Sequence[Path]) -> Iterator[tuple[str, Mapping[str, Any], Schema]]:
    """File and line, row and schema. Raises DataError for a row that no schema of the data set fits."""
    for file in files:
        schema: Schema | None = None
        for where, row in read_rows(file):
            if schema is None or not _fits(schema, row):
                schema = next((s for s in PUBLISHED[name] if _fits(s, row)), None)
            if schema is None:
                expected = " or ".join(" and ".join(s.columns) for s in PUBLISHED[name])
                raise DataError(f"{where}: {name} has the columns {expected}; found {', '.join(sorted(row)) or 'none'}")
            yield where, row, schema


def _fits(schema: Schema, row: Mapping[str, Any]) -> bool:
    return all(field_of(row, column) is not None for column in schema.columns)
