"""The engine contract on the native engine."""

import pytest
import pytest_asyncio

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
