"""Writes that survive a power cut: a file's bytes, and its name in the folder, are on disk when a call returns."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Puts a file's bytes, or a folder's names, on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_tree(folder: Path) -> None:
    """Puts everything in a folder on disk, and the folder itself."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def make_folder(path: Path) -> None:
    """Makes a folder, with its parents, unless it exists."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def rename(path: Path, target: Path) -> None:
    """Gives a file or folder its new name, replacing a file or empty folder of that name."""
    path.replace(target)
    sync(target.parent)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is found whole or not at all, or with its previous text."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    sync(partial)
    rename(partial, path)
