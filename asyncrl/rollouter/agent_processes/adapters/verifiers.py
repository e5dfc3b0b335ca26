"""Tasks of a verifiers taskset as samples, ``rollout.agent.path: verifiers:TASKSET``. For verifiers 0.4.

A row of the prompt file has its task, as verifiers sends tasks to its own servers. The file is written by::

    python verifiers.py TASKSET --out FILE [--tasks N] [--env '{"taskset": {…}}']
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # this file has the name of the package
    sys.path = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]

import argparse
import asyncio
import itertools
import json
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import resolve_env_config

#: verifiers keeps a connection pool for each address, and ours has the sample's key in it; they go with the servers
SAMPLES = 64
#: errors of verifiers that are neither the policy's nor the task's
INFRA = {"SandboxError", "ToolsetError", "HarnessError", "InterceptionError", "TunnelError"}


class EnvironmentFailed(Exception):
    """What a sample needs has failed: it is started again."""

    infra = True


class SampleFailed(Exception):
    """The task's code, or a call of the policy, has failed."""


class Agent:
    """``env``, ``client`` and ``sampling``: these sections of verifiers' configs, but for the taskset's id, the address
    and the key. A client of type eval passes on the API that the harness speaks; one of type train renders
    conversations itself, and calls ``/inference/v1/generate``."""

    def __init__(
        self,
        taskset: str,
        env: Mapping[str, Any] | None = None,
        client: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._client = _config(taskset, env), client or {}
        self._sampling = vf.SamplingConfig(**sampling or {})
        self._client_at("http://127.0.0.1")  # raises for wrong options

    async def start(self) -> None:
        """Start the environment's servers."""
        self._serving = _Serving(self._config)
        await self._serving.started

    async def __call__(self, task: Any) -> dict[str, Any]:
        if not self._serving.samples_left:
            self._serving = _Serving(self._config)
        async with self._serving as env:
            return await self._sample(env, task)

    async def _sample(self, env: vf.Env, task: Any) -> dict[str, Any]:
        if "task" not in task.data:
            raise SampleFailed(f"{task.uid}: expected a column 'task'; write the prompt file as docs/agents.md says")
        data = type(env.taskset).task_type().data_type().model_validate(task.data["task"])
        client = self._client_at(f"{task.anthropic_base_url}/sessions/{task.api_key}")
        context = vf.ModelContext(model=task.model, client=client, sampling=self._sampling)
        episode = await env.run_episode(type(env.taskset).task_type()(data, env.config.taskset.task), context)
        if not episode.ok:
            raise _failure(episode)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if len(trained) != 1:
            raise SampleFailed(f"expected one trained trace, as a sample has one reward; found {len(trained)}")
        (trace,) = trained
        if any(other.agent.config.client == client for other in episode.traces if other is not trace):
            raise SampleFailed("an agent that is not trained calls the policy: give it a client of its own in env")
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        metrics |= {f"reward/{name}": reward.value for name, reward in trace.rewards.items() if reward is not None}
        return {"reward": trace.reward, "metrics": metrics}

    def _client_at(self, address: str) -> vf.ClientConfig:
        kind = {"eval": vf.EvalClientConfig, "train": vf.TrainClientConfig}[self._client.get("type", "eval")]
        return kind(**{**self._client, "base_url": f"{address}/v1", "api_key_var": "UNUSED"})


class _Serving:
    """The environment with its servers, for the next `SAMPLES` samples; entered by each, it ends with the last one."""

    def __init__(self, config: vf.EnvConfig) -> None:
        self.samples_left, self._running = SAMPLES, 0
        self._env = vf.load_environment(config)
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.create_task(self._serve())  # one task enters and leaves

    async def _serve(self) -> None:
        try:
            async with self._env.serving():
                self.started.set_result(None)
                await self._over.wait()
        except Exception as e:
            if self.started.done():
                print(f"verifiers: its servers did not end: {type(e).__name__}: {e}", file=sys.stderr)
            else:
                self.started.set_exception(e)

    async def __aenter__(self) -> vf.Env:
        self.samples_left -= 1
        self._running += 1
        try:
            await asyncio.shield(self.started)
        except Exception as e:
            self._leave(failed=True)
            raise EnvironmentFailed(f"its servers did not start: {type(e).__name__}: {e}") from e
        except BaseException:
            self._leave()
            raise
        return self._env

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(failed=kind is EnvironmentFailed)  # a server that has died would fail all others, too

    def _leave(self, failed: bool = False) -> None:
        self._running -= 1
        if failed:
            self.samples_left = 0
        if not self.samples_left and not self._running:
            self._over.set()


def _config(taskset: str, env: Mapping[str, Any] | None) -> vf.EnvConfig:
    env = env or {}
    return resolve_env_config({**env, "taskset": {**env.get("taskset", {}), "id": taskset}})


def _failure(episode: vf.Episode) -> Exception:
    """That of the first trace that failed, else the episode's own."""
    errors = [trace.last_error for trace in episode.traces if not trace.ok] + [episode.last_error]
    error = next((error for error in errors if error is not None), None)
    if error is None:
        return SampleFailed(f"verifiers stopped it: {[trace.stop_condition for trace in episode.traces]}")
    kind = EnvironmentFailed if error.type in INFRA else SampleFailed
    return kind(f"{error.type}: {error.message}")


def prompt_row(task: vf.Task) -> dict[str, Any]:
    """A line of the prompt file. Its prompt is for reports, and the beginning of what the harness sends."""
    data = task.data
    prompt = data.prompt if data.prompt is not None else data.description or data.name or f"task {data.idx}"
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    else:
        messages += [message_to_wire(message) for message in prompt]
    return {"prompt": messages, "answer": "", "task": data.model_dump(mode="json", exclude_none=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the prompt file of a taskset.")
    parser.add_argument("taskset")
    parser.add_argument("--out", required=True, help="JSONL")
    parser.add_argument("--tasks", type=int, help="at most; an infinite taskset needs it")
    parser.add_argument("--env", type=json.loads, default={}, help="as rollout.agent.args.env")
    args = parser.parse_args()
    taskset = vf.load_taskset(_config(args.taskset, args.env).taskset)
    if args.tasks is None and not taskset.bounded:
        parser.error(f"{args.taskset} is infinite: say how many --tasks")
    with open(args.out, "w") as file:
        for task in itertools.islice(taskset, args.tasks):
            file.write(json.dumps(prompt_row(task)) + "\n")


if __name__ == "__main__":
    main()
