"""The endpoint's HTTP server: authenticates, translates each API's dialect, and answers errors in that dialect."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from asyncrl.rollouter.endpoint.calls import BadRequest, Dialect
from asyncrl.rollouter.endpoint.dialects import DIALECTS
from asyncrl.rollouter.endpoint.service import Endpoint, UnknownKey
from asyncrl.rollouter.endpoint.session import AgentSession, CallFailed, SessionEnded, TooManyCalls

MAX_BODY_BYTES = 64 * 1024 * 1024
IDLE_S = 75.0  # until an idle connection is closed: agents may leave theirs open
_STATUS: dict[type[Exception], int] = {BadRequest: 400, UnknownKey: 401, SessionEnded: 409, TooManyCalls: 429}
_STATUS |= {CallFailed: 500}

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """``start()`` listens on ``host`` and sets the endpoint's address. ``port`` 0: a free one. ``model`` and
    ``max_model_len``: as ``/v1/models`` names them."""

    def __init__(self, endpoint: Endpoint, host: str, port: int, model: str, max_model_len: int) -> None:
        self._endpoint, self._host, self._port = endpoint, host, port
        self._model = {"id": model, "object": "model", "created": 0, "owned_by": "asyncrl"}
        self._model |= {"max_model_len": max_model_len}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Raises OSError if the address is not free."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        for prefix in ("", "/sessions/{key}"):
            for path, dialect in DIALECTS.items():
                app.router.add_post(prefix + path, self._handler(dialect))
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._one_model)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=IDLE_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self._endpoint.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _session(self, request: web.Request) -> AgentSession:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        key = request.match_info.get("key") or request.headers.get("x-api-key")
        return self._endpoint.session(key or (bearer.strip() if scheme.lower() == "bearer" else None))

    def _handler(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            self._session(request)
            body = await request.read()
            session = self._session(request)  # its attempt may have failed meanwhile: no part of the next one
            retries = request.headers.get("x-stainless-retry-count", "")
            retried = retries.isdecimal() and retries.strip("0") != ""
            transport = request.transport  # a request holds its body, and calls live as long as their sample
            gone = lambda: transport is None or transport.is_closing()
            try:
                call = dialect.call(_object(body))
                key = request.headers.get("Idempotency-Key")
                answered = await session.answer(call, body, key, retried, gone)
            except BadRequest:
                self._endpoint.refused()
                raise
            assert answered.turn is not None
            answer = answered.turn.answer
            if call.stream:
                response = web.StreamResponse(
                    headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
                )
                parts = dialect.stream(call, answer)
            else:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                parts = iter([json.dumps(dialect.answer(call, answer)).encode()])
            with contextlib.suppress(ConnectionError):  # the client has gone; its retry gets the answer
                await response.prepare(request)
                for part in parts:
                    await response.write(part)
                await response.write_eof()
                if not gone():
                    session.delivered(answered)
            return response

        return handle

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({"object": "list", "data": [self._model]})

    async def _one_model(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response({**self._model, "id": request.match_info["model"]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as JSON, in the form of the API that was called."""
    try:
        return await handler(request)
    except web.HTTPException as e:
        return _error(request, e.status, f"{e.reason}: {request.method} {request.path}")
    except tuple(_STATUS) as e:
        status = next(status for kind, status in _STATUS.items() if isinstance(e, kind))
        return _error(request, status, str(e), getattr(e, "param", None), getattr(e, "code", None))
    except ConnectionError:
        return _error(request, 400, "the client has gone")  # while it sent its call
    except Exception as e:
        route = request.match_info.route.resource  # not the path, which may hold a key
        log.exception("endpoint: %s %s failed", request.method, route and route.canonical)
        return _error(request, 500, f"{type(e).__name__}: {e}")


def _error(
    request: web.Request, status: int, message: str, param: str | None = None, code: str | None = None
) -> web.Response:
    called = (dialect for path, dialect in DIALECTS.items() if request.path.endswith(path))
    dialect = next(called, next(iter(DIALECTS.values())))
    headers = {} if status == 429 else {"x-should-retry": "false"}  # which the openai and anthropic clients honour
    return web.json_response(dialect.error(status, message, param, code), status=status, headers=headers)


def _object(body: bytes) -> dict[str, object]:
    """Raises BadRequest."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"body: expected JSON, found none ({e})") from None
    if not isinstance(found, dict):
        raise BadRequest(f"body: expected a JSON object, found {type(found).__name__}")
    return found
