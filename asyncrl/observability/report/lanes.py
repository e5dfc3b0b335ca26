"""Lane charts: horizontal bars over time, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from asyncrl.observability.charts import styled


def add_bars(
    figure: go.Figure,
    name: str,
    colour: str,
    lanes: Sequence[int] | Sequence[str],
    starts: Sequence[float],
    seconds: Sequence[float],
    hover: Sequence[str],
    **bar: Any,
) -> None:
    """Adds bars of one legend entry. ``hover``: each bar's text under the pointer; ``bar``: other plotly options."""
    figure.add_bar(
        orientation="h",
        name=name,
        y=lanes,
        base=starts,
        x=seconds,
        text=hover,
        textposition="none",
        hovertemplate="%{text}",
        marker={"color": colour, "line": {"width": 0}},
        **bar,
    )


def styled_lanes(figure: go.Figure, height: int) -> go.Figure:
    """Applies the page's style; the first lane is on top."""
    figure.update_layout(barmode="overlay", dragmode="pan")
    styled(figure, height=height)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(ticksuffix=" s", title=None)
    return figure.update_layout(hovermode="closest")
