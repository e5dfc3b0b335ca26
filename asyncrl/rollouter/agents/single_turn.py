"""Single-turn agent loop: one prompt, one answer."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncrl.rollouter.agents.base import Generate
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample


class SingleTurn:
    """The default agent loop: the sample is the policy's answer to the prompt."""

    def __init__(self, tokenizer: Any, max_response_tokens: int) -> None:
        self._max_response_tokens = max_response_tokens

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        answer = await generate(np.empty(0, np.int32), self._max_response_tokens)
        return Sample.single(
            index=index,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            loss_mask=np.ones(len(answer.tokens), dtype=bool),
            spans=answer.spans,
            finish=answer.finish,
        )


AGENT_LOOP = SingleTurn
