"""``asyncrl simulate``: predict the speed of a configuration from the figures of a run that was measured.

    asyncrl simulate --config configs/quickstart.yaml --profile runs/quickstart/profile.json rollout.replicas=4
    asyncrl simulate … --sweep rollout.replicas=4..64 async_training.staleness_threshold=0,0.5,1 --gpus 64

Runs the real control plane in virtual time, see `asyncrl.simulation`. With ``--sweep`` it simulates all combinations of
the values (``4..64`` doubles), names the best, and writes a page. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.processes.garbage import collect_rarely
from asyncrl.simulation.deaths import Deaths
from asyncrl.simulation.profile import Profile, ProfileError
from asyncrl.simulation.simulate import simulate
from asyncrl.simulation.sweep import Combination, Options, best, combinations, sweep, sweep_page

_ROWS = {
    "step_s": ("a step", "s"),
    "samples_per_s": ("trained", "samples/s"),
    "tokens_per_s": ("generated", "tokens/s"),
    "trainer_idle": ("trainer idle", "of the time"),
    "rollouter_idle": ("rollouter idle", "of the time"),
    "fraction_of_ideal": ("of pools that never wait", "of their speed"),
    "staleness_mean": ("mean age of trained groups", "versions"),
    "queue_depth": ("finished groups that wait", "groups"),
    "sync_s": ("a sync", "s"),
    "deaths": ("replicas that died", "in all"),
}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Hides warnings of the control plane: they concern simulated events, such as the death of a replica."""
    logger = logging.getLogger("asyncrl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@_without_warnings()
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a configuration or profile that is refused."""
    parser = argparse.ArgumentParser(
        prog="asyncrl simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file of options, see configs/")
    parser.add_argument("--profile", type=Path, required=True, help="profile.json of a finished run")
    parser.add_argument(
        "--steps", type=int, default=12, help="train steps to simulate, of a run that goes on (default: %(default)s)"
    )
    parser.add_argument("--death-every-h", type=float, help="hours that a replica lives on average (default: for ever)")
    parser.add_argument("--restart-s", type=float, help="with --death-every-h: seconds until its successor has started")
    parser.add_argument("--sweep", nargs="+", metavar="key.path=values", help="a,b,c or low..high of each option")
    parser.add_argument("--gpus", type=int, help="with --sweep: all that the replicas leave of so many train")
    parser.add_argument("--out", type=Path, default=Path("sweep.html"), help="page of a sweep (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="such as rollout.replicas=4")
    args = parser.parse_intermixed_args(argv)
    if args.steps < 3:
        parser.error(f"--steps: expected at least 3, since the first two begin with empty pools; found {args.steps}")
    if args.gpus is not None and not args.sweep:
        parser.error("--gpus: expected with --sweep")
    if args.sweep and not args.out.absolute().parent.is_dir():
        parser.error(f"--out: expected a file in a folder that exists, found {args.out}")
    if (args.death_every_h is None) != (args.restart_s is None):
        parser.error("--death-every-h and --restart-s: expected both or neither")
    if args.death_every_h is not None and not (0 < args.death_every_h < math.inf and 0 <= args.restart_s < math.inf):
        parser.error(
            f"--death-every-h and --restart-s: expected hours above 0 and seconds of at least 0, found "
            f"{args.death_every_h:g} and {args.restart_s:g}"
        )
    if any(option.startswith("trainer.total_steps=") for option in [*args.overrides, *(args.sweep or [])]):
        parser.error("trainer.total_steps: expected --steps, the number of steps to simulate")
    deaths = None if args.death_every_h is None else Deaths(args.death_every_h * 3600, args.restart_s)
    try:
        swept = list(combinations(args.sweep or []))
    except ValueError as e:
        parser.error(str(e))

    def make(options: Sequence[str]) -> Config:
        return load_config(args.config, [*args.overrides, *options, f"trainer.total_steps={args.steps}"])

    try:
        config, profile = make([]), Profile.read(args.profile)
        collect_rarely()
        simulation = None if args.sweep else simulate(config, profile, deaths=deaths, goes_on=True)
    except ConfigError as e:
        for problem in e.problems:
            print(f"config: {problem}", file=sys.stderr)
        return 2
    except ProfileError as e:
        print(e, file=sys.stderr)
        return 2
    if unsure := profile.about.get("not_told_apart"):
        print(
            f"only what {', '.join(unsure)} explain together is known: expect errors where engines run other numbers "
            "of requests, or the trainer takes other numbers of tokens at once, than in the profile's run; a run at a "
            "staleness threshold of 0, where both change, tells them apart",
            file=sys.stderr,
        )
    if simulation is None:
        return _sweep(make, swept, profile, deaths, args)
    figures = simulation.figures()
    for name, (what, unit) in _ROWS.items():
        print(f"{what:28}{figures[name]:>12.4g} {unit}")
    print(simulation.advice())
    print(json.dumps(_rounded(figures)))
    return 0


def _sweep(
    make: Callable[[Sequence[str]], Config],
    swept: Sequence[Options],
    profile: Profile,
    deaths: Deaths | None,
    args: argparse.Namespace,
) -> int:
    found: list[Combination] = []
    print(f"{'samples/s':>10} {'of ideal':>9} {'train idle':>11} {'roll idle':>10} {'age':>6}  options")
    for one in sweep(make, swept, profile, args.gpus, deaths):
        found.append(one)
        if one.refused:
            print(f"{'–':>10} {'–':>9} {'–':>11} {'–':>10} {'–':>6}  {one}: {one.refused}", flush=True)
            continue
        f = one.figures
        idle = f"{f['trainer_idle']:>11.0%} {f['rollouter_idle']:>10.0%}"
        speed = f"{f['samples_per_s']:>10.4g} {f['fraction_of_ideal']:>9.0%}"
        print(f"{speed} {idle} {f['staleness_mean']:>6.2f}  {one}", flush=True)
    if (chosen := best(found)) is None:
        print(f"no combination can be simulated: {found[0].refused}", file=sys.stderr)
        return 2
    title = f"What if: {', '.join(name for name in swept[0])}"
    print(f"best: {chosen}: {chosen.advice}")
    drawn = sweep_page(found, title, f"{args.config} with the figures of {args.profile}")
    try:
        args.out.write_text(drawn, encoding="utf-8")
        print(f"page: {args.out}")
    except OSError as e:
        print(f"--out: the page cannot be written: {e}", file=sys.stderr)
    rows = [{**one.options, **(_rounded(one.figures) or {"refused": one.refused})} for one in found]
    print(json.dumps({"best": {**chosen.options, **_rounded(chosen.figures)}, "combinations": rows}))
    return 0


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
