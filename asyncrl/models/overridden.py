"""Overrides of a checkpoint's config.json that leave its files unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.models.config import CheckpointError, read_config

FOLDER = "model"  #: in a run's folder
_ROPE = frozenset({"rope_scaling", "rope_parameters", "rope_theta"})
#: keys that may be set even if config.json lacks them
_MAY_BE_NEW = _ROPE | {"head_dim", "num_nextn_predict_layers"}


def overridden(path: str | Path, overrides: Mapping[str, Any], folder: Path) -> Path:
    """Write ``folder`` with links to all files of the checkpoint ``path``, and its config.json with ``overrides``. Keys
    of a nested ``text_config``, and new ones, are set there. Replaces an existing folder's files. Returns the folder.

    Raises CheckpointError for a key that config.json lacks, as it is probably misspelled."""
    source = Path(path).absolute()
    config = read_config(source)
    text = config.get("text_config") or config
    for key, value in overrides.items():
        if key not in config and key not in text and key not in _MAY_BE_NEW:
            raise CheckpointError(f"model.overrides.{key}: {source}/config.json has no such key")
        (config if key in config and key not in text else text)[key] = value
    if text.get("rope_parameters") and overrides.keys() & _ROPE:
        _merge_rope(text, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    files = () if folder.samefile(source) else source.iterdir()  # a link would replace the file itself
    for file in files:
        link = folder / file.name
        link.unlink(missing_ok=True)
        if file.name != "config.json":
            link.symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _merge_rope(text: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Merge rope_theta and rope_scaling, written by transformers 4, into rope_parameters, written by transformers 5.
    If an override is neither of them, the one that counts is kept, see `asyncrl.models.config.rope_fields`.

    Raises CheckpointError if rope_parameters are those of several layer types: an override could mean any of them."""
    rope, theta, scaled = text["rope_parameters"], text.pop("rope_theta", None), text.pop("rope_scaling", None)
    scaling = overrides.get("rope_scaling") or {"rope_type": "default"}
    if scaled and overrides.keys().isdisjoint(("rope_parameters", "rope_scaling")):
        rope = scaled
    for key, value in (("rope_parameters", rope), ("rope_scaling", scaling)):
        if not isinstance(value, dict):
            raise CheckpointError(f"model.overrides.{key} is {value!r}, expected a mapping")
    if any(isinstance(value, dict) for value in rope.values()):
        for key in overrides.keys() & {"rope_scaling", "rope_theta"}:
            raise CheckpointError(
                f"model.overrides.{key}: rope_parameters differ by layer type ({', '.join(rope)}); override those"
            )
        return
    if "type" in scaling:  # the older name of rope_type
        scaling = {"rope_type": scaling["type"], **scaling}
    merged = dict(rope)
    if "rope_scaling" in overrides:  # it replaces all of the earlier one
        merged = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope} | scaling
    if "rope_theta" in overrides:
        merged["rope_theta"] = overrides["rope_theta"]
    elif theta is not None:
        merged.setdefault("rope_theta", theta)
    text["rope_parameters"] = merged
