"""Every option of a run: its name, type, default and meaning. Nothing else in asyncrl declares options.

Read top to bottom it is the configuration reference. Where users of verl's fully asynchronous trainer know a key of the
same meaning, it keeps that name.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any


def from_env(variable: str, otherwise: str, form: str = "{}") -> Any:
    """An option whose default is that of an environment variable, in ``form``; unset or empty: ``otherwise``."""
    default = lambda: form.format(os.environ.get(variable) or otherwise)
    return field(default_factory=default, metadata={"default": form.format(f"${{{variable}:-{otherwise}}}")})


@dataclass
class LoraConfig:
    """Low-rank adapters over a frozen model. They know no dropout: it would train another policy than generates."""

    rank: int = 0  # 0: off, all weights are trained
    alpha: float = 16.0  # an adapter counts alpha / rank times
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])  # ends of names, such as q_proj


@dataclass
class ModelConfig:
    path: str = "???"  # Hugging Face checkpoint folder: the policy to start from, its tokenizer and chat template
    overrides: dict[str, Any] = field(default_factory=dict)  # values that replace those of its config.json
    bridge: str = "megatron_bridge"  # megatron_bridge | mbridge: who converts weights for the Megatron backend
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class DataConfig:
    train_files: list[str] = field(default_factory=list)  # JSONL or Parquet
    validation_files: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"  # column with a string, or with a list of chat messages
    answer_key: str = "answer"
    shuffle: bool = True  # a new order in each epoch, from `seed`
    epochs: int = 0  # 0: as many as the steps need
    max_prompt_tokens: int = 0  # longer ones are dropped, counted; 0: the context less max_response_tokens
    apply_chat_template: bool = True  # false: message contents are joined as they are


@dataclass
class EngineConfig:
    name: str = "native"  # native | vllm | sglang
    python: str = (
        ""  # interpreter of replicas with an environment of their own: same version, same Ray; empty: this one
    )
    slots: int = 32  # samples generated at once per replica
    max_context_tokens: int = 0  # 0: the model's max_position_embeddings
    prefill_chunk_tokens: int = 512  # prompts are prefilled in chunks of at most this many tokens
    deterministic: bool = False  # fixed-shape decoding: equal bits whatever else is in the batch
    dtype: str = "auto"  # auto | float32 | bfloat16; auto: bfloat16 for a 16-bit checkpoint, else float32
    device: str = "auto"  # auto | cpu | cuda
    threads: int = 1  # CPU threads per replica
    cpu_priority: str = "low"  # native, of decoding on a CPU: normal | low | idle: what no other program wants
    tensor_parallel_size: int = 1  # vllm, sglang: workers of one replica that share each layer, on a GPU each
    pipeline_parallel_size: int = 1  # vllm, sglang: stages of layers
    data_parallel_size: int = 1  # vllm: copies of the model in one replica; its slots are shared out to them
    delivery: str = "memory"  # sglang, of weights to its server: memory that both see | gloo or nccl: a process group
    args: dict[str, Any] = field(default_factory=dict)  # vllm, sglang: further arguments, by the engine's names


@dataclass
class RolloutConfig:
    n: int = 8  # samples per prompt
    min_group_size: int = 2  # a group that failures leave smaller is dropped
    replicas: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_response_tokens: int = 256
    stop_strings: list[str] = field(default_factory=list)
    agent_loop: str = "asyncrl.rollouter.agent_loops.single_turn:SingleTurn"  # import path
    agent_loop_args: dict[str, Any] = field(default_factory=dict)
    max_concurrent_groups: int = 0  # at once; 0: as many as keep every slot busy, and one more per replica
    max_consecutive_drops: int = 1000  # so many groups dropped in a row end the run: nothing would ever be trained
    pacing: bool = True  # where generation outruns training: fewer samples at once rather than stop and go
    snapshot_every_s: float = 1.0  # samples in flight are on disk this often: what the rollouter's death costs at most
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class RewardConfig:
    function: str = "???"  # import path, `package.module:function`
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments
    workers: int = 1  # processes
    timeout_s: float = 10.0  # per group; the worker is killed then, and the group tried once more sample by sample


@dataclass
class OptimizerConfig:
    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"  # constant | linear | cosine
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0  # of lr, where linear and cosine end
    grad_clip: float = 1.0  # global norm; 0: none


@dataclass
class MegatronConfig:
    """How the Megatron backend cuts the model over ranks, what these leave of the ranks being data parallel copies, and
    where its state lies."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int = 1  # model chunks per pipeline stage
    context_parallel_size: int = 1  # ranks that each have a part of every sequence
    expert_model_parallel_size: int = 1  # ranks that each have a part of the experts, of all those of a pipeline stage
    sequence_parallel: bool = False  # tensor parallel ranks have parts of the tokens between their layers
    param_offload: bool = False  # parameters lie in host memory while nothing is computed with them
    grad_offload: bool = False  # gradients have memory only during a step
    optimizer_offload: bool = False  # optimizer state lies in host memory but for the optimizer's own step


