"""What SGLang imports from its kernel package where there is no GPU. The names are there and nothing is behind them:
generation without speculation calls none."""

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(name)

    def missing(*args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in of SGLang's CPU tests has no kernels")

    return missing
