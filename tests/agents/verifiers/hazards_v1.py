"""A taskset whose harness and rewards fail as its tasks say."""

from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["HazardsHarness", "HazardsTaskset"]


class HazardData(vf.TaskData):
    hazard: str
    folder: str


class HazardTask(vf.Task[HazardData]):
    @vf.reward(weight=2.0)
    async def half(self) -> float:
        if self.data.hazard == "reward":
            raise ValueError("a bug in the reward")
        return 0.5

    @vf.reward
    async def quarter(self) -> float:
        return 0.25


class HazardsTaskset(vf.Taskset[HazardTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        while True:
            yield HazardTask(HazardData(prompt="Compute 1+2", hazard="", folder="", system_prompt="Be brief."))


class HazardsHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        died = Path(data.folder, "died")
        if data.hazard == "harness" or (data.hazard == "harness once" and not died.exists()):
            died.touch()
            return vf.ProgramResult(exit_code=1, stdout="", stderr="the harness's program was killed")
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
