"""The folder of a run: its config at the start, its summary and report at the end, and where things are in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.config.load import ConfigError, to_yaml
from asyncrl.config.schema import Config
from asyncrl.supervision import Ending
from asyncrl.trainer.loop import PARTIAL


class RunFolder:
    """``path`` holds config.yaml, metrics.jsonl, spans.jsonl, trajectories.jsonl, checkpoints/, wandb/, summary.json
    and report.html."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Make ``config.run_dir``, or beside it ``…-2``, ``…-3`` if a run is there already: nothing is overwritten.

        Raises ConfigError if the folder cannot be made or written."""
        wanted, number = Path(config.run_dir), 1
        path = wanted
        try:
            while path.exists() and any(path.iterdir()):
                number += 1
                path = wanted.with_name(f"{wanted.name}-{number}")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(to_yaml(config))
        except OSError as e:
            raise ConfigError([f"run_dir: {path} cannot be written ({e.strerror})"]) from None
        return cls(path.resolve())

    def finish(self, ending: Ending, figures: Mapping[str, Any], report: bool) -> None:
        """Write summary.json, then the report, and say where everything is."""
        how = {"status": ending.status, "reason": ending.stopped, "failed": ending.failure}
        (self.path / "summary.json").write_text(json.dumps({**figures, **how}, indent=2) + "\n")
        if report:
            from asyncrl.reporting.report import write_report

            print(f"report:      {write_report(self.path)}")
        whole = [p for p in (self.path / "checkpoints").glob("*") if p.suffix != PARTIAL]
        if checkpoints := sorted(whole, key=lambda p: p.stat().st_mtime):
            print(f"checkpoint:  {checkpoints[-1]}")
        print(f"run folder:  {self.path}", flush=True)
