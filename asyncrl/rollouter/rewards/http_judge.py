"""Reward by a judge or a classifier behind an HTTP endpoint.

A judge is a chat model, asked for each response through the API of OpenAI (``…/chat/completions``)::

    reward:
      function: http_judge
      timeout_s: 60                           # also bounds the retries of a call
      args:
        url: http://127.0.0.1:8000/v1/chat/completions
        api_key: ${secret:JUDGE_KEY}          # optional, sent as a bearer token
        model: my-judge
        template: |
          Question: {prompt}
          Reference answer: {answer}
          Answer: {response}
          Grade the answer. End with a line "Score: N", N from 0 to 10.
        pattern: "Score: (\\\\d+)"              # the score is the group of its last match in what the judge writes
        range: [0, 10]                        # becomes 0 to 1; without a range the score is the reward as it is
        parameters: {temperature: 0}          # further fields of the request

A classifier, without ``template``, gets ``{"prompt": …, "response": …, "answer": …}`` and answers
``{"score": number}``.

A group's responses are judged concurrently. A call that fails for a reason that may pass (no connection, status 408,
409, 425, 429 or 5xx) is repeated, later each time, until most of ``reward.timeout_s`` has passed. Any other failure,
and an answer without a score in the range, fails the sample as a reward that raises does.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from asyncrl.plugins.registry import UnknownPart
from asyncrl.rollouter.rewards.exact_match import check_pattern, last_match
from asyncrl.types.prompts import Prompt

TIME_SHARE = 0.8  # of reward.timeout_s, after which the worker is killed
FIRST_DELAY_S, MOST_DELAY_S = 0.25, 8.0
MAX_REPLY_BYTES = 1 << 20

_PASSING = frozenset({408, 409, 425, 429})
_FIELD = re.compile(r"\{(prompt|response|answer)\}")


class JudgeError(RuntimeError):
    """The endpoint gave no score; the message says what it did instead."""


class _Passing(Exception):
    """A failure after which the call is repeated; after ``delay_s``, if the server says so."""

    def __init__(self, message: str, delay_s: float = 0.0) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class HttpJudge:
    """Keeps one session, so that connections serve several calls."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._limit_s = 0.0

    def prepare(self, timeout_s: float, **args: Any) -> None:
        """Raises UnknownPart for arguments other than those above."""
        self._limit_s = TIME_SHARE * timeout_s
        for problem in _problems(**args):
            raise UnknownPart(f"reward.args.{problem}")

    async def __call__(
        self,
        prompt: Prompt,
        response: str,
        url: str,
        api_key: str = "",
        model: str = "",
        template: str = "",
        pattern: str = "",
        range: Sequence[float] = (),
        parameters: Mapping[str, Any] | None = None,
    ) -> float:
        """Raises JudgeError."""
        task = {"prompt": _text(prompt), "response": response, "answer": prompt.answer}
        if template:
            content = _FIELD.sub(lambda field: task[field[1]], template)  # once: a response may contain {answer}
            body = {"model": model, "messages": [{"role": "user", "content": content}]}
        else:
            body = dict(task)
        reply = await self._asked(url, api_key, body | dict(parameters or {}))
        return _scaled(_judged(reply, pattern) if template else _classified(reply), range)

    async def _asked(self, url: str, api_key: str, body: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        ends, delay_s, problem = loop.time() + self._limit_s, FIRST_DELAY_S, "no answer"
        while (left_s := ends - loop.time()) > 0:
            try:
                return await self._once(url, api_key, body, left_s)
            except _Passing as e:
                problem = str(e)
                wait_s = max(e.delay_s, delay_s * random.uniform(0.5, 1.0))  # a group's calls fail together
                if loop.time() + wait_s >= ends:
                    break
                await asyncio.sleep(wait_s)
                delay_s = min(2 * delay_s, MOST_DELAY_S)
        raise JudgeError(f"{url}: {problem}; given up within {self._limit_s:.3g} s, a part of reward.timeout_s")

    async def _once(self, url: str, api_key: str, body: Mapping[str, Any], limit_s: float) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=True)  # proxies, if reward.secrets passes them on
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._session.post(url, json=body, headers=headers, timeout=timeout) as answer:
                status, text = answer.status, await _read(answer)
                retry_after = answer.headers.get("Retry-After", "")
        except TimeoutError:
            raise _Passing("no answer in time") from None
        except aiohttp.ClientError as e:
            raise _Passing(f"{type(e).__name__}: {e}") from None
        if status in _PASSING or status >= 500:
            raise _Passing(f"status {status}: {text[:200]}", float(retry_after) if retry_after.isdecimal() else 0.0)
        if status != 200:
            raise JudgeError(f"{url}: expected status 200, found {status}: {text[:200]}")
        try:
            return json.loads(text)
        except ValueError:
            raise JudgeError(f"{url}: expected JSON, found {text[:200]!r}") from None


async def _read(answer: aiohttp.ClientResponse) -> str:
    data = b""
    async for chunk in answer.content.iter_chunked(1 << 16):
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise JudgeError(f"{answer.url}: expected at most {MAX_REPLY_BYTES} bytes, found more")
    return data.decode(errors="replace")


def _judged(reply: Any, pattern: str) -> float:
    try:
        content = reply["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise JudgeError(f"expected choices[0].message.content, found {str(reply)[:200]}") from None
    found = last_match(pattern, content or "")
    try:
        return float(found if found is not None else "")
    except ValueError:
        raise JudgeError(f"expected a number where {pattern!r} matches, found {found!r} in {content!r}") from None


def _classified(reply: Any) -> float:
    score = reply.get("score") if isinstance(reply, Mapping) else None
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise JudgeError(f'expected {{"score": number}}, found {str(reply)[:200]}')
    return float(score)


def _scaled(score: float, range: Sequence[float]) -> float:
    if not range:
        return score
    low, high = range
    if not low <= score <= high:
        raise JudgeError(f"expected a score from {low:g} to {high:g}, found {score:g}")
    return (score - low) / (high - low)


def _text(prompt: Prompt) -> str:
    return "\n\n".join(message["content"] for message in prompt.messages) if prompt.text is None else prompt.text


def _problems(
    url: Any = "",
    api_key: Any = "",
    model: Any = "",
    template: Any = "",
    pattern: Any = "",
    range: Any = (),
    parameters: Any = None,
    **unknown: Any,
) -> list[str]:
    """One line per wrong argument, each beginning with its name."""
    if unknown:
        known = "url, api_key, model, template, pattern, range and parameters"
        return [f"{next(iter(unknown))}: expected {known}; found {', '.join(sorted(unknown))}"]
    found = []
    if not (isinstance(url, str) and re.match(r"https?://.|\$\{secret:", url)):
        found.append(f"url: expected the address of an HTTP endpoint, found {url!r}")
    if template and not (model and pattern):
        found.append("template: expected model and pattern beside it, which say whom to ask and where the score is")
    if not template and (model or pattern):
        found.append("template: expected the judge's question, with {prompt}, {response} and {answer}; found none")
    if template and "{response}" not in str(template):
        found.append("template: expected {response} in it, found none")
    if pattern:
        check_pattern("reward.args.pattern", pattern)
    numbers = isinstance(range, list | tuple) and all(isinstance(n, int | float) and math.isfinite(n) for n in range)
    if range and not (numbers and len(range) == 2 and range[0] < range[1]):
        found.append(f"range: expected the lowest and the highest score, such as [0, 10]; found {range!r}")
    if parameters is not None and not isinstance(parameters, Mapping):
        found.append(f"parameters: expected a mapping, found {parameters!r}")
    return found


REWARD = HttpJudge()
