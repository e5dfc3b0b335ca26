"""Simulates every combination of some options, and says which trains fastest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import plotly.graph_objects as go

from asyncrl.config.checks import gpus_per_replica
from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability import charts
from asyncrl.observability.report import page
from asyncrl.simulation.deaths import Deaths
from asyncrl.simulation.profile import Profile, ProfileError
from asyncrl.simulation.simulate import simulate

AS_FAST = 0.97  # of the fastest: of these, that with the freshest samples is the best

Options = Mapping[str, str]


@dataclass(frozen=True)
class Combination:
    """``swept``: the options that differ between combinations. ``ranks``: those that the replicas leave GPUs for, if
    these were given. ``figures``: as of `asyncrl.simulation.simulate.Simulation`; empty if it was ``refused``, with the
    reason."""

    swept: Options
    ranks: int | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""
    refused: str = ""

    @property
    def options(self) -> Options:
        return dict(self.swept) if self.ranks is None else {**self.swept, "trainer.ranks": str(self.ranks)}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.options.items())


def combinations(swept: Sequence[str]) -> Iterator[Options]:
    """All combinations of values: ``key=a,b,c``, or ``key=low..high``, which doubles from one to the other. Raises
    ValueError for anything else."""
    options = {name: _values(name, given) for name, _, given in (one.partition("=") for one in swept)}
    for values in itertools.product(*options.values()):
        yield dict(zip(options, values, strict=True))


def _values(name: str, given: str) -> Sequence[str]:
    if ".." not in given:
        values = given.split(",")
        if not name or not all(values):
            raise ValueError(f"--sweep: expected key=a,b,c or key=low..high, found {name}={given}")
        return values
    try:
        low, high = map(int, given.split(".."))
    except ValueError:
        low = high = 0
    if not 0 < low <= high:
        raise ValueError(f"--sweep: {name}: expected two numbers such as 4..64, found {given}")
    return [str(low << step) for step in range((high // low).bit_length())]


def sweep(
    make: Callable[[Sequence[str]], Config],
    swept: Sequence[Options],
    profile: Profile,
    gpus: int | None = None,
    deaths: Deaths | None = None,
) -> Iterator[Combination]:
    """Simulate each; ``make(overrides)`` gives its configuration. ``gpus``: what replicas leave of so many trains."""
    for options in swept:
        try:
            overrides, ranks = [f"{name}={value}" for name, value in options.items()], None
            config = make(overrides)
            if gpus is not None:
                replicas = config.rollout.replicas * gpus_per_replica(config)
                if replicas >= gpus:
                    raise ConfigError([f"the replicas need {replicas} GPUs, which leaves none of {gpus} to train"])
                ranks = gpus - replicas
                config = make([*overrides, f"trainer.ranks={ranks}"])
            run = simulate(config, profile, deaths=deaths, goes_on=True)
        except (ConfigError, ProfileError) as e:
            yield Combination(options, refused=str(e).splitlines()[0])
        else:
            yield Combination(options, ranks, run.figures(), run.advice())


def best(found: Sequence[Combination]) -> Combination | None:
    """Of the combinations that are about as fast as the fastest one, that whose samples are freshest."""
    if not (ran := [one for one in found if one.figures]):
        return None
    fastest = max(one.figures["samples_per_s"] for one in ran)
    as_fast = [one for one in ran if one.figures["samples_per_s"] >= AS_FAST * fastest]
    return min(as_fast, key=lambda one: (one.figures["staleness_mean"], -one.figures["samples_per_s"]))


# -- the page ----------------------------------------------------------------------------------------------------------


def sweep_page(found: Sequence[Combination], title: str, subtitle: str) -> str:
    """A self-contained HTML page. ``found``: at least one that was not refused."""
    chosen = best(found)
    assert chosen is not None
    figures = chosen.figures
    return page.render(
        title=title,
        badge=page.Label("simulated", "ok"),
        subtitle=subtitle,
        banner=page.Label(f"Best: {chosen}. {chosen.advice}", "ok"),
        key_figures={
            "samples/s": f"{figures['samples_per_s']:.4g}",
            "of pools that never wait": f"{figures['fraction_of_ideal']:.0%}",
            "trainer idle": f"{figures['trainer_idle']:.0%}",
            "rollouter idle": f"{figures['rollouter_idle']:.0%}",
            "mean age, versions": f"{figures['staleness_mean']:.2f}",
        },
        has_metrics=True,
        sections=[
            page.Section(
                "By combination",
                page.charts(
                    ("Speed", "Trained samples per second.", _lines(found, "samples_per_s")),
                    ("Of the ideal", "Relative to pools that never wait.", _lines(found, "fraction_of_ideal", True)),
                    ("Trainer idle", "Share of the time.", _lines(found, "trainer_idle", True)),
                    ("Rollouter idle", "Share of the time.", _lines(found, "rollouter_idle", True)),
                    ("Age", "Mean age of the trained groups, in versions.", _lines(found, "staleness_mean")),
                    ("Queue", "Finished groups that wait.", _lines(found, "queue_depth")),
                ),
            ),
        ],
        trajectories=[],
        damage="",
        trajectories_title="",
        summary={str(one): one.refused or one.advice for one in found},
        config_text="",
    )


def _lines(found: Sequence[Combination], figure: str, percent: bool = False) -> go.Figure:
    """Over the first swept option, a line for each combination of the others."""
    drawn = go.Figure()
    lines: dict[str, tuple[list[str], list[float]]] = {}
    for one in found:
        (_, x), *others = one.swept.items()
        if one.figures:
            label = ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in others)
            xs, ys = lines.setdefault(label, ([], []))
            xs.append(x)
            ys.append(one.figures[figure])
    for (label, (xs, ys)), colour in zip(lines.items(), itertools.cycle(charts.PALETTE)):
        drawn.add_scatter(x=xs, y=ys, name=label, mode="lines+markers", line={"color": colour})
    drawn.update_xaxes(type="category")
    drawn.update_yaxes(rangemode="tozero", tickformat=".0%" if percent else None)
    return charts.styled(drawn, legend=len(lines) > 1, x_title=next(iter(found[0].swept)))
