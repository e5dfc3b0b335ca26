"""A started reward pool for tests."""

import contextlib

from asyncrl.config.schema import RewardConfig
from asyncrl.rollouter.rewards.pool import RewardError, RewardPool, tried
from asyncrl.types.prompts import Prompt

PROMPT = Prompt("e0-000000", "row", ({"role": "user", "content": "?"},), "42")


@contextlib.asynccontextmanager
async def pool_of(function, **options):
    pool = RewardPool(RewardConfig(function=f"{function.__module__}:{function.__name__}", **options))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def import_problem(config):
    """Why the function does not load; None if it does."""
    try:
        tried(config)
    except RewardError as e:
        return str(e)
    return None
