"""Rendering of the report: a self-contained HTML page from ``templates/``, with every value escaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)


class Label(NamedTuple):
    """Coloured text. ``kind``: its class in style.css, or empty."""

    text: str
    kind: str


class Chart(NamedTuple):
    title: str
    caption: str
    plot: Markup
    wide: bool


class Section(NamedTuple):
    title: str
    charts: list[Chart]


class Part(NamedTuple):
    """Tokens of a trajectory, under a ``caption``. ``kind``: its class in style.css. ``role``: whose message they are,
    or empty; ``text`` is a tool call if ``call``."""

    caption: str
    kind: str
    text: str
    role: str = ""
    call: bool = False


class Trajectory(NamedTuple):
    chips: list[Label]
    error: str
    prompt: str
    parts: list[Part]


def charts(*drawn: tuple[str, str, go.Figure | None], wide: bool = False) -> list[Chart]:
    """(title, caption, figure) of each chart; those without a figure are left out."""
    return [Chart(title, caption, _plot(figure), wide) for title, caption, figure in drawn if figure is not None]


def render(**values: Any) -> str:
    """The page. ``values``: the variables of templates/report.html."""
    return _TEMPLATES.get_template("report.html").render(plotly_js=Markup(get_plotlyjs()), **values)


def _plot(figure: go.Figure) -> Markup:
    html = figure.to_html(full_html=False, include_plotlyjs=False, config={"responsive": True, "displayModeBar": False})
    return Markup(html)
