"""Registry of one kind of part: engines, backends, transports, algorithms, sinks.

An option such as ``rollout.engine.name`` names a part in one of three ways:

- a module or sub-package in the kind's own folder that defines the kind's attribute: ``vllm`` is
  ``asyncrl/rollouter/engines/vllm/spec.py``, which defines ``ENGINE``; ``grpo`` is ``trainer/algorithms/grpo.py``;
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
import pkgutil
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from asyncrl.plugins.import_path import ImportPathError, load

T = TypeVar("T")


class UnknownPart(ValueError):
    """A name, import path or object that is no part of this kind; the message is one line that begins with the
    option."""


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Parts of one ``kind``, as ``option`` names them.

    ``package``: the folder of the built-in ones, as a dotted name; each defines ``attribute`` at the top level of its
    module, or of ``spec.py`` in its sub-package. ``entry_points``: the group for those of other packages. ``needs``:
    attributes and methods that a part must have."""

    kind: str
    option: str
    package: str
    attribute: str
    entry_points: str
    needs: Sequence[str]

    def names(self) -> list[str]:
        """All registered names, sorted; nothing is imported."""
        return sorted({*self.built_in(), *self._installed()})

    def find(self, name: str) -> T:
        """The part that ``name`` stands for. Raises UnknownPart."""
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
        if missing := [need for need in self.needs if not hasattr(part, need)]:
            raise UnknownPart(f"{self.option}: {path} lacks {', '.join(missing)}, which every {self.kind} has")
        return part

    def built_in(self) -> dict[str, str]:
        """Name → import path. Found in the source, so that no part is imported before it is the one."""
        found = {}
        (folder,) = importlib.import_module(self.package).__path__
        for module in pkgutil.iter_modules([folder]):
            name = f"{module.name}.spec" if module.ispkg else module.name
            file = Path(folder, *name.split(".")).with_suffix(".py")
            if file.is_file() and re.search(rf"^{self.attribute}\b.*=", file.read_text(), re.MULTILINE):
                found[module.name] = f"{self.package}.{name}:{self.attribute}"
        return found

    def _installed(self) -> dict[str, str]:
        return {point.name: point.value for point in importlib.metadata.entry_points(group=self.entry_points)}
