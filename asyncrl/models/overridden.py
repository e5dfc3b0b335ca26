"""A checkpoint whose config.json says something else, without a change to any of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.models.config import CheckpointError

#: may be set where config.json does not name them
_MAY_BE_NEW = frozenset({"rope_scaling", "rope_parameters", "rope_theta", "head_dim", "num_nextn_predict_layers"})


def overridden(path: str | Path, overrides: Mapping[str, Any], folder: Path) -> Path:
    """Make ``folder``: links to all files of the checkpoint ``path``, and its config.json with ``overrides``. Keys that
    a nested ``text_config`` has are set there. Made anew if it is there. Returns it.

    Raises CheckpointError for a key that config.json does not have: most likely it is misspelt."""
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
