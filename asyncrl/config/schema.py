"""Every option of a run: its name, type, limits, default and meaning.

docs/configuration.md is generated from this module: the comment beside or above an option is its description there.
Options that verl's fully asynchronous trainer also has keep verl's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from asyncrl.algorithms.options import AlgorithmConfig
from asyncrl.config.section import PathText, PathTexts, Section, from_env

Port = Annotated[int, Field(ge=0, le=65535)]

Device = Literal["auto", "cpu", "cuda"]


@dataclass
class LoraConfig(Section):
    """Low-rank adapters on a frozen model. There is no dropout: the trained policy must equal the sampling policy."""

    rank: NonNegativeInt = 0  # 0: off, all weights are trained
    alpha: PositiveFloat = 16.0  # the adapter's output is scaled by alpha / rank
    # suffixes of module names, such as q_proj; all-linear: every linear layer of the trunk
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])

    def problems(self) -> Iterator[str]:
        if self.rank and not self.target_modules:
            yield "model.lora.target_modules: expected all-linear or module name suffixes such as q_proj, found none"


@dataclass
class ModelConfig(Section):
    path: PathText = "???"  # Hugging Face checkpoint folder: initial policy, tokenizer and chat template
    overrides: dict[str, Any] = field(default_factory=dict)  # values that replace entries of the model's config.json
    # torch: code of the model. native: asyncrl's own decoder, deterministic, which MTP drafts need; transformers: any
    # causal LM that the package builds; auto: native where it builds the model
    implementation: Literal["auto", "native", "transformers"] = "auto"
    # torch, implementation transformers; auto: the fastest that computes all that the model asks for
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    trust_remote_code: bool = False  # run Python files of the checkpoint, in trainer and engines, to build its model
    # megatron: package that converts weights, megatron_bridge or mbridge; auto: megatron_bridge
    bridge: str = "auto"
    # logits of bfloat16 hidden states and weights are computed in float32, in trainer and engine, instead of rounded to
    # bfloat16
    float32_head: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class CurriculumConfig(Section):
    """Prompts come as often as they teach: classes of which half of the answers succeed most, those that always or
    never succeed least. Each class has epochs of its own."""

    # column by whose values prompts are classed, such as level, or data_source; empty: no curriculum
    by: str = ""
    window: PositiveInt = 64  # groups of a class, the last that have ended, whose mean success counts
    floor: Annotated[float, Field(gt=0, le=1)] = 0.1  # weight of a class that always or never succeeds; the most is 1


@dataclass
class DataConfig(Section):
    train_files: PathTexts = field(default_factory=list)  # JSONL or Parquet, at least one, unless there is a source
    validation_files: PathTexts = field(default_factory=list)
    # prompts that are generated instead of read, and held-out ones besides: reasoning_gym:TASK, or several tasks with
    # commas between them; see docs/data.md
    source: str = ""
    # arguments of the source; reasoning_gym: size, held_out, levels, seed, instruction, config
    source_args: dict[str, Any] = field(default_factory=dict)
    prompt_key: str = "prompt"  # column that holds a string or a list of chat messages
    answer_key: str = "answer"  # column that the reward function gets as the answer
    source_key: str = "data_source"  # optional column by which metrics are reported, too; default: file name
    # shares of the data sources among the prompts, by name, in any unit; empty: as many as the files have
    mixture: dict[str, float] = field(default_factory=dict)
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    shuffle: bool = True  # a new order every epoch, seeded by seed
    epochs: NonNegativeInt = 0  # maximum passes over the data; 0: as many as trainer.total_steps needs
    # longer prompts are dropped and counted; 0: the context size minus rollout.max_response_tokens
    max_prompt_tokens: NonNegativeInt = 0
    apply_chat_template: bool = True  # false: message contents are concatenated

    @property
    def validates(self) -> bool:
        """There are held-out prompts."""
        return bool(self.validation_files or (self.source and self.source_args.get("held_out", True)))

    def problems(self) -> Iterator[str]:
        if self.source and self.train_files:
            yield f"data.source: expected either source or train_files, found both, {self.source} and files"
        if self.source_args and not self.source:
            yield f"data.source_args: expected none without data.source, found {', '.join(sorted(self.source_args))}"
        if not self.curriculum.by:
            return
        if self.epochs:
            yield (
                f"data.epochs: with data.curriculum.by={self.curriculum.by} each class has epochs of its own; expected "
                f"0, found {self.epochs}"
            )
        if self.mixture and self.curriculum.by != "data_source":
            yield (
                f"data.mixture: shares of data sources do not go with data.curriculum.by={self.curriculum.by}; "
                "expected none, or by=data_source"
            )


@dataclass
class EngineConfig(Section):
    name: str = "native"  # native, vllm, sglang, the name of an installed engine, or an import path
    # interpreter of the replicas, with the driver's Python and Ray versions; empty: the driver's own interpreter
    python: PathText = ""
    slots: PositiveInt = 32  # samples that one replica generates concurrently
    max_context_tokens: NonNegativeInt = 0  # prompt and response together; 0: the model's max_position_embeddings
    prefill_chunk_tokens: NonNegativeInt = 0  # native: maximum tokens per prefill step; 0: 512 on a CPU, 4096 on a GPU
    deterministic: bool = False  # native: fixed-shape decoding, bitwise independent of the rest of the batch
    # native: MiB per replica for the KV of finished turns, from which a sample's next turn continues; unused with
    # single_turn
    warm_kv_mb: NonNegativeInt = 1024
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 for a 16-bit checkpoint, else float32
    device: Device = "auto"  # auto: cuda if there is a GPU
    threads: PositiveInt = 1  # CPU threads per replica
    # native: scheduling priority of decoding on a CPU; idle: only on cores that are otherwise idle
    cpu_priority: Literal["normal", "low", "idle"] = "low"
    tensor_parallel_size: PositiveInt = 1  # vllm, sglang: GPUs that share each layer of one replica
    pipeline_parallel_size: PositiveInt = 1  # vllm: pipeline stages of one replica
    data_parallel_size: PositiveInt = 1  # vllm: model copies in one replica, which divide its slots among them
    # sglang: how weights reach its server; memory: shared memory; gloo, nccl: a process group
    delivery: Literal["memory", "gloo", "nccl"] = "memory"
    args: dict[str, Any] = field(default_factory=dict)  # vllm, sglang: further engine arguments, under their own names


@dataclass
class AgentConfig(Section):
    """Agents that call the policy over HTTP, in processes of their own. Either ``path`` or ``command`` switches the
    endpoint on; see docs/agents.md."""

    path: str = ""  # package.module:function, called for each sample; many of them run in one process
    command: list[str] = field(default_factory=list)  # program and its arguments, started for each sample
    python: PathText = ""  # interpreter of the agents' environment, which does not need asyncrl; empty: the run's own
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments of the function
    # names of the environment variables that agents get, besides those that programs need, such as PATH
    secrets: list[str] = field(default_factory=list)
    processes: PositiveInt = 1  # of the function
    # agents may use sandboxes, of the section sandbox: ASYNCRL_SANDBOX_URL and ASYNCRL_SANDBOX_TOKEN name their host
    sandbox: bool = False
    memory_mb: PositiveInt = 4096  # MiB of a process of agents with all that it starts; beyond it, its samples fail
    unresponsive_s: PositiveFloat = 60.0  # a process whose event loop is blocked for longer is killed
    # further attempts at a sample whose process ended, grew too large or was blocked, or whose environment failed
    retries: NonNegativeInt = 1
    # a call with another temperature, a grammar, forced tools: refuse it, or mask: serve it and never train its tokens
    untrained: Literal["refuse", "mask"] = "refuse"
    host: str = "127.0.0.1"  # address on which the endpoint listens
    port: Port = 0  # 0: a free one

    def problems(self) -> Iterator[str]:
        if self.path and self.command:
            yield f"rollout.agent.command: expected either path or command, found both, {self.path} and {self.command}"
        if self.args and not self.path:
            yield f"rollout.agent.args: expected none without rollout.agent.path, found {sorted(self.args)}"

    @property
    def enabled(self) -> bool:
        return bool(self.path or self.command)


@dataclass
class AutoscaleConfig(Section):
    """Replicas join and leave during the run, so that generation keeps up with training. Off while ``max`` is 0."""

    min: PositiveInt = 1  # replicas
    max: NonNegativeInt = 0  # replicas; what is not free is asked for again after further steps

    def problems(self) -> Iterator[str]:
        if self.max and self.max < self.min:
            yield f"rollout.autoscale.max: expected at least min = {self.min}, or 0 for none, found {self.max}"


@dataclass
class RolloutConfig(Section):
    n: PositiveInt = 8  # samples per prompt
    min_group_size: PositiveInt = 2  # a group with fewer samples left after failures is dropped
    replicas: PositiveInt = 1  # engine processes at the start, each with its own copy of the model
    autoscale: AutoscaleConfig = field(default_factory=AutoscaleConfig)
    shards: PositiveInt = 1  # rollouter processes, each with its part of the replicas; see docs/cluster.md
    temperature: PositiveFloat = 1.0  # samples are drawn from the whole vocabulary, as the loss assumes
    max_response_tokens: PositiveInt = 256  # of one sequence; tokens that a tool adds to it count, too
    max_turns: NonNegativeInt = 0  # calls of generate in one sample; 0: any number
    max_sample_tokens: NonNegativeInt = 0  # that one sample samples, over all of its sequences; 0: any number
    max_sample_s: NonNegativeFloat = 0.0  # of one sample; the time counts again after a death of the rollouter; 0: any
    stop_strings: list[str] = field(default_factory=list)  # a response ends at the first of these
    stop_token_ids: list[int] = field(default_factory=list)  # in addition to the checkpoint's EOS tokens
    # attempts to sample a group that the queue refuses; after the last it is dropped as poison
    max_attempts: PositiveInt = 3
    # single_turn, the name of an installed agent loop, or an import path, package.module:Class
    agent_loop: str = "single_turn"
    agent_loop_args: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the agent loop
    agent: AgentConfig = field(default_factory=AgentConfig)
    # a sample fails if its agent loop spends this long without generating, such as in a tool
    agent_timeout_s: PositiveFloat = 600.0
    max_concurrent_groups: NonNegativeInt = 0  # that have not ended; 0: enough that every slot finds a sample
    max_consecutive_drops: PositiveInt = 1000  # the run fails after this many consecutive dropped groups
    # when generation is faster than training, generate fewer samples concurrently instead of stopping and restarting
    pacing: bool = True
    # interval of snapshots of in-flight groups; bounds the work lost when the rollouter dies
    snapshot_every_s: PositiveFloat = 1.0
    engine: EngineConfig = field(default_factory=EngineConfig)

    def problems(self) -> Iterator[str]:
        if self.min_group_size > self.n:
            yield f"rollout.min_group_size: expected at most rollout.n = {self.n}, found {self.min_group_size}"
        low, high = self.autoscale.min, self.autoscale.max
        if high and not low <= self.replicas <= high:
            yield f"rollout.replicas: expected {low} to {high}, as rollout.autoscale says, found {self.replicas}"
        if self.shards > (fewest := min(self.replicas, low) if high else self.replicas):
            yield f"rollout.shards: each needs a replica; expected at most {fewest}, found {self.shards}"
        if 0 < self.max_concurrent_groups < self.shards:
            yield (
                f"rollout.max_concurrent_groups: expected at least one for each of {self.shards} rollout.shards, found "
                f"{self.max_concurrent_groups}"
            )
        if self.shards > 1 and self.agent.port:
            yield (
                f"rollout.agent.port: each of {self.shards} rollout.shards has an endpoint; expected 0, which finds "
                f"free ports, found {self.agent.port}"
            )
        if self.agent.enabled and self.agent_loop != "single_turn":
            yield (
                f"rollout.agent_loop: rollout.agent makes the samples; expected the default, found {self.agent_loop}"
            )
        if "" in self.stop_strings:
            yield (
                f"rollout.stop_strings: expected texts, found an empty one, which every response contains: "
                f"{self.stop_strings}"
            )


@dataclass
class RewardConfig(Section):
    # a name of docs/extending.md, that of an installed function, or an import path, package.module:function; none: all
    # rewards come from the agent loop
    function: str = "???"
    args: dict[str, Any] = field(default_factory=dict)  # further keyword arguments
    # of the function in the rewards of samples to which the agent loop gives one, too; 0: the function is not called
    function_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    workers: PositiveInt = 1  # processes
    # names of the environment variables that workers get, besides those that programs need, such as PATH
    secrets: list[str] = field(default_factory=list)
    # per group; on timeout the worker is killed and the group's samples are retried one by one
    timeout_s: PositiveFloat = 10.0
    memory_mb: PositiveInt = 4096  # MiB for a worker and all that it starts together; beyond it as on timeout
    file_mb: PositiveInt = 256  # MiB of one file, and of all files together in a worker's working directory
    # a sample whose reward fails twice or, without a function, which a limit ended before its agent gave one; drop
    # removes it from its group, value gives it failure_value
    on_failure: Literal["drop", "value"] = "drop"
    failure_value: float = 0.0

    @property
    def has_function(self) -> bool:
        return self.function != "none"

    def problems(self) -> Iterator[str]:
        if self.function_share and not self.has_function:
            yield f"reward.function_share: expected 0 with reward.function=none, found {self.function_share:g}"
        if own := sorted({"HOME", "PYTHONPATH", "TMPDIR"} & set(self.secrets)):
            yield f"reward.secrets: a worker has its own {', '.join(own)}; expected names of other variables"


@dataclass
class SandboxConfig(Section):
    """Where code runs that the policy wrote: reward functions and tools that need it say so. See docs/sandbox.md."""

    # bubblewrap; podman, with an image; landlock, which is weaker; remote, the host of url; auto: the first that serves
    # where the rollouter runs, landlock only with allow_unsafe
    kind: Literal["auto", "bubblewrap", "podman", "landlock", "remote"] = "auto"
    allow_unsafe: bool = False  # with auto: a weaker kind rather than none
    url: str = ""  # remote: http://host:port; its token is the environment variable ASYNCRL_SANDBOX_TOKEN
    image: str = ""  # podman: of the containers; it needs python3
    python: PathText = ""  # interpreter in the sandbox, with its packages; empty: the run's, without; not for podman
    paths: PathTexts = field(default_factory=list)  # further files and folders that can be read in the sandbox
    concurrent: PositiveInt = 8  # sandboxes in use at a time; further ones wait
    warm: NonNegativeInt = 2  # sandboxes that are ready before anybody asks
    memory_mb: PositiveInt = 512  # MiB of a sandbox, files in it included
    processes: PositiveInt = 64  # and threads, in a sandbox
    disk_mb: PositiveInt = 256  # MiB of files in a sandbox; they are held in memory, except by landlock
    output_kb: PositiveInt = 64  # KiB of a program's output that are kept, of each stream

    def problems(self) -> Iterator[str]:
        if self.kind == "remote" and not self.url:
            yield "sandbox.url: expected the host with sandbox.kind=remote, such as http://host:8700; found none"
        if self.kind != "remote" and self.url:
            yield f"sandbox.url: expected none with sandbox.kind={self.kind}, found {self.url}"
        for option in fields(self) if self.kind == "remote" else ():
            given = getattr(self, option.name)
            default = option.default if option.default_factory is MISSING else option.default_factory()
            if option.name not in ("kind", "allow_unsafe", "url") and given != default:
                yield f"sandbox.{option.name}: the host of sandbox.url decides; set it there, found {given}"
        if self.kind == "podman" and not self.image:
            yield "sandbox.image: expected an image for sandbox.kind=podman, found none"


def _betas(betas: list[float]) -> list[float]:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"expected two numbers, 0 ≤ beta < 1, found {betas}")
    return betas


@dataclass
class OptimizerConfig(Section):
    """AdamW."""

    lr: NonNegativeFloat = 1e-6
    betas: Annotated[list[float], AfterValidator(_betas)] = field(default_factory=lambda: [0.9, 0.999])
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0  # of matrices; norms and biases do not decay
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # after warm-up
    warmup_steps: NonNegativeInt = 0  # linear warm-up
    min_lr_ratio: NonNegativeFloat = 0.0  # final learning rate of linear and cosine, as a multiple of lr
    grad_clip: NonNegativeFloat = 1.0  # maximum global gradient norm; 0: no clipping


@dataclass
class MegatronConfig(Section):
    """Parallelism of the megatron backend; ranks beyond one copy of the model are data parallel. The offload options
    free device memory between uses."""

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt = 1  # model chunks per pipeline stage
    context_parallel_size: PositiveInt = 1  # ranks that share each sequence
    expert_model_parallel_size: PositiveInt = 1  # ranks that share the experts of a pipeline stage
    sequence_parallel: bool = False  # tensor parallel ranks also share the tokens between their layers
    param_offload: bool = False  # parameters stay in host memory except while the model computes
    grad_offload: bool = False  # gradients are allocated only during a step
    optimizer_offload: bool = False  # optimizer state stays in host memory except during the optimizer step


@dataclass
class TrainerConfig(Section):
    backend: str = "torch"  # torch, megatron, the name of an installed backend, or an import path
    python: PathText = ""  # interpreter of the ranks, as rollout.engine.python
    ranks: PositiveInt = 1  # trainer processes
    total_steps: PositiveInt = 100  # train steps of the run
    # seconds after which a run finishes its step, saves and ends, such as a job's limit less a step and a save; 0: none
    max_time_s: NonNegativeFloat = 0.0
    mini_batch_groups: PositiveInt = 16  # groups per optimizer step (verl: ppo_mini_batch_size)
    max_tokens_per_micro_batch: PositiveInt = 8192  # bounds activation memory; a longer sample has its own micro-batch
    logprob_chunk_tokens: PositiveInt = 1024  # rows of float32 logits in memory at a time; on a GPU more fit in as much
    # bfloat16: float32 weights, computation in bfloat16; auto: where the engine samples in bfloat16, see
    # rollout.engine.dtype, so that both compute alike
    mixed_precision: Literal["auto", "no", "bfloat16"] = "auto"
    activation_checkpointing: bool = False  # recompute activations in the backward pass to save memory
    cpu_offload: bool = False  # torch: FSDP keeps parameters, gradients and optimizer state in host memory
    device: Device = "auto"  # auto: cuda if there is a GPU
    threads: PositiveInt = 1  # CPU threads per rank
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class AsyncTrainingConfig(Section):
    # staleness bound, in versions: trained tokens are at most ceil(staleness_threshold) versions old; 0: synchronous
    staleness_threshold: NonNegativeFloat = 0.0
    trigger_parameter_sync_step: PositiveInt = 1  # train steps per parameter sync
    require_batches: PositiveInt = 1  # mini-batches per train step
    # true: a sync interrupts running samples, which continue afterwards; false: a sync waits until they finish
    partial_rollout: bool = True
    # fifo: in order of issue; ready_first: finished groups first, of these the one with the earliest deadline, so short
    # samples are trained fresher than long ones
    queue_policy: Literal["fifo", "ready_first"] = "fifo"
    # groups about to pass the staleness bound; wait: training waits for them in time; mask: their stale tokens are not
    # trained; drop: they are dropped, which takes more of the long samples
    overdue: Literal["wait", "mask", "drop"] = "wait"


@dataclass
class MTPConfig(Section):
    """Multi-token prediction. The draft consists of the checkpoint's MTP layers; it can be trained along with the
    policy, and used for speculative decoding."""

    enable_train: bool = False  # train the draft along with the policy; false: the draft does not change
    # acceptance: −log probability that the policy accepts a drafted token; cross_entropy: of the sampled tokens
    loss: Literal["acceptance", "cross_entropy"] = "acceptance"
    loss_scaling_factor: NonNegativeFloat = 0.1  # weight of the MTP loss relative to the policy loss
    detach_encoder: bool = True  # no gradient from the MTP loss into trunk, embedding or head
    # learning rate of the draft, on the schedule of trainer.optimizer; 0: trainer.optimizer.lr
    learning_rate: NonNegativeFloat = 0.0
    passes: PositiveInt = 1  # passes of the draft over each batch, without the trunk; above 1 needs detach_encoder
    updates_per_pass: NonNegativeInt = 0  # optimizer steps of the draft per pass; 0: 16 with detach_encoder, else 1
    init_from_trunk: bool = False  # create the draft from the last trunk layer if the checkpoint has none
    enable_rollout: bool = False  # speculative decoding with the draft
    num_speculative_tokens: PositiveInt = 1  # maximum drafted tokens per verification
    guard: bool = True  # native: a replica stops speculating while speculation lowers its throughput

    def problems(self) -> Iterator[str]:
        if self.enable_train and self.loss_scaling_factor == 0:
            yield "mtp.loss_scaling_factor: 0 trains no draft; expected more than 0, or mtp.enable_train=false"
        for key, found in (("passes", self.passes), ("updates_per_pass", self.updates_per_pass)):
            if found > 1 and not self.detach_encoder:
                yield (
                    f"mtp.{key}: {found} does not work with mtp.detach_encoder=false, where the draft learns in the "
                    "trunk's single step; expected 1, or mtp.detach_encoder=true"
                )
        if self.init_from_trunk and not (self.enable_train or self.enable_rollout):
            yield (
                "mtp.init_from_trunk: creates a draft that nothing would use; expected mtp.enable_train=true or "
                "mtp.enable_rollout=true as well"
            )


@dataclass
class DeadlinesConfig(Section):
    """Deadline of each phase of a parameter sync, in seconds. A replica or rank that misses one has failed."""

    plan_s: PositiveFloat = 60.0
    pause_s: PositiveFloat = 600.0  # with pause=wait this includes the longest sample
    unload_s: PositiveFloat = 60.0
    transfer_s: PositiveFloat = 600.0
    verify_s: PositiveFloat = 60.0
    commit_s: PositiveFloat = 60.0
    reload_s: PositiveFloat = 60.0
    resume_s: PositiveFloat = 60.0


@dataclass
class ParamSyncConfig(Section):
    transport: str = "auto"  # a name or import path, see docs/extending.md; auto: the fastest that the placement allows
    # bucket: buckets are written straight into the live weights; full: into a host copy first
    staging: Literal["bucket", "full"] = "bucket"
    # rolling: replicas update one after the other from the host copy of staging=full while the others keep generating
    rollout_update: Literal["all_at_once", "rolling"] = "all_at_once"
    # 0: the transport's own size (4, 32 or 256 MiB); otherwise at least 4096; each side holds two buckets
    bucket_bytes: NonNegativeInt = 0
    # LoRA; adapter: the base model once, then only adapters; merged: full weights at every sync, for any engine
    adapters: Literal["adapter", "merged"] = "adapter"
    # LoRA with pause=keep; move: running requests continue on the new adapter; finish: on their own (vllm, sglang)
    in_flight: Literal["move", "finish"] = "move"
    reload_draft: bool = True  # false: replicas keep the initial draft, to measure the cost of a stale draft
    allow_stale_draft: bool = False  # confirms reload_draft=false
    # running requests at a sync; abort: interrupt them; keep: suspend them; wait: let them finish;
    # auto: abort with async_training.partial_rollout, else wait
    pause: Literal["auto", "abort", "keep", "wait"] = "auto"
    # KV cache at a sync; keep: reuse it; recompute: discard its contents; unload: free its memory, too
    kv: Literal["keep", "recompute", "unload"] = "unload"
    checksum: bool = True  # verify each bucket's checksum
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)

    def problems(self) -> Iterator[str]:
        if not (self.reload_draft or self.allow_stale_draft):
            yield (
                "param_sync.reload_draft: a draft that lags behind the policy loses acceptance step by step; expected "
                "true, or false with param_sync.allow_stale_draft=true to measure the loss"
            )
        if 0 < self.bucket_bytes < 4096:
            yield f"param_sync.bucket_bytes: expected 0 or at least 4096, found {self.bucket_bytes}"
        if self.rollout_update == "rolling" and self.staging != "full":
            yield (
                f"param_sync.rollout_update: rolling replicas load from a copy on their host; expected "
                f"param_sync.staging full, found {self.staging}"
            )


@dataclass
class ValidationConfig(Section):
    """Generation on data.validation_files, if there are any."""

    every_versions: NonNegativeInt = 0  # versions between validations; 0: only before the first and after the last step
    samples: PositiveInt = 1  # per prompt
    temperature: NonNegativeFloat = 1.0  # 0: greedy
    # answers are drawn from the most probable tokens only: those with top_p of the probability, the top_k first ones,
    # those with min_p of the first one's
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # 1: off
    top_k: NonNegativeInt = 0  # 0: off
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0  # 0: off
    max_prompts: NonNegativeInt = 0  # 0: all
    # a sync waits this long for a running validation, so that one version gives all its answers; later ones come from
    # the versions that follow
    hold_s: NonNegativeFloat = 60.0


@dataclass
class CheckpointConfig(Section):
    # steps between checkpoints; the death of a rank loses the steps since the last one; 0: only at the end
    every_steps: NonNegativeInt = 100
    timeout_s: PositiveFloat = 3600.0  # the run fails if a checkpoint is not written within this time
    asynchronous: bool = True  # training blocks only while the state is copied, not while the copy is written
    keep_last: NonNegativeInt = 2  # at least 2; 0: all
    keep_best: NonNegativeInt = 0  # number kept in addition, the best by best_metric
    best_metric: str = "validation/reward"  # must be measured on the checkpoint's own weights, else it has no rating
    best_is: Literal["highest", "lowest"] = "highest"
    # which checkpoints contain a Hugging Face folder; training blocks while it is written
    export_hf: Literal["none", "final", "all"] = "final"
    # with LoRA, what is exported; adapter: PEFT's format, without the trained draft; merged: the full model
    export_lora: Literal["adapter", "merged"] = "adapter"


@dataclass
class SupervisionConfig(Section):
    """Detection of dead, unresponsive and wrong actors, and restarts."""

    max_restarts: NonNegativeInt = 3  # per actor (all ranks count as one) within window_s; 0: a death fails the run
    window_s: PositiveFloat = 600.0
    backoff_s: NonNegativeFloat = 0.5  # delay before the first restart; doubles with each further one in the window
    max_backoff_s: NonNegativeFloat = 30.0
    progress_s: PositiveFloat = 300.0  # a replica with work that yields no token for this long is restarted
    answer_s: PositiveFloat = 60.0  # an actor that does not respond for this long is restarted
    # an actor that has not started, with its engine or model loaded, after this long is restarted
    start_s: PositiveFloat = 1800.0
    # ranks are restarted if one has not ended a part of a step, or to load, copy or export its state, after this long
    train_s: PositiveFloat = 7200.0
    disk_s: PositiveFloat = 300.0  # the run fails if the disk of the ledger does not complete a write within this time
    # bounds of the KL of each replica's policy to the trainer's, in nats (0: none); five times as high for versions
    # before the trainer's weights
    mismatch_warn: NonNegativeFloat = 0.02  # a replica beyond it is named in a warning
    mismatch_stop: NonNegativeFloat = 0.2  # the run fails if a replica exceeds it in 3 consecutive measurements


@dataclass
class WandbConfig(Section):
    mode: Literal["offline", "online", "disabled"] = from_env("WANDB_MODE", "offline")
    project: str = from_env("WANDB_PROJECT", "asyncrl")
    entity: str = from_env("WANDB_ENTITY", "")
    tags: list[str] = field(default_factory=list)
    table_every_steps: NonNegativeInt = 10  # steps per table of sampled trajectories; 0: no tables


@dataclass
class PrometheusConfig(Section):
    """``/metrics`` and ``/health`` over HTTP, served by the driver."""

    port: Port = 0  # 0: off
    host: str = "127.0.0.1"  # 0.0.0.0: reachable from other machines


@dataclass
class ReportingConfig(Section):
    wandb: WandbConfig = field(default_factory=WandbConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
    tensorboard: bool = False  # event files in run_dir/tensorboard; needs the tensorboard package
    # further sinks: installed names, or import paths such as my_package.sinks:SINK
    sinks: list[str] = field(default_factory=list)
    console_every_s: NonNegativeFloat = 10.0  # interval of progress lines
    trajectories_per_step: NonNegativeInt = 2  # sampled trajectories written to trajectories/; 0: none
    report: bool = True  # write report.html at the end
    # asyncrl's log level; libraries log warnings only
    log_level: Literal["debug", "info", "warning", "error"] = "info"


Strategy = Literal["pack", "spread", "strict_pack", "strict_spread"]


@dataclass
class RayConfig(Section):
    address: str = ""  # cluster to join; empty: RAY_ADDRESS, else a cluster on this machine for this run
    cpus_per_rank: PositiveFloat = 1.0  # CPUs that Ray reserves, fractions included
    cpus_per_replica: PositiveFloat = 1.0
    # each replica shares the GPU of the rank with its number; set the part of its memory that the engine takes, such as
    # rollout.engine.args.gpu_memory_utilization=0.4 for vllm, mem_fraction_static for sglang
    share_gpus: bool = False
    # pack: few machines; spread: many; strict_pack: one; strict_spread: one per actor
    trainer_strategy: Strategy = "strict_pack"
    rollout_strategy: Literal["auto", Strategy] = "auto"  # auto: on the trainer's machine if it has room, else pack
    temp_dir: PathText = ""  # of a cluster that this run starts; empty: Ray's default
    placement_timeout_s: PositiveFloat = 30.0  # for both pools together


@dataclass
class Config(Section):
    name: str = "run"  # names the run and, by default, its folder
    run_dir: PathText = from_env("ASYNCRL_RUNS", "runs", "{}/${{name}}")  # ledger, checkpoints, metrics and logs
    # ledger and spool on a local disk, if run_dir is on a network disk; checkpoints copy them to run_dir
    journal_dir: PathText = from_env("ASYNCRL_JOURNAL", "")
    seed: NonNegativeInt = 0  # of prompt order, sampling and initialization
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
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

    @property
    def optimizer_steps(self) -> int:
        """Of a train step."""
        return self.async_training.require_batches * self.algorithm.epochs

    def problems(self) -> Iterator[str]:
        if not self.name.strip() or "/" in self.name or self.name in (".", ".."):
            yield f"name: expected a word that can name a folder, found {self.name!r}"
