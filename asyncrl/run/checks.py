"""Every check of a `Config` that needs neither the model nor the data: its own constraints and those of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from asyncrl.config.algorithm_checks import problems as algorithm_problems
from asyncrl.config.checks import Derived, derive, gpus_per_replica
from asyncrl.config.checks import problems as problems_between_sections
from asyncrl.config.load import ConfigError
from asyncrl.config.schema import Config
from asyncrl.observability.sinks.open import sink_problems
from asyncrl.param_sync.transports.choose import problems as transport_problems
from asyncrl.plugins.registry import Registry, UnknownPart
from asyncrl.rollouter.engines.base import ENGINES
from asyncrl.trainer.backends.base import BACKENDS, BackendSpec


def check(config: Config, cpus: int | None = None) -> Derived:
    """Figures derived from a valid config. Raises ConfigError with every problem.

    ``cpus``: of the one machine that runs everything; None on a cluster, where placement decides."""
    problems = [
        *problems_between_sections(config, cpus),
        *_part_problems(ENGINES, config.rollout.engine.name, config),
        *_backend_problems(config),
        *_sharing_problems(config),
        *_algorithm_problems(config),
        *transport_problems(config),
        *sink_problems(config),
    ]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return derive(config)


def _sharing_problems(config: Config) -> Iterator[str]:
    """One line for each option that does not suit ``ray.share_gpus``."""
    rollout, engine = config.rollout, config.rollout.engine
    if config.ray.share_gpus and config.rollout.autoscale.max:
        yield "rollout.autoscale: with ray.share_gpus the number of replicas is fixed; expected max=0"
    if not config.ray.share_gpus:
        return
    if config.trainer.ranks != rollout.replicas or gpus_per_replica(config) != 1:
        yield (
            "ray.share_gpus: a replica of one GPU shares that of a rank; expected trainer.ranks=rollout.replicas and "
            f"replicas on one GPU, found {config.trainer.ranks} ranks and {rollout.replicas} replicas of "
            f"{gpus_per_replica(config)}"
        )
    if "cpu" in (config.trainer.device, engine.device):
        yield (
            "ray.share_gpus: expected both pools on GPUs, found "
            f"trainer.device={config.trainer.device} and rollout.engine.device={engine.device}"
        )
    try:
        share = ENGINES.find(engine.name).memory_share
    except UnknownPart:  # reported elsewhere
        return
    if share and share not in engine.args:
        yield (
            f"rollout.engine.args.{share}: expected the engine's part of the memory of a GPU that it shares "
            "(ray.share_gpus), such as 0.4; by default it takes nearly all"
        )


def _part_problems(registry: Registry[Any], name: str, config: Config) -> Iterator[str]:
    try:
        part = registry.find(name)
    except UnknownPart as e:
        yield str(e)
    else:
        yield from part.problems(config)


def _algorithm_problems(config: Config) -> Iterator[str]:
    try:
        yield from algorithm_problems(config)
    except UnknownPart as e:
        yield str(e)


def _backend_problems(config: Config) -> Iterator[str]:
    try:
        backend = BACKENDS.find(config.trainer.backend)
    except UnknownPart as e:
        yield str(e)
        return
    yield from backend.problems(config)
    yield from _unread_options(config, backend)
    # copies of the model divide the samples of a step among them, so the smallest step needs a sample for each
    copies = config.trainer.ranks // backend.ranks_per_copy(config)
    samples = derive(config).groups_per_step * config.rollout.min_group_size
    if samples < copies:
        yield f"trainer.ranks: a step may have only {samples} samples, too few for {copies} copies of the model"


def _unread_options(config: Config, backend: BackendSpec) -> Iterator[str]:
    """Options that only other backends read, and that would otherwise be ignored silently."""
    for name in BACKENDS.built_in():
        for key in sorted(BACKENDS.find(name).options - backend.options):
            value = attrgetter(key)
            if value(config) != value(Config()):
                yield (
                    f"{key}: only the {name} backend reads it; expected its default, or trainer.backend={name}, found "
                    f"trainer.backend={config.trainer.backend}"
                )