@dataclass
class TrainerConfig:
    backend: str = "torch"  # torch | megatron
    python: str = ""  # as rollout.engine.python, of the ranks
    ranks: int = 1
    total_steps: int = 100
    mini_batch_groups: int = 16  # groups per optimizer step (verl: ppo_mini_batch_size)
    max_tokens_per_micro_batch: int = 8192
    logprob_chunk_tokens: int = 1024  # rows of logits held at once
    mixed_precision: str = "no"  # no | bfloat16
    activation_checkpointing: bool = False
    cpu_offload: bool = False
    device: str = "auto"
    threads: int = 1  # CPU threads per rank
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class AlgorithmConfig:
    name: str = "grpo"
    normalize_by_std: bool = True  # false: advantages are only centred (Dr. GRPO)
    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_aggregation: str = "token_mean"  # token_mean | sequence_mean
    epochs: int = 1  # optimizer epochs per batch
    importance_cap: float = 2.0  # truncates exp(proximal − behaviour); 0: no correction
    kl_coef: float = 0.0  # against the reference model; 0: no reference is held
    kl_estimator: str = "k3"  # k1 | k2 | k3
    reference_path: str = ""  # empty: model.path
    entropy_coef: float = 0.0
    filter_zero_variance: bool = True  # groups of equal rewards are dropped (counted) and refilled
    overlong: str = "keep"  # keep | mask | penalize: samples that ran into max_response_tokens
    overlong_penalty: float = 0.5  # taken from the reward when penalize


@dataclass
class AsyncTrainingConfig:
    staleness_threshold: float = 0.0
    trigger_parameter_sync_step: int = 1  # train steps between parameter syncs
    require_batches: int = 1  # mini batches per train step
    partial_rollout: bool = True  # at a sync: true cuts samples and continues them, false lets them finish first
    queue_policy: str = "fifo"  # fifo: in the order of issue | ready_first: finished ones, earliest deadline first
    overdue: str = "wait"  # a group that would be trained too late: wait for it in time | mask its old tokens | drop it


@dataclass
class MTPConfig:
    """Multi-token prediction: the checkpoint's MTP layers, here called the draft, trained and used to speculate."""

    enable_train: bool = False  # train the draft beside the policy; else it stays as the checkpoint has it
    loss: str = "acceptance"  # of the drafted tokens by the policy | cross_entropy of the sampled ones
    loss_scaling_factor: float = 0.1  # of the MTP loss, beside the policy's
    detach_encoder: bool = True  # no gradient from the MTP loss into trunk, embedding or head
    learning_rate: float = 0.0  # of the draft, on the schedule of trainer.optimizer; 0: its lr
    passes: int = 1  # of the draft over each batch, without the trunk; more than one needs detach_encoder
    updates_per_pass: int = 0  # optimizer steps of the draft over a batch; 0: 16 with detach_encoder, else 1
    init_from_trunk: bool = False  # a checkpoint without MTP weights gets a draft made from its last trunk layer
    enable_rollout: bool = False  # speculative decoding with the draft
    num_speculative_tokens: int = 1  # drafted per verification, at most
    guard: bool = True  # a replica stops speculating while that costs it throughput


@dataclass
class DeadlinesConfig:
    plan_s: float = 60.0
    pause_s: float = 600.0  # with pause `wait` this includes the longest sample
    unload_s: float = 60.0
    transfer_s: float = 600.0
    verify_s: float = 60.0
    commit_s: float = 60.0
    reload_s: float = 60.0
    resume_s: float = 60.0


