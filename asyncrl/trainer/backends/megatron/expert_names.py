"""Names of experts' tensors across expert parallel ranks."""

from __future__ import annotations

import re
from typing import Any


def of_rank(rank: int, each: int, names: Any) -> Any:
    """An expert tensor's name, or a dict of names, renumbered for its peer on ``rank``, with ``each`` experts per
    rank."""
    if isinstance(names, dict):
        return {part: of_rank(rank, each, name) for part, name in names.items()}
    return re.sub(r"(?<=\.experts\.)\d+", lambda number: str(int(number[0]) % each + rank * each), names)
