"""An agent with a calculator: a sum that the policy writes last, such as [12+30], is computed for it."""

import re

from asyncrl.rollouter.agents.base import Completion
from asyncrl.rollouter.agents.multi_turn import MultiTurn
from asyncrl.rollouter.agents.trajectory import TrajectoryBuilder
from asyncrl.types.prompts import Prompt


class Calculator(MultiTurn):
    async def observe(self, prompt: Prompt, turns: TrajectoryBuilder, answer: Completion) -> list[int] | None:
        asked = re.search(r"\[(\d{1,9})\+(\d{1,9})\]\s*$", self.tokenizer.decode(answer.tokens))
        if asked is None:
            return None  # the sample has ended
        turns.reward(-0.01)  # a tool costs
        return self.tokenizer.hf.encode(f" = {int(asked[1]) + int(asked[2])}\n", add_special_tokens=False)

    async def grade(self, prompt: Prompt, turns: TrajectoryBuilder) -> float:
        return float(self.tokenizer.decode(turns.response).split()[-1:] == [prompt.answer])
