"""An agent loop of two turns: the policy answers, is asked to check its answer, and answers again."""

from asyncrl.rollouter.agents.base import Generate
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.rollouter.tokenizer import PromptTokenizer
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample


class TwoTries:
    def __init__(self, tokenizer: PromptTokenizer, max_response_tokens: int, hint: str = " Check: ") -> None:
        self._hint = tokenizer.hf.encode(hint, add_special_tokens=False)
        self._limit = (max_response_tokens - len(self._hint)) // 2

    async def run(self, prompt: Prompt, index: int, generate: Generate) -> Sample:
        turns = TrajectoryBuilder()
        turns.append(await generate(turns.response, self._limit))
        turns.append(self._hint)
        turns.append(await generate(turns.response, self._limit))
        return turns.sample(index)
