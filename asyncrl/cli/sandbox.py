"""Sandboxes of this machine: ``asyncrl sandbox probe|serve``.

``probe`` says which kinds of sandboxes serve here, by running one of each. Exit status: 0 if one does that is not
weaker, else 1. ``serve`` serves them to other machines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from asyncrl.config.schema import SandboxConfig
from asyncrl.sandbox.base import SandboxFailed
from asyncrl.sandbox.choose import KINDS, probe
from asyncrl.sandbox.serve import serve
from asyncrl.sandbox.service import TOKEN_VARIABLE

_NUMBERS = ("concurrent", "warm", "memory_mb", "processes", "disk_mb", "output_kb")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="asyncrl sandbox", description="Where code runs that a model wrote.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{probe,serve}")
    probes = commands.add_parser("probe", help="which kinds of sandboxes serve on this machine, by running them")
    serves = commands.add_parser("serve", help=f"serve sandboxes over HTTP; the clients' token is {TOKEN_VARIABLE}")
    for command in (probes, serves):
        command.add_argument("--image", default="", help="of podman's containers; it needs python3")
        command.add_argument("--python", default="", help="interpreter in the sandbox, with its packages")
    serves.add_argument("--kind", default="auto", choices=["auto", *KINDS])
    serves.add_argument("--host", default="127.0.0.1")
    serves.add_argument("--port", type=int, default=8700)
    serves.add_argument("--path", action="append", default=[], help="that can be read in sandboxes; may be repeated")
    for name in _NUMBERS:
        serves.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"as sandbox.{name} of a run")
    args = parser.parse_args(argv)
    if args.command == "probe":
        return asyncio.run(_probe(SandboxConfig(image=args.image, python=args.python)))
    if not (token := os.environ.get(TOKEN_VARIABLE, "")):
        print(f"expected a token in the environment variable {TOKEN_VARIABLE}, found none", file=sys.stderr)
        return 2
    if not 0 <= args.port < 65536:
        serves.error(f"--port: expected 0 to 65535, found {args.port}")
    numbers = {name: getattr(args, name) for name in _NUMBERS if getattr(args, name) is not None}
    try:
        config = SandboxConfig(kind=args.kind, image=args.image, python=args.python, paths=args.path, **numbers)
    except ValidationError as e:
        first = e.errors()[0]
        serves.error(": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")]))
    try:
        asyncio.run(serve(config, token, host=args.host, port=args.port))
    except (SandboxFailed, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


async def _probe(config: SandboxConfig) -> int:
    strong = False
    for name in KINDS:
        if name == "podman" and not config.image:
            print(f"{name:12} not tried: name an image with --image")
            continue
        found = await probe(config, name)
        strong |= not (found.problem or found.weaker)
        says = found.problem or f"serves; memory: {found.memory}" + (
            f"; weaker: {found.weaker}" if found.weaker else ""
        )
        print(f"{name:12} {says}")
    return 0 if strong else 1


if __name__ == "__main__":
    sys.exit(main())
