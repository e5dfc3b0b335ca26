"""``asyncrl simulate``: predict the speed of a configuration from the figures of a run that was measured.

    asyncrl simulate --config configs/quickstart.yaml --profile runs/quickstart/profile.json rollout.replicas=4

Runs the real control plane in virtual time, see `asyncrl.simulation`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.load import ConfigError, load_config
from asyncrl.simulation.profile import Profile, ProfileError
from asyncrl.simulation.simulate import simulate

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
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 2 for a configuration or profile that is refused."""
    parser = argparse.ArgumentParser(
        prog="asyncrl simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="YAML file of options, see configs/")
    parser.add_argument("--profile", type=Path, required=True, help="profile.json of a finished run")
    parser.add_argument("--steps", type=int, default=12, help="train steps to simulate (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="such as rollout.replicas=4")
    args = parser.parse_args(argv)
    if args.steps < 3:
        parser.error(f"--steps: expected at least 3, since the first two begin with empty pools; found {args.steps}")
    try:
        config = load_config(args.config, [*args.overrides, f"trainer.total_steps={args.steps}"])
        profile = Profile.read(args.profile)
        simulation = simulate(config, profile)
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
    figures = simulation.figures()
    for name, (what, unit) in _ROWS.items():
        print(f"{what:28}{figures[name]:>12.4g} {unit}")
    print(simulation.advice())
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))
    return 0
