"""Charts of the report and of the wandb dashboard: their metrics, captions and figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import plotly.graph_objects as go

from asyncrl.observability.series import Series
from asyncrl.observability.sinks.console import SYNC_PHASES
from asyncrl.sample_queue.messages import DROPPED_METRICS

BLUE, ORANGE, GREEN, RED, VIOLET, GREY = "#3b76e1", "#e5832b", "#22a06b", "#d64550", "#8a63d2", "#8c96a5"
PALETTE = (BLUE, ORANGE, GREEN, VIOLET, "#1aa3b8", "#c2529b", "#a08a2c", "#6b7ae8", "#9c6b4e", RED)
MAX_POINTS = 2_000  # per line; of longer ones the extremes are drawn
MAX_BARS = 200  # of more, evenly spaced ones are drawn


@dataclass(frozen=True)
class Line:
    metric: str
    label: str
    colour: str
    style: str = "line"  # line | marker (line and points) | dash (a limit) | faint (extremes)


@dataclass(frozen=True)
class Chart:
    """``percent``: the values are fractions, drawn as percentages from 0. ``log``: logarithmic axis."""

    title: str
    caption: str
    lines: tuple[Line, ...]
    percent: bool = False
    log: bool = False


SECTIONS: dict[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart(
            "Reward",
            "Reward of the trained samples: mean, standard deviation, and the best and worst of each step.",
            (
                Line("critic/rewards/max", "max", GREEN, "faint"),
                Line("critic/rewards/min", "min", RED, "faint"),
                Line("critic/rewards/std", "std", GREY, "dash"),
                Line("critic/rewards/mean", "mean", BLUE),
            ),
        ),
        Chart(
            "Reward quantiles",
            "Rewards of the trained samples: a tenth is below p10, a tenth above p90.",
            (
                Line("critic/rewards/p90", "p90", GREEN),
                Line("critic/rewards/p50", "median", BLUE),
                Line("critic/rewards/p10", "p10", RED),
            ),
        ),
        Chart(
            "Accuracy",
            "Held out: validation prompts, never trained on. Rollout: training prompts.",
            (
                Line("rollout/valid_format", "rollout, valid format", GREY, "faint"),
                Line("rollout/accuracy", "rollout", ORANGE),
                Line("validation/valid_format", "held out, valid format", GREY, "dash"),
                Line("validation/accuracy", "held out", BLUE, "marker"),
            ),
            percent=True,
        ),
        Chart(
            "Response length",
            "Tokens per response: mean, minimum and maximum.",
            (
                Line("response_length/max", "max", GREY, "faint"),
                Line("response_length/min", "min", GREY, "faint"),
                Line("response_length/mean", "mean", BLUE),
            ),
        ),
        Chart(
            "Response length quantiles",
            "Tokens per response; the tail decides how long a step waits and how many responses are truncated.",
            (
                Line("response_length/p99", "p99", RED),
                Line("response_length/p90", "p90", ORANGE),
                Line("response_length/p50", "median", BLUE),
                Line("response_length/p10", "p10", GREEN),
            ),
        ),
        Chart(
            "Groups and samples without learning signal",
            "Groups whose samples all have the same reward, and samples truncated at the length limit.",
            (
                Line("rollout/zero_variance", "zero variance", BLUE),
                Line("response_length/clip_ratio", "truncated", ORANGE),
            ),
            percent=True,
        ),
    ),
    "Asynchrony": (
        Chart(
            "Staleness",
            "Policy versions between sampling and training, by the oldest trained token; never above the bound.",
            (
                Line("fully_async/staleness/bound", "bound", RED, "dash"),
                Line("fully_async/staleness/max", "max", ORANGE),
                Line("fully_async/staleness/mean", "mean", BLUE),
            ),
        ),
        Chart(
            "Groups in progress",
            "Groups being generated, finished groups in the queue, and groups being trained on.",
            (
                Line("fully_async/in_flight", "in flight", ORANGE),
                Line("fully_async/queue/depth", "queued", BLUE),
                Line("fully_async/count/leased", "leased to a train step", GREEN),
            ),
        ),
        Chart(
            "Idle time",
            "Fraction of the time in which each pool was idle, in which both were busy, and in which finished samples "
            "waited for their rewards.",
            (
                Line("fully_async/trainer/idle_ratio", "trainer idle", BLUE),
                Line("fully_async/rollouter/idle_ratio", "rollouter idle", ORANGE),
                Line("fully_async/overlap", "both busy", GREEN),
                Line("fully_async/rewarding_ratio", "waiting for rewards", RED, "dash"),
            ),
            percent=True,
        ),
        Chart(
            "Partial samples",
            "Trained samples that a parameter sync interrupted and that continued under newer weights.",
            (Line("fully_async/partial/ratio", "fraction of samples", BLUE),),
            percent=True,
        ),
        Chart(
            "Versions within a sample",
            "Newest minus oldest policy version among the tokens of a sample; the maximum of each step.",
            (Line("fully_async/partial/max_span", "largest span", BLUE),),
        ),
    ),
    "Throughput": (
        Chart(
            "Tokens per second",
            "Throughput of each pool, waits included.",
            (
                Line("perf/trainer_tokens_per_s", "trainer", BLUE),
                Line("perf/rollout_tokens_per_s", "rollouter", ORANGE),
            ),
        ),
        Chart(
            "Tokens per second while busy",
            "Throughput of each pool without its idle time and the tokens of dropped groups; the slower pool is the "
            "bottleneck.",
            (
                Line("perf/trainer_alone_tokens_per_s", "trainer", BLUE),
                Line("perf/rollout_alone_tokens_per_s", "rollouter", ORANGE),
            ),
        ),
        Chart(
            "Efficiency",
            "Busy time of the slower pool per step, divided by the step time: 100 % if it never waits, more if groups "
            "were ready before the step.",
            (Line("perf/fraction_of_ideal", "of the ideal", GREEN),),
            percent=True,
        ),
        Chart(
            "Prefix reuse",
            "Share of prompt tokens whose KV the engines had already, from the group's other samples or from earlier "
            "turns.",
            (Line("rollout/prefix_reuse", "not prefilled again", ORANGE),),
            percent=True,
        ),
        Chart("Step time", "Seconds from one train step to the next.", (Line("perf/step_s", "step", BLUE),)),
        Chart(
            "Parameter sync speed",
            "Gigabytes per second during the transfer phase.",
            (Line("param_sync/gb_per_s", "GB/s", BLUE),),
        ),
    ),
    "Agents": (
        Chart(
            "Agents' calls",
            "Calls of agents so far: continuing the tokens of an earlier one, the first of a conversation, rendered "
            "whole though the conversation goes on, and refused.",
            (
                Line("rollout/agent/bridged", "bridged", BLUE),
                Line("rollout/agent/rendered", "rendered", GREEN),
                Line("rollout/agent/branched", "branched", ORANGE),
                Line("rollout/agent/refused", "refused", RED),
            ),
        ),
        Chart(
            "Why calls branch",
            "Calls so far that were rendered whole: another conversation, history or answer that the template or the "
            "client changed, an answer without a stop token.",
            (
                Line("rollout/agent/branched/new_conversation", "new conversation", BLUE),
                Line("rollout/agent/branched/history_rewritten", "history rewritten", ORANGE),
                Line("rollout/agent/branched/answer_rewritten", "answer rewritten", RED),
                Line("rollout/agent/branched/no_stop_token", "no stop token", VIOLET),
            ),
        ),
        Chart(
            "Untrained tokens of agents",
            "Tokens so far that were sampled for agents and are not trained, by reason.",
            (
                Line("rollout/agent/untrained_tokens/never_delivered", "never delivered", ORANGE),
                Line("rollout/agent/untrained_tokens/other_distribution", "other distribution", BLUE),
                Line("rollout/agent/untrained_tokens/restarted", "restarted", RED),
                Line("rollout/agent/untrained_tokens/interrupted", "interrupted", VIOLET),
            ),
        ),
    ),
    "Speculation": (
        Chart(
            "Acceptance",
            "Accepted fraction of the drafted tokens, overall and by position in the draft. It falls when the draft "
            "lags behind the policy.",
            (
                Line("rollout/spec_accept_rate", "all", BLUE),
                Line("rollout/spec_accept_rate_1", "1st", GREEN, "faint"),
                Line("rollout/spec_accept_rate_2", "2nd", ORANGE, "faint"),
                Line("rollout/spec_accept_rate_3", "3rd", RED, "faint"),
            ),
            percent=True,
        ),
        Chart(
            "Tokens per verification",
            "Accepted draft tokens per pass of the target model, plus the token that it samples itself.",
            (Line("rollout/spec_accept_length", "tokens", BLUE),),
        ),
        Chart(
            "Draft loss",
            "Mean draft loss (mtp.loss) over the trained tokens, in nats, by depth.",
            (
                Line("mtp/loss_1", "depth 1", BLUE),
                Line("mtp/loss_2", "depth 2", ORANGE),
                Line("mtp/loss_3", "depth 3", VIOLET),
            ),
        ),
        Chart(
            "Draft accuracy",
            "Trained tokens that are the draft's top prediction, by depth.",
            (
                Line("mtp/accuracy_1", "depth 1", BLUE),
                Line("mtp/accuracy_2", "depth 2", ORANGE),
                Line("mtp/accuracy_3", "depth 3", VIOLET),
            ),
            percent=True,
        ),
    ),
    "Policy": (
        Chart(
            "Entropy",
            "Entropy of the policy's next-token distribution, in nats; at zero, exploration has ended.",
            (Line("actor/entropy", "entropy", BLUE),),
        ),
        Chart(
            "Entropy bonus",
            "Coefficient of the entropy in the loss, which algorithm.entropy_target adapts.",
            (Line("actor/entropy_coef", "coefficient", BLUE),),
        ),
        Chart(
            "KL divergence",
            "KL of the policy to the behaviour policy (grows with staleness), with the proximal anchor to the policy "
            "at the start of the batch (grows with the optimizer steps per batch), and to the reference model.",
            (
                Line("actor/kl_behaviour", "behaviour", BLUE),
                Line("actor/kl_proximal", "proximal", GREEN),
                Line("actor/kl_reference", "reference", ORANGE),
            ),
        ),
        Chart(
            "Mismatch",
            "KL of the replicas' policy to the trainer's: of tokens sampled under the trainer's own weights, where "
            "only numerics differ, and of older ones. supervision.mismatch_stop bounds it for each replica.",
            (
                Line("mismatch/fresh_kl", "fresh", BLUE),
                Line("mismatch/older_kl", "older", ORANGE),
            ),
        ),
        Chart(
            "Clipped tokens",
            "Tokens whose ratio left the surrogate's range.",
            (
                Line("actor/clip_fraction_low", "clipped low", BLUE),
                Line("actor/clip_fraction_high", "clipped high", ORANGE),
                Line("actor/clip_fraction_dual", "clipped dual", VIOLET),
            ),
            percent=True,
        ),
        Chart(
            "Corrected tokens",
            "Tokens with a truncated importance weight, and tokens masked where the policies are too far apart.",
            (
                Line("actor/tis_truncated", "tis: truncated", BLUE),
                Line("actor/mis_masked", "mis: masked", ORANGE),
                Line("actor/rejected", "reject: masked", VIOLET),
            ),
            percent=True,
        ),
        Chart(
            "Effective sample size",
            "Share of the tokens that would give as much information with equal weights; SAPO's gate, 1 on-policy.",
            (
                Line("actor/effective_sample_size", "effective sample size", BLUE),
                Line("actor/gate", "gate", ORANGE),
            ),
            percent=True,
        ),
        Chart(
            "Importance ratio extremes",
            "Ratio of the trainer's policy to the behaviour policy: largest and smallest token ratio of the step, "
            "before truncation.",
            (Line("actor/ratio_max", "max", ORANGE), Line("actor/ratio_min", "min", BLUE)),
            log=True,
        ),
        Chart(
            "PPO ratio extremes",
            "Ratio of the policy to the anchor: largest and smallest token ratio of the step, before clipping.",
            (Line("actor/ppo_ratio_max", "max", ORANGE), Line("actor/ppo_ratio_min", "min", BLUE)),
            log=True,
        ),
        Chart("Loss", "Value of the objective; it need not decrease.", (Line("actor/loss", "loss", BLUE),)),
        Chart(
            "Gradient norm",
            "Before clipping.",
            (Line("actor/grad_norm", "gradient norm", BLUE),),
        ),
        Chart("Learning rate", "", (Line("actor/lr", "learning rate", BLUE),)),
    ),
}


def line_chart(chart: Chart, series: Series) -> go.Figure | None:
    """Figure of the lines that have data; None without any."""
    drawn = [(line, *_thin(*series[line.metric])) for line in chart.lines if _has_data(series, line.metric)]
    if not drawn:
        return None
    figure = go.Figure()
    for line, steps, values in drawn:
        figure.add_scatter(
            x=steps,
            y=values,
            name=line.label,
            mode="lines+markers" if line.style == "marker" else _mode(steps),
            opacity=0.6 if line.style == "faint" else 1.0,
            line={
                "color": line.colour,
                "width": 2.4 if line.style == "marker" else 1.2 if line.style in ("faint", "dash") else 1.8,
                "dash": "dash" if line.style == "dash" else "solid",
            },
            marker={"size": 7, "color": line.colour},
            connectgaps=line.style == "marker",
        )
    numbers = [value for _, _, values in drawn for value in values if value is not None]
    lowest, highest = min(numbers), max(numbers)
    if chart.percent:
        top = 1.04 * max(1.0, highest) if highest > 0.5 else max(0.01, highest * 1.15)
        figure.update_yaxes(tickformat=".0%" if top > 0.05 else ".1%", range=[min(0.0, lowest), top])
    elif chart.log and lowest > 0:
        marks = [m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5) if lowest / 2 < m * 10.0**e < highest * 2]
        figure.update_yaxes(type="log", tickvals=marks, ticktext=[f"{mark:g}" for mark in marks])
    elif lowest >= 0 < highest:
        figure.update_yaxes(range=[0, highest * 1.08])
    return styled(figure, legend=len(drawn) > 1)


def sync_chart(series: Series) -> go.Figure | None:
    """Seconds of each parameter sync phase, stacked, and the pause in generation; None without data."""
    present = [name for name in SYNC_PHASES if _has_data(series, name)]
    if not present and not _has_data(series, "param_sync/paused_s"):
        return None
    figure = go.Figure()
    for name in present:
        steps, values = _spaced(*series[name])
        figure.add_bar(
            x=steps, y=values, name=_phase(name), marker={"color": _phase_colour(name), "line": {"width": 0}}
        )
    if _has_data(series, "param_sync/paused_s"):
        steps, values = _spaced(*series["param_sync/paused_s"])
        figure.add_scatter(
            x=steps, y=values, name="paused", mode=_mode(steps), line={"color": RED, "width": 1.4, "dash": "dot"}
        )
    longest = max(len(trace.x) for trace in figure.data)
    figure.update_layout(barmode="stack", bargap=0.15 if longest <= MAX_BARS // 4 else 0, legend_traceorder="normal")
    figure.update_yaxes(ticksuffix=" s", rangemode="tozero")
    return styled(figure)


class FamilyChart(NamedTuple):
    """A line for each metric ``prefix…suffix``."""

    title: str
    caption: str
    prefix: str
    suffix: str = ""


#: section → its charts of families
FAMILIES = {
    "Learning": (
        FamilyChart("Reward by data source", "Mean reward of each source's samples.", "rollout/source/", "/reward"),
        FamilyChart(
            "Success by data source",
            "Share of samples with a positive accuracy, or without that metric a positive reward.",
            "rollout/source/",
            "/success",
        ),
        FamilyChart(
            "Length by data source", "Mean response tokens of a sample.", "rollout/source/", "/response_tokens"
        ),
        FamilyChart(
            "Share by class of the curriculum",
            "How likely each class of prompts is to come next, see data.curriculum.",
            "rollout/curriculum/",
            "/share",
        ),
        FamilyChart(
            "Success by class of the curriculum",
            "Mean over the last data.curriculum.window groups of each class that have ended.",
            "rollout/curriculum/",
            "/success",
        ),
        FamilyChart("Held-out success by data source", "Success in the validations.", "validation/source/", "/success"),
    ),
    "Policy": (
        FamilyChart(
            "KL by staleness",
            "KL of the behaviour policy to the trainer's, of tokens that are so many versions old.",
            "fully_async/kl_by_staleness/",
        ),
        FamilyChart(
            "Ratio by staleness",
            "Mean ratio of the trainer's policy to the behaviour policy, of tokens that are so many versions old.",
            "fully_async/ratio_by_staleness/",
        ),
    ),
}


def family_chart(chart: FamilyChart, series: Series) -> go.Figure | None:
    """None without data."""
    prefix, suffix = chart.prefix, chart.suffix
    names = [name for name in sorted(series) if name.startswith(prefix) and name.endswith(suffix)]
    if not names:
        return None
    figure = go.Figure()
    for name, colour in zip(names, colours()):
        steps, values = _thin(*series[name])
        label = name.removeprefix(prefix).removesuffix(suffix)
        figure.add_scatter(x=steps, y=values, name=label, mode=_mode(steps), line={"color": colour})
    return styled(figure)


def dropped_chart(series: Series) -> go.Figure | None:
    """Cumulative dropped groups by reason; None without any."""
    reasons = [
        name for name in sorted(series) if name.startswith(DROPPED_METRICS) and any(value for value in series[name][1])
    ]
    if not reasons:
        return None
    figure = go.Figure()
    for name, colour in zip(reasons, colours()):
        steps, values = _thin(*series[name])
        label = name.removeprefix(DROPPED_METRICS).replace("_", " ")
        figure.add_scatter(x=steps, y=values, name=label, mode="lines", line={"color": colour, "shape": "hv"})
    figure.update_yaxes(rangemode="tozero")
    return styled(figure)


def _thin(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """At most `MAX_POINTS` of a line, to which it looks the same: the first, the last, and the lowest and highest of
    each stretch between."""
    count = len(steps)
    if count <= MAX_POINTS:
        return list(steps), list(values)
    stretch, kept = -(-2 * count // (MAX_POINTS - 2)), {0, count - 1}
    for low in range(0, count, stretch):
        known = [(value, low + i) for i, value in enumerate(values[low : low + stretch]) if value is not None]
        kept |= {min(known)[1], max(known)[1]} if known else {low}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def _spaced(steps: Sequence[int], values: Sequence[float | None]) -> tuple[list[int], list[float | None]]:
    """At most `MAX_BARS`, the last one among them."""
    stride = -(-len(steps) // MAX_BARS)
    first = (len(steps) - 1) % max(stride, 1)
    return list(steps[first::stride]), list(values[first::stride])


def _mode(steps: Sequence[int]) -> str:
    """A line of one point needs a marker to be visible."""
    return "lines+markers" if len(steps) == 1 else "lines"


def _has_data(series: Series, metric: str) -> bool:
    return metric in series and any(value is not None for value in series[metric][1])


def colours() -> Iterator[str]:
    while True:
        yield from PALETTE


def _phase(metric: str) -> str:
    return metric.removeprefix("param_sync/").removesuffix("_s")


def _phase_colour(metric: str) -> str:
    return PALETTE[SYNC_PHASES.index(metric) % len(PALETTE)]


def styled(figure: go.Figure, legend: bool = True, height: int = 270, x_title: str = "step") -> go.Figure:
    """Applies the page's style: transparent, with greys that are legible on white and on black."""
    axis = {"gridcolor": "rgba(128,138,150,.18)", "linecolor": "rgba(128,138,150,.45)", "zeroline": False}
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 10, "t": 6, "b": 4},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": "#7b8594"},
        showlegend=legend,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.0,
            "yanchor": "bottom",
            "bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 11},
            "itemwidth": 30,
        },
        hovermode="x unified",
        hoverlabel={"bgcolor": "#20262e", "bordercolor": "#20262e", "font": {"color": "#f2f4f7", "size": 12}},
        dragmode=False if figure.layout.dragmode is None else figure.layout.dragmode,
    )
    figure.update_xaxes(
        **axis, showgrid=False, automargin=True, title={"text": x_title, "standoff": 4, "font": {"size": 11}}
    )
    figure.update_yaxes(**axis, automargin=True)
    return figure
