"""Overrides of a checkpoint's config.json that leave its files unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.models.config import CheckpointError

FOLDER = "model"  #: in a run's folder
#: keys that may be set even if config.json lacks them
_MAY_BE_NEW = frozenset({"rope_scaling", "rope_parameters", "rope_theta", "head_dim", "num_nextn_predict_layers"})


def overridden(path: str | Path, overrides: Mapping[str, Any], folder: Path) -> Path:
    """Write ``folder`` with links to all files of the checkpoint ``path``, and its config.json with ``overrides``. Keys
    of a nested ``text_config`` are set there. Replaces an existing folder's files. Returns the folder.

    Raises CheckpointError for a key that config.json lacks, as it is probably misspelled."""
    source = Path(path).absolute()
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{source}: config.json cannot be read ({e})") from None
    text = config.get("text_config") or {}
    for key, value in overrides.items():
        if key not in config and key not in text and key not in _MAY_BE_NEW:
            raise CheckpointError(f"model.overrides.{key}: {source}/config.json has no such key")
        (text if key in text else config)[key] = value
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        if file.name != "config.json":
            link.symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder
