"""The report's page: its HTML skeleton and style, one file that asks nothing of the network.

Everything that comes from outside (names, prompts, responses, configuration) passes `html.escape` here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b2128; --soft: #5d6875; --line: #e3e7ec;
  --blue: #2f66cf; --green: #187a50; --red: #b8323d; --amber: #96620a; --tint: #eef2f7; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e8ebef; --soft: #9aa4b1;
  --line: #2c323a; --blue: #82adff; --green: #5fd0a0; --red: #ff8b93; --amber: #e8b64c; --tint: #262c34; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; letter-spacing: -.02em; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; letter-spacing: -.01em; }
h3 { font-size: 15px; margin: 0; }
.head { display: flex; flex-wrap: wrap; gap: 6px 14px; align-items: center; }
.sub { color: var(--soft); margin: 6px 0 0; }
.badge { font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 99px; background: var(--tint);
  color: var(--soft); }
.badge.ok { color: var(--green); } .badge.bad { color: var(--red); } .badge.live { color: var(--blue); }
.badge.cut { color: var(--amber); }
.banner { border-left: 4px solid var(--red); background: var(--card); border-radius: 6px; padding: 10px 14px;
  margin: 18px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.banner.cut { border-color: var(--amber); }
.figures { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px; margin: 22px 0 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.figures .card { padding: 12px 14px; }
.figures b { display: block; font-size: 22px; line-height: 1.3; font-weight: 650; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.figures span, .note { color: var(--soft); font-size: 13px; }
.note { margin: 2px 0 6px; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.grid .card { display: flex; flex-direction: column; } .grid .card > div { margin-top: auto; }
.wide, .grid > .card:last-child:nth-child(odd) { grid-column: 1 / -1; }
.samples { display: grid; gap: 14px; }
.chips { display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 10px; font-size: 12.5px; }
.chips span { background: var(--tint); border-radius: 6px; padding: 1px 8px; color: var(--soft);
  font-variant-numeric: tabular-nums; }
.chips .good { color: var(--green); font-weight: 600; } .chips .poor { color: var(--red); font-weight: 600; }
.text { display: grid; grid-template-columns: minmax(0, 2fr) minmax(0, 3fr); gap: 14px; }
.text h4 { margin: 0 0 2px; font-size: 12px; font-weight: 600; color: var(--soft); }
pre { margin: 0; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 320px; overflow-y: auto; }
details.card { display: block !important; }
summary { cursor: pointer; font-weight: 600; } details pre { max-height: none; margin-top: 10px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
td { padding: 4px 12px 4px 0; border-top: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; padding-right: 0; }
.empty { color: var(--soft); padding: 28px 0; text-align: center; }
@media (max-width: 760px) { main { padding: 20px 12px 40px; } .grid, .text { grid-template-columns: minmax(0, 1fr); }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; } .figures b { font-size: 18px; }
  h1 { font-size: 23px; } .card { padding: 12px; } }
"""

# A finger on a chart should scroll the page; with a mouse, dragging selects what to look at.
SCRIPT = """
if (matchMedia("(pointer: fine)").matches)
  document.querySelectorAll(".js-plotly-plot").forEach(plot => {
    if (plot.layout.dragmode === false) Plotly.relayout(plot, {dragmode: "zoom"});
  });
"""


def page(title: str, body: Iterable[str]) -> str:
    """A whole HTML document. ``body``: HTML made by the functions below."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>{''.join(body)}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def header(title: str, badge: tuple[str, str], subtitle: str, banner: tuple[str, str] | None) -> str:
    """``badge``: (text, ok | cut | bad | live). ``banner``: (text, cut | bad)."""
    text, kind = badge
    return (
        f'<div class="head"><h1>{escape(title)}</h1><span class="badge {kind}">{escape(text)}</span></div>'
        f'<p class="sub">{escape(subtitle)}</p>'
        + (f'<p class="banner {banner[1]}">{escape(banner[0])}</p>' if banner else "")
    )


def key_figures(figures: Mapping[str, str]) -> str:
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>'
        for label, value in figures.items()
    )
    return f'<div class="figures">{cards}</div>' if cards else ""


def section(title: str, content: str, grid: bool = True) -> str:
    """Nothing at all for a section without content."""
    if not content:
        return ""
    return f'<h2>{escape(title)}</h2><div class="{"grid" if grid else "samples"}">{content}</div>'


def chart_card(title: str, caption: str, figure: go.Figure | None, wide: bool = False) -> str:
    if figure is None:
        return ""
    plot = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config={"responsive": True, "displayModeBar": False},
    )
    return (
        f'<div class="card{" wide" if wide else ""}"><h3>{escape(title)}</h3>'
        f'<p class="note">{escape(caption)}</p>{plot}</div>'
    )


def trajectory_card(row: Mapping[str, Any]) -> str:
    """One row of trajectories.jsonl; what it lacks is left out."""
    chips: list[tuple[str, str]] = []  # (text, class)
    if "step" in row:
        chips.append((f"step {row['step']}", ""))
    if row.get("reward") is not None:
        chips.append((f"reward {row['reward']:.3g}", "good" if row["reward"] > 0 else "poor"))
    if "finish" in row:
        chips.append((str(row["finish"]), ""))
    if "response_tokens" in row:
        chips.append((f"{row.get('prompt_tokens', '?')} + {row['response_tokens']} tokens", ""))
    for i, span in enumerate(row.get("versions") or []):
        place = f" from token {span['start']}" if i else ""
        chips.append((f"version {span['version']}{place}{', mixed KV' if span.get('mixed_kv') else ''}", ""))
    if "prompt_id" in row:
        chips.append((str(row["prompt_id"]), ""))
    shown = "".join(f'<span class="{kind}">{escape(text)}</span>' for text, kind in chips)
    return (
        f'<div class="card"><div class="chips">{shown}</div><div class="text">'
        f"<div><h4>Prompt</h4><pre>{escape(str(row.get('prompt', '')))}</pre></div>"
        f"<div><h4>Response</h4><pre>{escape(str(row.get('response', '')))}</pre></div></div></div>"
    )


def folded(title: str, text: str) -> str:
    return f'<details class="card wide"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'


def table(rows: Mapping[str, str]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f'<div class="card wide"><table>{cells}</table></div>' if cells else ""


def empty(text: str) -> str:
    return f'<div class="card empty">{escape(text)}</div>'
