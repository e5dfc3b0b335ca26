"""Number formats of the sinks and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def is_number(value: Any) -> bool:
    """True for Python and NumPy numbers and booleans, and for arrays and tensors without a dimension."""
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "item")


def json_number(value: Any) -> int | float | None:
    """A plain number; None (JSON's null) for NaN and infinities, which JSON cannot represent."""
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, (bool, int)):
        return int(plain)
    return float(plain) if math.isfinite(plain) else None


def json_numbers(values: Mapping[str, Any]) -> dict[str, int | float | None]:
    """The numbers among ``values``, by `json_number`."""
    return {name: json_number(value) for name, value in values.items() if is_number(value)}


def short_number(value: float) -> str:
    """Three significant digits with a suffix for thousands: 0.531, 84.2, 1.27k, 3.40M."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            value, suffix = value / limit, letter
            break
    else:
        suffix = ""
    digits = max(0, 2 - math.floor(math.log10(abs(value) * 1.0005))) if abs(value) >= 0.01 else 3
    return f"{value:.{min(digits, 3)}f}{suffix}"


def short_seconds(seconds: float) -> str:
    """0.31s, 12.4s, 4m10s, 2h05m, 3d04h."""
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{s:02d}s"
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours < 24 else f"{hours // 24}d{hours % 24:02d}h"
