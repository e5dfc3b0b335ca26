"""An agent written with Anthropic's client: it answers, is asked to check the answer, and answers again."""

from anthropic import AsyncAnthropic


async def solve(task, asks: str = "Check your answer, and give it again."):
    messages = list(task.messages)
    async with AsyncAnthropic(base_url=task.anthropic_base_url, api_key=task.api_key) as client:
        for ask in (asks, None):
            answer = await client.messages.create(model=task.model, max_tokens=1024, messages=messages)
            messages.append({"role": "assistant", "content": answer.content})
            if ask is not None:
                messages.append({"role": "user", "content": ask})
    text = "".join(block.text for block in answer.content if block.type == "text")
    return float(text.strip().endswith(str(task.answer)))
