"""The engine contract on the native engine."""

import asyncio

import pytest
import pytest_asyncio

from asyncrl.param_sync.errors import SyncError
from tests.support.engine_contract import *  # noqa: F403
from tests.support.engine_contract import rounding
from tests.support.engine_replica import Replica, replica_config

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    replica = await Replica.start(replica_config("native", checkpoint, pause="abort"))
    yield replica
    await replica.close()


async def test_logits_in_float32_are_not_rounded(checkpoint, initial):
    found = await rounding(Replica, replica_config("native", checkpoint), initial)
    assert found[True] < found[False] / 10, found


async def test_a_receive_that_fails_ends_the_sync_at_once(replica, initial, monkeypatch):
    """Not after half of the deadline, which senders and other replicas would wait for it."""

    async def fails(deadline_s):
        raise RuntimeError("no room for the weights")

    monkeypatch.setattr(replica.receiver, "receive", fails)
    async with asyncio.timeout(replica.config.param_sync.deadlines.transfer_s / 4):
        with pytest.raises(SyncError, match="no room for the weights"):
            await replica.sync(initial)
    monkeypatch.undo()
    await replica.sync(initial)
