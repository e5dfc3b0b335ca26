"""Token sequences that share what they begin with, so that a conversation of many turns holds each token once."""

from __future__ import annotations

import numpy as np
import xxhash


class TokenPath:
    """int32 [T]: the tokens of ``before``, of which it keeps no copy, then ``own`` ones. Immutable."""

    __slots__ = ("_digest", "_length", "before", "own")

    def __init__(self, own: np.ndarray, before: TokenPath | None = None) -> None:
        self.own, self.before = np.ascontiguousarray(own, np.int32), before
        self._length = len(own) + (0 if before is None else len(before))
        self._digest: xxhash.xxh3_64 = xxhash.xxh3_64() if before is None else before._digest.copy()
        self._digest.update(self.own.data)

    def __len__(self) -> int:
        return self._length

    @property
    def digest(self) -> int:
        """`asyncrl.rollouter.agents.provenance.tokens_digest` of all tokens."""
        return self._digest.intdigest()

    def array(self) -> np.ndarray:
        parts, path = [self.own], self.before
        while path is not None:
            parts.append(path.own)
            path = path.before
        return np.concatenate(parts[::-1])

    def tolist(self) -> list[int]:
        found: list[int] = self.array().tolist()
        return found
