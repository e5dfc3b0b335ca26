"""docs/charts.md, out of the charts that the report and the dashboard have.

python -m asyncrl.reporting.reference > docs/charts.md
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.reporting.charts import SECTIONS
from asyncrl.reporting.console import SYNC_PHASES

HEAD = """# Charts

What the report, wandb and TensorBoard show, by section, and the metrics behind each chart. Made by `python -m
asyncrl.reporting.reference`; a test holds it against the report's own list.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *_sections(), ""])


def _sections() -> Iterator[str]:
    for name, charts in SECTIONS.items():
        yield f"## {name}\n\n| chart | what it shows | metrics |\n|---|---|---|"
        for chart in charts:
            yield _row(chart.title, chart.caption, [line.metric for line in chart.lines])
        if name == "Asynchrony":
            yield _row(
                "Parameter sync", "Seconds of each phase, and of the pause.", [*SYNC_PHASES, "param_sync/paused_s"]
            )
            yield _row("Dropped groups", "By reason, as counted up to each step.", ["fully_async/dropped/…"])
        yield ""


def _row(title: str, caption: str, metrics: list[str]) -> str:
    return f"| {title} | {caption} | {', '.join(f'`{metric}`' for metric in metrics)} |"


if __name__ == "__main__":
    print(reference(), end="")
