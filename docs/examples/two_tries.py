"""An agent loop of two turns: the policy answers, is asked to check its answer, and answers again."""

import numpy as np

from asyncrl.rollouter.agents.base import Generate
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample


class TwoTries:
    def __init__(self, tokenizer: PromptTokenizer, max_response_tokens: int, hint: str = " Check: ") -> None:
        self._hint = np.array(tokenizer.hf.encode(hint, add_special_tokens=False), np.int32)
        self._limit = (max_response_tokens - len(self._hint)) // 2

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        first = await generate(np.empty(0, np.int32), self._limit)
        response = np.concatenate([first.tokens, self._hint])
        second = await generate(response, self._limit)
        shifted = [span._replace(start=span.start + len(response)) for span in second.spans]
        return Sample.single(
            index=index,
            tokens=np.concatenate([response, second.tokens]),
            logprobs=np.concatenate([first.logprobs, np.zeros(len(self._hint), np.float32), second.logprobs]),
            loss_mask=np.repeat([True, False, True], [len(first.tokens), len(self._hint), len(second.tokens)]),
            spans=first.spans + shifted,
            finish=second.finish,
        )