@dataclass
class ParamSyncConfig:
    transport: str = "auto"  # auto: the fastest that fits the places | cuda_ipc | nccl | shared_memory | gloo
    staging: str = "bucket"  # bucket: buckets are written straight into the live weights | full: into a host copy first
    rollout_update: str = "all_at_once"  # | rolling: one replica after the other, from the host copy of staging full
    bucket_bytes: int = 0  # 0: what suits the transport, 4 MiB in shared memory, 32 MiB else; two are held a side
    adapters: str = "adapter"  # LoRA: the base once, then adapters alone | merged: whole weights, for any engine
    in_flight: str = "move"  # LoRA, pause keep: requests move to the new adapter | finish on their own (not native)
    reload_draft: bool = True  # false: replicas keep the draft that the run started from; to measure what that costs
    allow_stale_draft: bool = False  # must be true for reload_draft=false
    pause: str = "auto"  # auto | abort | keep | wait; auto: abort with partial_rollout, else wait
    kv: str = "unload"  # keep | recompute | unload
    checksum: bool = True
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)


@dataclass
class ValidationConfig:
    every_versions: int = 0  # 0: only before the first and after the last step, and only with data.validation_files
    samples: int = 1  # per prompt
    temperature: float = 1.0
    max_prompts: int = 0  # 0: all


@dataclass
class CheckpointConfig:
    every_steps: int = 100  # a rank that dies costs the steps since; 0: only at the end
    asynchronous: bool = True  # training waits only while the state is copied, and goes on while the copy is written
    keep_last: int = 2  # 0: all
    keep_best: int = 0  # beside those, the best by best_metric
    best_metric: str = "validation/reward"  # the newest value that was logged when the checkpoint was taken
    best_is: str = "highest"  # highest | lowest
    export_hf: str = "final"  # none | final | all: a Hugging Face folder in the checkpoint; training waits for it
    export_lora: str = "adapter"  # what of LoRA is in it: the adapter as PEFT has it | merged: the whole model


@dataclass
class SupervisionConfig:
    max_restarts: int = 3  # of one actor (the ranks count as one) within window_s; 0: its first death ends the run
    window_s: float = 600.0
    backoff_s: float = 0.5  # before the first restart; doubles with each further one within the window
    max_backoff_s: float = 30.0
    progress_s: float = 300.0  # a replica that has work and gives no token for so long is taken for dead
    answer_s: float = 60.0  # and so is any actor that does not answer for so long


@dataclass
class WandbConfig:
    mode: str = from_env("WANDB_MODE", "offline")  # offline | online | disabled
    project: str = from_env("WANDB_PROJECT", "asyncrl")
    entity: str = from_env("WANDB_ENTITY", "")
    tags: list[str] = field(default_factory=list)
    table_every_steps: int = 10  # the sampled trajectories since the last time, as a table; 0: none


@dataclass
class PrometheusConfig:
    """``/metrics`` and ``/health`` over HTTP, from the driver."""

    port: int = 0  # 0: none
    host: str = "127.0.0.1"  # 0.0.0.0: for everyone who can reach this machine


@dataclass
class ReportingConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    tensorboard: bool = False  # event files in run_dir/tensorboard; needs the package tensorboard
    console_every_s: float = 10.0
    trajectories_per_step: int = 2  # sampled trajectories written to trajectories.jsonl; 0: none
    report: bool = True  # report.html at the end
    log_level: str = "info"  # debug | info | warning | error: what asyncrl tells; libraries tell warnings


@dataclass
class RayConfig:
    address: str = ""  # empty: RAY_ADDRESS, else a cluster of this machine's own
    cpus_per_rank: float = 1.0
    cpus_per_replica: float = 1.0
    # pack: on few machines | spread: over many | strict_pack: on one | strict_spread: on as many as there are actors
    trainer_strategy: str = "strict_pack"
    rollout_strategy: str = "auto"  # auto: on the trainers' machine if it has room, else pack
    temp_dir: str = ""  # of a cluster started here
    placement_timeout_s: float = 30.0  # for both pools


@dataclass
class Config:
    name: str = "run"
    run_dir: str = from_env("ASYNCRL_RUNS", "runs", "{}/${{name}}")
    journal_dir: str = from_env(
        "ASYNCRL_JOURNAL", ""
    )  # a local disk for ledger and spool where run_dir is none; checkpoints copy them to run_dir
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    async_training: AsyncTrainingConfig = field(default_factory=AsyncTrainingConfig)
    mtp: MTPConfig = field(default_factory=MTPConfig)
    param_sync: ParamSyncConfig = field(default_factory=ParamSyncConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    reporting: ReportingConfig = field(default_factory=ReportingConfig)
    ray: RayConfig = field(default_factory=RayConfig)
