"""Answers the held-out prompts with one engine in this process, as a run's validation does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import Config
from asyncrl.data.load import load_run_prompts
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.tasks import cancelled
from asyncrl.rollouter.answering import Answering
from asyncrl.rollouter.endpoint.host import EndpointHost
from asyncrl.rollouter.endpoint.link import EndpointLink
from asyncrl.rollouter.engine_lease import EngineLease, LeasedEngine
from asyncrl.rollouter.engines.base import ENGINES, EngineDied
from asyncrl.rollouter.samples import FailedSample
from asyncrl.rollouter.validation import Validation
from asyncrl.run.machine import local_cpus
from asyncrl.run.preflight import preflight
from asyncrl.types.prompts import Prompt
from asyncrl.types.samples import Sample
from asyncrl.types.versions import PolicyVersion

CHECK_EVERY_S = 1.0
_TOKEN = 1  # the only holder of its leases

Answers = Sequence[tuple[Prompt, Sequence[Sample | FailedSample]]]


class EvaluationFailed(RuntimeError):
    """The engine died, or no longer answers."""


def evaluation_config(config: Config, folder: Path) -> Config:
    """``config`` with the model of ``folder``, one replica, and nothing trained."""
    data = config.data
    if not data.train_files and not data.source:
        data = replace(data, train_files=list(data.validation_files))  # a run would need some
    return replace(
        config,
        model=replace(config.model, path=str(folder), overrides={}, lora=replace(config.model.lora, rank=0)),
        data=data,
        rollout=replace(config.rollout, replicas=1),
        algorithm=replace(config.algorithm, reference_path=""),
        trainer=replace(config.trainer, ranks=1),
        mtp=replace(config.mtp, enable_train=False),
    )


async def answer(config: Config, recorder: Recorder) -> Answers:
    """Each held-out prompt with ``validation.samples`` answers to it. Raises ConfigError before anything starts, and
    EvaluationFailed."""
    found = preflight(config, local_cpus())
    _, held_out = await asyncio.to_thread(load_run_prompts, config.data)
    prompts = held_out[: config.validation.max_prompts or None]
    torch.set_num_threads(config.rollout.engine.threads)
    engine = await ENGINES.find(config.rollout.engine.name).start(config, recorder)
    endpoint = EndpointHost(config, recorder) if config.rollout.agent.enabled else None
    answering: Answering | None = None
    tasks: list[asyncio.Task[Any]] = []
    try:
        await engine.resume(PolicyVersion(0, 0))
        link = None
        if endpoint is not None:
            await endpoint.start()
            link = EndpointLink(endpoint, _TOKEN, EngineDied)
        replicas = {"replica/0": LeasedEngine(EngineLease(engine), _TOKEN)}
        is_death = lambda error: isinstance(error, EngineDied)
        answering = Answering(config, found.max_prompt_tokens, replicas, is_death, link, recorder)
        await answering.start()
        validation = Validation(config, answering.maker, recorder)
        work = asyncio.create_task(validation.answers(prompts))
        tasks = [work, asyncio.create_task(answering.run()), asyncio.create_task(_fitness(answering))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks[1:]:
            if task.done():
                task.result()  # raises
        answers = work.result()
        return [(prompt, answers[prompt.uid]) for prompt in prompts]
    finally:
        await cancelled(tasks)
        if answering is not None:
            await answering.close()
        if endpoint is not None:
            await endpoint.close()
        await engine.close()


async def _fitness(answering: Answering) -> None:
    """Never returns. Raises EvaluationFailed when the engine cannot serve any more."""
    while True:
        if unfit := {**answering.router.lost, **answering.router.unfit(None)}:
            raise EvaluationFailed("; ".join(unfit.values()))
        await asyncio.sleep(CHECK_EVERY_S)
