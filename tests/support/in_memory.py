"""Small groups to put into a queue."""

from collections.abc import Sequence

import numpy as np

from asyncrl.sample_queue.core import SampleQueue
from asyncrl.sample_queue.messages import ONLY, Holder, Refusal
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan


def payload(uid: str, *versions: int) -> bytes:
    """A group of one sample, with one token per version."""
    count = len(versions)
    s = Sample.single(
        0,
        np.ones(count, np.int32),
        np.zeros(count, np.float32),
        np.ones(count, bool),
        [VersionSpan(i, PolicyVersion(0, version)) for i, version in enumerate(versions)],
        FinishReason.STOP,
        reward=0.0,
    )
    return Group.from_samples(uid, uid, 0, np.ones(1, np.int32), [s]).to_bytes()


async def put(queue: SampleQueue, groups: Sequence[bytes], holder: Holder = ONLY) -> list[Refusal]:
    """Hand over finished groups, and ask for no new ones."""
    refusals, _ = await queue.put_and_issue(groups, (), 0, holder)
    return refusals
