"""Answers the held-out prompts with one engine in this process, as a run's validation does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.schema import (
    AutoscaleConfig,
    CheckpointConfig,
    Config,
    CurriculumConfig,
    ModelConfig,
    ParamSyncConfig,
    RayConfig,
    TrainerConfig,
    WandbConfig,
)
from asyncrl.data.load import load_run_prompts
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.processes.actor_client import first_leaf
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
    """``config`` with the model of ``folder``, one replica, and nothing to train or sync: options that the evaluation
    does not read have values that fit the others."""
    data, mtp = config.data, config.mtp
    if not data.source:
        data = replace(data, train_files=list(data.validation_files), mixture={}, curriculum=CurriculumConfig())
    model = ModelConfig(path=str(folder), trust_remote_code=config.model.trust_remote_code)
    return replace(
        config,
        model=replace(model, float32_head=config.model.float32_head),
        data=data,
        rollout=replace(config.rollout, replicas=1, shards=1, autoscale=AutoscaleConfig()),
        algorithm=replace(config.algorithm, reference_path=""),
        trainer=TrainerConfig(backend=config.trainer.backend),  # which knows the model
        mtp=replace(mtp, enable_train=False, init_from_trunk=mtp.init_from_trunk and mtp.enable_rollout),
        # kv decides how an engine starts, and every engine offers each with wait
        param_sync=ParamSyncConfig(pause="wait", kv=config.param_sync.kv),
        checkpoint=CheckpointConfig(),
        reporting=replace(config.reporting, wandb=WandbConfig(mode="disabled")),
        ray=RayConfig(cpus_per_rank=0.5, cpus_per_replica=0.5),  # nothing is placed: one CPU is enough
    )


async def answer(config: Config, recorder: Recorder) -> Answers:
    """Each held-out prompt with ``validation.samples`` answers to it. Raises ConfigError before anything starts, and
    EvaluationFailed."""
    found = preflight(config, local_cpus(), trains=False)
    _, held_out = await asyncio.to_thread(load_run_prompts, config.data)
    prompts = held_out[: config.validation.max_prompts or None]
    torch.set_num_threads(config.rollout.engine.threads)
    async with contextlib.AsyncExitStack() as closing:
        try:
            async with asyncio.timeout(config.supervision.start_s):
                engine = await ENGINES.find(config.rollout.engine.name).start(config, recorder)
                closing.push_async_callback(engine.close)
                await engine.resume(PolicyVersion(0, 0))
        except TimeoutError:
            limit_s = config.supervision.start_s
            raise EvaluationFailed(f"the engine did not start within {limit_s:g} s (supervision.start_s)") from None
        watched: list[asyncio.Task[Any]] = []
        link = None
        if config.rollout.agent.enabled:
            endpoint = EndpointHost(config, found.tokenizer, recorder)
            closing.push_async_callback(endpoint.close)
            await endpoint.start()
            link = EndpointLink(endpoint, _TOKEN, EngineDied)
            watched += filter(None, [endpoint.keeping_sandboxes])
        replicas = {"replica/0": LeasedEngine(EngineLease(engine), _TOKEN)}
        is_death = lambda error: isinstance(error, EngineDied)
        answering = Answering(config, found.tokenizer, found.max_prompt_tokens, replicas, is_death, link, recorder)
        closing.push_async_callback(answering.close)
        await answering.start()
        validation = Validation(config, config.rollout.engine.slots, answering.maker, recorder)
        work = asyncio.create_task(validation.answers(prompts))
        watched += [asyncio.create_task(answering.run()), asyncio.create_task(_fitness(answering, config))]
        closing.push_async_callback(cancelled, [work, *watched])
        await asyncio.wait([work, *watched], return_when=asyncio.FIRST_COMPLETED)
        for task in watched:
            if task.done() and (error := task.exception()) is not None:
                error = first_leaf(error)
                raise EvaluationFailed(f"{type(error).__name__}: {error}") from error
        answers = work.result()
    return [(prompt, answers[prompt.uid]) for prompt in prompts]


async def _fitness(answering: Answering, config: Config) -> None:
    """Never returns. Raises EvaluationFailed when the engine cannot serve any more."""
    while True:
        unfit = {**answering.router.lost, **answering.router.unfit(config.supervision.progress_s)}
        if unfit:
            raise EvaluationFailed(f"the engine {'; '.join(unfit.values())}")
        await asyncio.sleep(CHECK_EVERY_S)
