"""The APIs in which agents speak to the endpoint, each a module of pure functions between its JSON and calls."""

from __future__ import annotations

from asyncrl.rollouter.endpoint.calls import Dialect
from asyncrl.rollouter.endpoint.dialects import chat, completions, generate, messages, responses

DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/inference/v1/generate": generate,
}
