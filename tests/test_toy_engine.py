"""The guide's example engine, selected by its import path, passes the engine contract."""

import pytest
import pytest_asyncio

from tests.support.engine_contract import *  # noqa: F403
from tests.support.engine_replica import Replica, replica_config

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def long():
    return 100


@pytest.fixture(scope="module")
def caches_prefixes():
    return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    replica = await Replica.start(replica_config("docs.examples.toy_engine:ENGINE", checkpoint))
    yield replica
    await replica.close()
