"""Registry of one kind of part: engines, backends, transports, items of algorithms, rewards, agent loops, sinks.

An option such as ``rollout.engine.name`` names a part in one of three ways:

- a module or sub-package in the kind's own folder that defines the kind's attribute: ``vllm`` is
  ``asyncrl/rollouter/engines/vllm/spec.py``, which defines ``ENGINE``; ``grpo`` is ``algorithms/advantages/grpo.py``;
- an entry point of an installed package, in the kind's group::

      [project.entry-points."asyncrl.engines"]
      mine = "my_package.engine:ENGINE"

- an import path, ``my_package.engine:ENGINE``.

Nothing else lists the names: a new folder or file is a new part.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from asyncrl.plugins.import_path import ImportPathError, load

T = TypeVar("T")
M = TypeVar("M")


class UnknownPart(ValueError):
    """A name, import path or object that is not a part of this kind; the message is one line that begins with the
    option."""


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Parts of one ``kind``, selected by ``option``.

    ``package``: folder of the built-in parts, as a dotted name; each defines ``attribute`` at the top level of its
    module, or of ``spec.py`` in its sub-package. ``entry_points``: group of the parts of other packages. ``interface``:
    class whose public attributes and methods a part must have. ``instances``: parts are instances of it, not classes or
    functions."""

    kind: str
    option: str
    package: str
    attribute: str
    entry_points: str
    interface: type
    instances: bool = True

    def names(self) -> list[str]:
        """All registered names, sorted; nothing is imported."""
        return sorted({*self.built_in(), *self._installed()})

    def find(self, name: str) -> T:
        """The part named ``name``. Raises UnknownPart."""
        if ":" in name:
            path = name
        elif name in (built_in := self.built_in()):
            path = built_in[name]
        elif name in (installed := self._installed()):
            path = installed[name]
        else:
            raise UnknownPart(
                f"{self.option}: expected one of {', '.join(self.names())}, or an import path such as "
                f"package.module:{self.attribute}; found {name!r}"
            )
        try:
            part: T = load(path)
        except ImportPathError as e:
            raise UnknownPart(f"{self.option}: {e}") from e
        if self.instances and isinstance(part, type):
            raise UnknownPart(
                f"{self.option}: {path} is a class; expected an instance, such as {self.attribute} = {part.__name__}()"
            )
        if missing := lacking(part, self.interface):
            raise UnknownPart(f"{self.option}: {path} lacks {', '.join(missing)}, which every {self.kind} has")
        return part

    def checked(self, made: M, interface: type, name: str) -> M:
        """Returns ``made``, created by the part ``name`` as the run starts. Raises UnknownPart if it lacks a method."""
        if missing := lacking(made, interface):
            raise UnknownPart(
                f"{self.option}: {name} made {type(made).__name__}, which lacks {', '.join(missing)}; see "
                f"{interface.__module__}.{interface.__name__}"
            )
        return made

    def built_in(self) -> dict[str, str]:
        """Name → import path. Found in the source text, so that only the chosen part is imported."""
        found = {}
        (folder,) = importlib.import_module(self.package).__path__
        for module in pkgutil.iter_modules([folder]):
            name = f"{module.name}.spec" if module.ispkg else module.name
            file = Path(folder, *name.split(".")).with_suffix(".py")
            if file.is_file() and re.search(rf"^{self.attribute}\b.*=", file.read_text(), re.MULTILINE):
                found[module.name] = f"{self.package}.{name}:{self.attribute}"
        return found

    def _installed(self) -> dict[str, str]:
        return {
            point.name: f"{point.module}:{point.attr}"
            for point in importlib.metadata.entry_points(group=self.entry_points)
        }


def check_arguments(option: str, called: Callable[..., Any], /, *own: Any, **given: Any) -> None:
    """Raises UnknownPart if ``called`` does not take our ``own`` arguments and those that ``option`` has given."""
    try:
        inspect.signature(called, follow_wrapped=False).bind(*own, **given)
    except TypeError as e:
        raise UnknownPart(f"{option}: {e}") from None
    except ValueError:  # some functions of C have no signature
        return


def lacking(part: object, interface: type) -> list[str]:
    """Public attributes and methods of ``interface`` that ``part`` lacks."""
    classes = [c for c in interface.__mro__ if c.__module__ not in ("builtins", "typing", "abc")]
    names = {name for c in classes for name in (*c.__dict__, *inspect.get_annotations(c))}
    has = lambda name: name in dir(part) or hasattr(part, name)  # properties are not evaluated, delegates are asked
    return sorted(name for name in names if not name.startswith("_") and not has(name))
