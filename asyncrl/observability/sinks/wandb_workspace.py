"""Creates a wandb dashboard with the sections and charts of the report.

    python -m asyncrl.observability.sinks.wandb_workspace [--entity TEAM] [--project asyncrl] [--name asyncrl]
    python -m asyncrl.observability.sinks.wandb_workspace --print

Saving it needs a login and the package wandb-workspaces; ``--print`` needs neither and prints the definition as JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import wandb

from asyncrl.config.schema import WandbConfig
from asyncrl.observability.charts import FAMILIES, SECTIONS
from asyncrl.observability.sinks.console import SYNC_PHASES


def definition() -> list[dict[str, Any]]:
    """Sections with their panels: ``{"name", "panels": [{"title", "metrics" or "regex"}]}``."""
    sections = [
        {
            "name": name,
            "panels": [
                *({"title": chart.title, "metrics": [line.metric for line in chart.lines]} for chart in charts),
                *(
                    {"title": family.title, "regex": f"^{re.escape(family.prefix)}.*{re.escape(family.suffix)}$"}
                    for family in FAMILIES.get(name, ())
                ),
            ],
        }
        for name, charts in SECTIONS.items()
    ]
    pipes = [
        {"title": "Sync phases, seconds", "metrics": [*SYNC_PHASES, "param_sync/paused_s"]},
        {"title": "Dropped groups", "regex": "^fully_async/dropped/"},
    ]
    return [*sections, {"name": "Pipes", "panels": pipes}, {"name": "Trajectories", "panels": []}]


def save(entity: str, project: str, name: str) -> str:
    """Saves the workspace and returns its URL. Raises ImportError without the package, and wandb's errors without a
    login."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = [
        workspaces.Section(
            name=section["name"],
            is_open=section["name"] in ("Learning", "Asynchrony", "Throughput"),
            panels=[
                reports.LinePlot(title=p["title"], x="step", y=p.get("metrics", []), metric_regex=p.get("regex"))
                for p in section["panels"]
            ]
            or [reports.WeavePanelSummaryTable(table_name="trajectories")],
        )
        for section in definition()
    ]
    workspace = workspaces.Workspace(name=name, entity=entity, project=project, sections=sections)
    workspace.save()
    return workspace.url


def main(argv: Sequence[str] | None = None) -> int:
    defaults = WandbConfig()
    parser = argparse.ArgumentParser(
        prog="asyncrl.observability.sinks.wandb_workspace", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--entity", default=defaults.entity)
    parser.add_argument("--project", default=defaults.project)
    parser.add_argument("--name", default="asyncrl")
    parser.add_argument("--print", action="store_true", help="print the definition as JSON and save nothing")
    args = parser.parse_args(argv)
    if args.print:
        print(json.dumps(definition(), indent=2))
        return 0
    try:
        print(save(args.entity, args.project, args.name))
    except wandb.Error as e:
        print(f"wandb: {e}; a login is needed: set WANDB_API_KEY or run `wandb login`", file=sys.stderr)
        return 1
    except ImportError:
        print("the package wandb-workspaces is not installed; `pip install wandb-workspaces` adds it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
