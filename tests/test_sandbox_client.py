"""The client of a sandbox host, against a host that has no sandbox to give."""

import asyncio

from aiohttp import web

from asyncrl.processes.tasks import cancelled
from asyncrl.sandbox.client import SandboxClient

WAITING = 150  # samples; a process of agents may have many more


async def test_calls_that_wait_for_a_sandbox_keep_no_other_call_back(tmp_path):
    waiting, free = asyncio.Semaphore(0), asyncio.Event()

    async def create(request):
        waiting.release()
        await free.wait()
        return web.json_response({"id": "x"})

    async def health(request):
        return web.json_response({"kind": "none"})

    app = web.Application()
    app.router.add_post("/v1/sandboxes", create)
    app.router.add_get("/v1/health", health)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "host")).start()
    client = SandboxClient(f"unix:{tmp_path / 'host'}", "token")
    creating = [asyncio.create_task(client.create()) for _ in range(WAITING)]
    try:
        async with asyncio.timeout(60):
            await waiting.acquire()
            await asyncio.sleep(0.2)  # all have begun, and have or wait for a connection
            assert await client.health() == {"kind": "none"}
            free.set()
            await asyncio.gather(*creating)
    finally:
        await cancelled(creating)
        await client.close()
        await runner.cleanup()
