"""Base class of a group of options: pydantic validates each option by its annotation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

#: files and folders; ``~`` is the home folder, also in ``key=~/x``, which a shell leaves alone
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
PathTexts = Annotated[list[str], AfterValidator(lambda paths: list(map(os.path.expanduser, paths)))]


class OptionProblems(ValueError):
    """Options of one section contradict each other; one line per problem, each beginning with the option's key."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


class Section:
    """A subclass is a pydantic dataclass, so an invalid value is refused wherever the section is constructed."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False, coerce_numbers_to_str=True)

    def problems(self) -> Iterator[str]:
        """One line per violated constraint between options of this section."""
        yield from ()

    @field_validator("*", mode="before")
    @classmethod
    def _numbers_are_what_they_seem(cls, value: Any, info: ValidationInfo) -> Any:
        # pydantic would read true as the number 1, and 8.0 as 8
        kind = cls.__pydantic_fields__[str(info.field_name)].annotation  # type: ignore[attr-defined]
        items = value if isinstance(value, list) else [value]
        if kind is not bool and any(isinstance(item, bool) for item in items):
            raise PydanticCustomError("not_a_flag", "expected no boolean")
        if kind in (int, list[int]) and any(isinstance(item, float) for item in items):
            raise PydanticCustomError("not_whole", "expected a whole number")
        return value

    @model_validator(mode="after")
    def _options_fit_each_other(self) -> Self:
        if lines := list(self.problems()):
            raise OptionProblems(lines)
        return self


def from_env(variable: str, otherwise: str, form: str = "{}") -> Any:
    """Option whose default is ``form`` filled with an environment variable, or with ``otherwise`` if that is empty."""
    default = lambda: form.format(os.environ.get(variable) or otherwise)
    shown = form.format(f"${{{variable}:-{otherwise}}}")
    return Field(default_factory=default, json_schema_extra={"default": shown})
