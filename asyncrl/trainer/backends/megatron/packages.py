"""Which releases of megatron-core and its bridges this backend was written for, and whether those are installed."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

#: package → (first release that works, first that is not known to), as tuples of numbers
SUPPORTED = {
    "megatron-core": ((0, 16, 1), (0, 20)),
    "megatron-bridge": ((0, 3, 1), (0, 7)),
    "mbridge": ((0, 15, 1), (0, 16)),
}
#: release of Megatron-Bridge → that of megatron-core which it was made for: it imports names that others lack. 0.5, of
#: 0.18, is not here: it registers a model that this project's transformers has itself, and cannot be imported
MADE_FOR: dict[tuple[int, ...], tuple[int, ...]] = {(0, 3): (0, 16), (0, 4): (0, 17), (0, 6): (0, 19)}
NEEDED = ("megatron-core", "megatron-bridge")


class UnsupportedPackage(RuntimeError):
    """A package of this backend is missing, or of a release that it was not written for."""


def check_packages(*packages: str) -> None:
    """Raise UnsupportedPackage in one line for every package that is missing or outside its range; without arguments
    those that are always needed, which must also go together."""
    problems = []
    for package in packages or NEEDED:
        first, end = SUPPORTED[package]
        wanted = f"{package} >={_text(first)},<{_text(end)}"
        try:
            found = version(package)
        except PackageNotFoundError:
            problems.append(f"{wanted} is needed, none is installed")
            continue
        if not first <= _numbers(found) < end:
            problems.append(f"{wanted} is needed, {found} is installed")
    if not packages and not problems:
        problems += _misfits()
    if problems:
        raise UnsupportedPackage(
            f"trainer.backend=megatron: {'; '.join(problems)}; install the versions of constraints-megatron.txt or "
            "constraints-megatron-newest.txt"
        )


def _misfits() -> list[str]:
    """Why packages that are each within their range do not work together."""
    core, bridge = (_numbers(version(package))[:2] for package in NEEDED)
    if MADE_FOR.get(bridge) != core:
        pairs = ", ".join(f"{_text(of)} with {_text(release)}" for release, of in MADE_FOR.items())
        found = f"{_text(core)} with {_text(bridge)}"
        return [f"megatron-core and megatron-bridge go together as {pairs}; {found} is installed"]
    if core >= (0, 18) and importlib.util.find_spec("triton") is None:
        return [f"megatron-core {_text(core)} needs triton, on a CPU too, and none is installed"]
    return []


def is_before(package: str, *release: int) -> bool:
    """Whether the installed release of it is older."""
    return _numbers(version(package)) < release


def layer_in_mtp() -> str:
    """What an MTP layer of megatron-core calls the transformer layer in it."""
    return "transformer_layer" if is_before("megatron-core", 0, 17) else "mtp_model_layer"


def _numbers(text: str) -> tuple[int, ...]:
    """Of "0.16.1rc2+cpu": (0, 16, 1)."""
    numbers: list[int] = []
    for part in text.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
