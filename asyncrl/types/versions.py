"""Policy versions: the weights that sampled a token."""

from __future__ import annotations

from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """Identifies weights: ``number`` counts committed parameter syncs; a restore from a checkpoint starts a new
    ``lineage``, so a version is never reused for other weights. Ordered by (lineage, number)."""

    lineage: int
    number: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.number}"


class Sampler(NamedTuple):
    """What sampled a token: a replica under a policy version. ``replica``: its name, such as ``replica/0``."""

    replica: str
    version: PolicyVersion


class VersionSpan(NamedTuple):
    """Tokens from ``start`` to the next span's start were sampled under ``version`` by ``replica`` (its name; empty if
    the agent loop did not keep it).

    ``mixed_kv`` marks tokens sampled over a KV cache that an older version computed (pause mode ``keep`` with KV kept):
    their behaviour logprobs belong to no single version."""

    start: int
    version: PolicyVersion
    mixed_kv: bool = False
    replica: str = ""
