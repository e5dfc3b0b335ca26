"""A taskset of verifiers: sums. Its harness asks for the answer, and then whether it is right."""

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["SumsHarness", "SumsTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(str(self.data.answer)))

    @vf.metric
    async def answers(self, trace: vf.Trace) -> float:
        return trace.num_turns


class SumsConfig(vf.TasksetConfig):
    largest: int = 9


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for a in range(self.config.largest + 1):
            for b in range(self.config.largest + 1):
                yield SumTask(SumData(prompt=f"Compute {a}+{b}", answer=a + b), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for ask in ("Check your answer, and give it again.", None):
                asked = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append(asked.choices[0].message.model_dump(exclude_none=True))
                if ask is not None:
                    messages.append({"role": "user", "content": ask})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
