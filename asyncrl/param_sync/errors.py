"""Errors of a sync session: the phase, the failed party and the version of the weights."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.types.versions import PolicyVersion

ALL_REPLICAS = "all replicas"  # `SyncError.who` if no replica is left


class BucketKey(NamedTuple):
    """Identifies a bucket, unique within a run."""

    session: str
    sender: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.sender}/{self.sequence} of session {self.session}"


class SyncError(RuntimeError):
    """A phase of a sync session failed. ``who``: a replica or a sender. It crosses processes by pickle.

    The raiser fills in what it knows; callers add the rest with `located`.
    """

    def __init__(
        self, phase: str, who: str | None, version: PolicyVersion | None, bucket: BucketKey | None, message: str
    ) -> None:
        super().__init__(phase, who, version, bucket, message)
        self.phase, self.who, self.version, self.bucket, self.message = phase, who, version, bucket, message

    def __str__(self) -> str:
        where = [f"sync phase {self.phase}"]
        where += [self.who] if self.who is not None else []
        where += [f"version {self.version}"] if self.version is not None else []
        where += [f"bucket {self.bucket}"] if self.bucket is not None else []
        return f"{', '.join(where)}: {self.message}"

    def located(self, who: str, version: PolicyVersion) -> SyncError:
        """The same error with the missing fields filled in."""
        return SyncError(self.phase, self.who or who, self.version or version, self.bucket, self.message)
