"""The options of algorithms: which items, and those that each item declares beside itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.advantages.grpo import GRPOOptions
from asyncrl.algorithms.advantages.reinforce_pp import ReinforcePPOptions
from asyncrl.algorithms.aggregation import AggregationOptions
from asyncrl.algorithms.corrections.mis import MISOptions
from asyncrl.algorithms.corrections.reject import RejectOptions
from asyncrl.algorithms.corrections.tis import TISOptions
from asyncrl.algorithms.divergence import EntropyOptions, KLOptions
from asyncrl.algorithms.items import ADVANTAGES, CORRECTIONS, SURROGATES, Advantage, Correction, Surrogate
from asyncrl.algorithms.rewards import FilterOptions, RewardOptions
from asyncrl.algorithms.surrogates.clip import ClipOptions
from asyncrl.algorithms.surrogates.sapo import SAPOOptions
from asyncrl.plugins.registry import Registry

Item = Advantage | Surrogate | Correction


@dataclass
class AlgorithmConfig(
    FilterOptions,
    RewardOptions,
    RejectOptions,
    MISOptions,
    TISOptions,
    SAPOOptions,
    ClipOptions,
    ReinforcePPOptions,
    GRPOOptions,
    EntropyOptions,
    KLOptions,
    AggregationOptions,
):
    """configs/algorithms/ has a file for each published algorithm. An option that no selected item reads must keep its
    default."""

    advantage: str = "grpo"  # grpo, rloo, reinforce_pp, pass_at_k, an installed one's name, or an import path
    surrogate: str = "clip"  # clip, gspo, cispo, sapo, an installed one's name, or an import path
    # policy that the surrogate's ratio is relative to; behaviour: the one that sampled the token; proximal: the one at
    # batch start; loglinear: an estimate of that without a forward pass, between behaviour and current policy
    anchor: Literal["behaviour", "proximal", "loglinear"] = "behaviour"
    # weights that correct for the policy which sampled a token; each is tis, mis, reject, a name or an import path
    corrections: list[str] = field(default_factory=list)
    args: dict[str, Any] = field(default_factory=dict)  # options of items from elsewhere that algorithm does not have
    epochs: PositiveInt = 1  # optimizer epochs per batch

    def items(self) -> tuple[Advantage, Surrogate, list[Correction]]:
        """The selected items. Raises UnknownPart."""
        return (
            ADVANTAGES.find(self.advantage),
            SURROGATES.find(self.surrogate),
            [CORRECTIONS.find(name) for name in self.corrections],
        )

    def read_by(self, item: Item) -> Any:
        """The options of an item, as an instance of its class of options: those that ``algorithm`` has too come from
        there, the others from ``args``. Raises ValidationError."""
        if isinstance(self, item.options):
            return self
        shared, own = _names(item.options) & _names(AlgorithmConfig), _own_names(item)
        given = {name: value for name, value in self.args.items() if name in own}
        return item.options(**{name: getattr(self, name) for name in shared} | given)


def _names(options: type) -> set[str]:
    return {f.name for f in dataclasses.fields(options)} if dataclasses.is_dataclass(options) else set()


def _own_names(item: Item) -> set[str]:
    """Options that an item reads from ``algorithm.args``."""
    return _names(item.options) - _names(AlgorithmConfig)


def readers(kind: type) -> list[str]:
    """The built-in items that read a class of options."""
    return [name for name, item in _built_in() if issubclass(item.options, kind)]


def unread(config: AlgorithmConfig, selected: Sequence[Item]) -> Iterator[str]:
    """One line for each option that is set and that no selected item reads."""
    defaults = AlgorithmConfig()
    read = {name for item in selected for name in _names(item.options)}
    for kind in AlgorithmConfig.__mro__:
        if not (names := readers(kind)):
            continue
        for name in inspect.get_annotations(kind):
            if name not in read and (value := getattr(config, name)) != getattr(defaults, name):
                yield (
                    f"algorithm.{name}: read only by {', '.join(names)}, not selected here; expected its default, "
                    f"found {value}"
                )
    known = {name for item in selected for name in _own_names(item)}
    for name in sorted(config.args.keys() - known):
        if name in _names(AlgorithmConfig):
            yield f"algorithm.args: expected {name} beside args, as algorithm.{name}"
        else:
            yield f"algorithm.args: no selected item reads {name!r}; expected {', '.join(sorted(known)) or 'none'}"


def _built_in() -> list[tuple[str, Item]]:
    registries: list[Registry[Any]] = [ADVANTAGES, SURROGATES, CORRECTIONS]
    return [(name, registry.find(name)) for registry in registries for name in registry.built_in()]
