"""Supported releases of megatron-core and its bridges, and the check that those are installed."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from asyncrl.cpu import megatron as megatron_cpu

SUPPORTED = {
    "megatron-core": ">=0.16.1,<0.20",
    "megatron-bridge": ">=0.3.1,<0.7",
    "mbridge": ">=0.15.1,<0.16",
}
#: release of Megatron-Bridge → the release of megatron-core that it was made for; it imports names that others lack.
#: 0.5, made for 0.18, is absent because its import fails: it registers a model that our transformers already has
MADE_FOR = {"0.3": "0.16", "0.4": "0.17", "0.6": "0.19"}
NEEDED = ("megatron-core", "megatron-bridge")


class UnsupportedPackage(RuntimeError):
    """A package of this backend is missing, or its release is not supported."""


def prepare() -> None:
    """Check the packages, then make them usable on a machine without a GPU. Call before anything imports them."""
    check_packages()
    megatron_cpu.activate()


def check_packages(*packages: str) -> None:
    """Raise UnsupportedPackage, in one line, for every package that is missing or unsupported. Without arguments,
    checks the packages that are always needed, and that their releases go together."""
    problems = []
    for package in packages or NEEDED:
        wanted = SUPPORTED[package]
        try:
            found = _installed(package)
        except PackageNotFoundError:
            problems.append(f"{package} {wanted} is needed, none is installed")
            continue
        if found not in SpecifierSet(wanted):
            problems.append(f"{package} {wanted} is needed, {version(package)} is installed")
    if not packages and not problems:
        problems += _misfits()
    if problems:
        raise UnsupportedPackage(
            f"trainer.backend=megatron: {'; '.join(problems)}; install the versions of constraints-megatron.txt or "
            "constraints-megatron-newest.txt"
        )


def _misfits() -> list[str]:
    """Reasons why packages that are each supported do not work together."""
    core, bridge = (f"{found.major}.{found.minor}" for found in map(_installed, NEEDED))
    if MADE_FOR.get(bridge) != core:
        pairs = ", ".join(f"{of} with {release}" for release, of in MADE_FOR.items())
        return [f"megatron-core and megatron-bridge go together as {pairs}; {core} with {bridge} is installed"]
    if Version(core) >= Version("0.18") and importlib.util.find_spec("triton") is None:
        return [f"megatron-core {core} needs triton, on a CPU too, and none is installed"]
    return []


def layer_in_mtp() -> str:
    """Name of the transformer layer inside an MTP layer of megatron-core."""
    return "transformer_layer" if _installed("megatron-core") < Version("0.17") else "mtp_model_layer"


def _installed(package: str) -> Version:
    """The installed release, without pre-release and local build suffixes. Raises PackageNotFoundError."""
    return Version(Version(version(package)).base_version)
