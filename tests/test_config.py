"""Configuration: every problem is reported before anything starts, in one line that begins with the option's key."""

import pickle
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest

from asyncrl.config.checks import derive
from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.options import known_keys
from asyncrl.config.resume import refused_changes
from asyncrl.config.schema import Config, EngineConfig, RolloutConfig
from asyncrl.run.checks import check
from asyncrl.run.machine import local_memory_bytes

TENSOR, PIPELINE, VIRTUAL = (
    f"trainer.megatron.{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline")
)
CONTEXT, EXPERT = "trainer.megatron.context_parallel_size", "trainer.megatron.expert_model_parallel_size"
ROOT = Path(__file__).parent.parent
PYTHONS = [f"ASYNCRL_{pool}_PYTHON" for pool in ("VLLM", "SGLANG", "MEGATRON")]

REQUIRED = ["model.path=ckpt", "reward.function=package.module:score"]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt/config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text("{}\n")
    return [*REQUIRED, "data.train_files=[train.jsonl]"]


def problems(overrides, cpus=None) -> list[str]:
    with pytest.raises(ConfigError) as e:
        check(load_config(None, overrides), cpus)
    return e.value.problems


def test_overrides_reach_nested_options():
    config = load_config(None, [*REQUIRED, "rollout.n=3", "trainer.optimizer.lr=2e-4", "reward.args.strict=true"])
    assert (config.rollout.n, config.trainer.optimizer.lr, config.reward.args) == (3, 2e-4, {"strict": True})


def test_yaml_written_out_reads_back_equal(tmp_path):
    command = r"rollout.agent.command=[sh, -c, 'cd \${HOME} && C:\\\${x}']"
    config = load_config(None, [*REQUIRED, "name=again", "rollout.stop_strings=[a,b]", command])
    assert config.rollout.agent.command[2] == r"cd ${HOME} && C:\${x}"
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_a_file_extends_another_and_overrides_win(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {path: m}\nreward: {function: 'a:b'}\nrollout: {n: 2, max_turns: 5}\n")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\nrollout:\n  n: 4\ntrainer:\n  optimizer:\n    lr: 1e-3\n")
    config = load_config(tmp_path / "more.yaml", ["rollout.n=6"])
    assert (config.rollout.n, config.rollout.max_turns, config.trainer.optimizer.lr) == (6, 5, 1e-3)


def test_an_empty_mapping_clears_what_lower_layers_give(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {path: m, overrides: {rope_theta: 2}}\nreward: {function: none}\n")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\nmodel: {overrides: {}}\nrollout: {}\n")
    config = load_config(tmp_path / "more.yaml", ["reward.args.a=1", "reward.args={}", "reward.args.b=2"])
    assert (config.model.overrides, config.reward.args, config.rollout) == ({}, {"b": 2}, RolloutConfig())


@pytest.mark.parametrize("text", ["${x}", "a ${x} b", r"\${x}", r"c:\d\\${x}", "$x{", "${secret:KEY} of ${x}", "\\"])
def test_texts_with_dollars_and_braces_are_written_so_that_they_are_read_again(tmp_path, text):
    config = load_config(None, REQUIRED)
    config = replace(config, reward=replace(config.reward, args={"a": text, "b": [{"c": text}]}))
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert load_config(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.replica=3", "rollout.replica: unknown key; did you mean rollout.replicas?"),
        ("staleness_threshold=1", "did you mean async_training.staleness_threshold?"),
        ("rollout.n=many", "rollout.n: expected int, found 'many'"),
        ("rollout=3", "rollout: expected a group of options, found 3"),
        ("rollout.n", "expected key.path=value"),
    ],
)
def test_a_bad_override_is_one_line_naming_the_key(override, expected):
    with pytest.raises(ConfigError) as e:
        load_config(None, [*REQUIRED, override])
    assert len(e.value.problems) == 1
    assert expected in e.value.problems[0]


def test_a_file_with_several_problems_reports_them_all_and_where_each_is_set(tmp_path):
    (tmp_path / "base.yaml").write_text("rollout: {n: 0, replica: 2}\ndata: 3\n")
    (tmp_path / "more.yaml").write_text("extends: base.yaml\nalgorithm: {clip_low: 2}\nmtp: {enable_rollout: maybe}\n")
    with pytest.raises(ConfigError) as e:
        load_config(tmp_path / "more.yaml", ["model.path=m", "rollout.engine.dtype=half"])
    assert set(e.value.problems) == {
        "reward.function: must be given, has no default (expected str)",
        "rollout.n: expected at least 1, found 0 (in base.yaml)",
        "rollout.replica: unknown key; did you mean rollout.replicas? (in base.yaml)",
        "data: expected a group of options, found 3 (in base.yaml)",
        "algorithm.clip_low: expected at least 0 and at most 1, found 2 (in more.yaml)",
        "mtp.enable_rollout: expected bool, found 'maybe' (in more.yaml)",
        "rollout.engine.dtype: expected one of auto, float32, bfloat16; found 'half'",
    }


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("rollout:", "rollout: expected a group of options, found None (in more.yaml)"),
        ("rollout: [1, 2]", "rollout: expected a group of options, found [1, 2] (in more.yaml)"),
        ("trainer: {optimizer: }", "trainer.optimizer: expected a group of options, found None (in more.yaml)"),
        ("rollout: {n: {a: 1}}", "rollout.n: expected int, found {'a': 1} (in more.yaml)"),
        ("data: {train_files: {0: a}}", "data.train_files: expected list[str], found {0: 'a'} (in more.yaml)"),
        ("rollout: {engine: {args: [1]}}", "rollout.engine.args: expected dict[str, Any], found [1] (in more.yaml)"),
        ("model: {path: '???'}", "model.path: must be given, has no default (expected str)"),
    ],
)
def test_a_value_of_the_wrong_shape_does_not_replace_the_file_below(tmp_path, group, expected):
    (tmp_path / "base.yaml").write_text("model: {path: m}\nreward: {function: 'a:b'}\nrollout: {n: 16}\n")
    (tmp_path / "more.yaml").write_text(f"extends: base.yaml\n{group}\n")
    with pytest.raises(ConfigError) as e:
        load_config(tmp_path / "more.yaml", ["rollout.max_response_tokens=9", "trainer.optimizer.lr=1"])
    assert e.value.problems == [expected]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=8.0", "rollout.n: expected int, found 8.0"),
        ("rollout.stop_token_ids=[true]", "rollout.stop_token_ids: expected list[int], found [True]"),
        ("rollout.n=true", "rollout.n: expected int, found True"),
        ("rollout.temperature=false", "rollout.temperature: expected float, found False"),
        ("name=on", "name: expected str, found True"),
        ("rollout.stop_strings=[no]", "rollout.stop_strings: expected list[str], found [False]"),
        (
            "trainer.mixed_precision=no",
            "trainer.mixed_precision: expected one of auto, no, bfloat16; found False (YAML reads an unquoted no, yes, "
            "off or on as a boolean)",
        ),
    ],
)
def test_a_number_is_neither_a_boolean_nor_a_fraction(override, expected):
    with pytest.raises(ConfigError) as e:
        load_config(None, [*REQUIRED, override])
    assert e.value.problems == [expected]


def test_numbers_may_come_from_the_environment_and_strings_may_look_like_numbers(monkeypatch):
    monkeypatch.setenv("SLOTS", "8")
    config = load_config(None, [*REQUIRED, "rollout.engine.slots=${oc.env:SLOTS}", "validation.top_p=1", "name=2024"])
    assert (config.rollout.engine.slots, config.validation.top_p, config.name) == (8, 1.0, "2024")


def test_a_home_folder_is_found_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    paths = ["model.path", "run_dir", "journal_dir", "ray.temp_dir", "algorithm.reference_path"]
    paths += [f"{process}.python" for process in ("rollout.engine", "rollout.agent", "trainer", "sandbox")]
    lists = ["data.train_files", "data.validation_files", "sandbox.paths"]
    options = ["reward.function=f", "algorithm.kl_coef=0.1", "rollout.agent.path=a:b"]
    options += [f"{key}=~/{key}" for key in paths] + [f"{key}=[~/{key}, other]" for key in lists]
    found = load_config(None, [*options, "rollout.stop_strings=[~/]"])
    for key in paths:
        assert attrgetter(key)(found) == f"/home/me/{key}"
    for key in lists:
        assert attrgetter(key)(found) == [f"/home/me/{key}", "other"]
    assert found.rollout.stop_strings == ["~/"]


def test_where_code_runs_may_differ_in_a_resumed_run():
    before = load_config(None, [*REQUIRED, "rollout.agent.python=a/python", "sandbox.concurrent=4"])
    now = load_config(None, [*REQUIRED, "rollout.agent.python=b/python", "sandbox.kind=remote", "sandbox.url=http://b"])
    assert refused_changes(before, now) == []
    (problem,) = refused_changes(before, replace(now, seed=7))
    assert problem.startswith("seed: the run to resume has 0, found 7; ")


def test_a_section_is_validated_wherever_it_is_constructed():
    with pytest.raises(ValueError, match="Input should be greater than 0"):
        EngineConfig(slots=0)
    with pytest.raises(ValueError, match=r"rollout\.min_group_size: expected at most rollout\.n = 1, found 2"):
        RolloutConfig(n=1)
    with pytest.raises(ValueError, match="Input should be greater than 0"):
        replace(Config().rollout, replicas=0)


def test_a_config_crosses_processes_unchanged():
    config = load_config(None, [*REQUIRED, "rollout.engine.args.seed=3", "trainer.optimizer.betas=[0.8, 0.9]"])
    assert pickle.loads(pickle.dumps(config)) == config


def test_missing_values_and_files_are_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path: must be given"):
        load_config(None, [])
    with pytest.raises(ConfigError, match="no such config file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1,\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"bad.yaml: expected text in UTF-8, found byte 3 that is none \(.*\)$"):
        load_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.replicas=0", "rollout.replicas: expected at least 1, found 0"),
        ("rollout.temperature=0", "rollout.temperature: expected more than 0"),
        ("validation.top_p=1.5", "validation.top_p"),
        ("rollout.top_p=0.9", "rollout.top_p: unknown key; did you mean validation.top_p?"),
        ("algorithm.kl_estimator=k9", "algorithm.kl_estimator: expected one of k1, k2, k3; found 'k9'"),
        (
            "algorithm.anchor=rollout",
            "algorithm.anchor: expected one of behaviour, proximal, loglinear",
        ),
        ("algorithm.corrections=[tis]", "algorithm.corrections: the ratio to algorithm.anchor=behaviour already"),
        (
            "algorithm.sapo_tau_positive=2",
            "algorithm.sapo_tau_positive: read only by sapo, not selected here; expected its",
        ),
        ("algorithm.args={x: 1}", "algorithm.args: no selected item reads 'x'; expected none"),
        ("algorithm.dual_clip=1.1", "algorithm.dual_clip: expected 0, or more than 1 + clip_high = 1.2, found 1.1"),
        ("algorithm.kl_unbiased=true", "algorithm.kl_unbiased: read only with algorithm.kl_coef above 0"),
        ("algorithm.kl_estimator=k2", "algorithm.kl_estimator: read only with algorithm.kl_coef above 0; expected its"),
        ("algorithm.overlong_penalty=1", "algorithm.overlong_penalty: only algorithm.overlong=penalize reads it"),
        ("algorithm.denominators=trained", "algorithm.denominators: owned and trained tokens differ only with"),
        ("algorithm.entropy_step=0.1", "algorithm.entropy_step: read only with algorithm.entropy_target; expected its"),
        ("algorithm.overlong_penalty=-1", "algorithm.overlong_penalty: expected more than 0"),
        ("algorithm.std_ddof=2", "algorithm.std_ddof: expected at least 0 and at most 1, found 2"),
        ("rollout.shards=2", "rollout.shards: each needs a replica; expected at most 1, found 2"),
        ("rollout.max_attempts=0", "rollout.max_attempts: expected at least 1, found 0"),
        ("reward.memory_mb=0", "reward.memory_mb: expected at least 1, found 0"),
        ("reward.secrets=[KEY,HOME]", "reward.secrets: a worker has its own HOME; expected names of other variables"),
        ("reward.on_failure=zero", "reward.on_failure: expected one of drop, value; found 'zero'"),
        ("param_sync.deadlines.plan_s=0", "param_sync.deadlines.plan_s: expected more than 0"),
        ("model.path=nowhere", "model.path: no checkpoint at nowhere"),
        ("data.train_files=[absent.jsonl]", "data.train_files: no such file: absent.jsonl"),
        (
            "algorithm.surrogate=ppo",
            "algorithm.surrogate: expected one of cispo, clip, gspo, sapo, or",
        ),
        ("seed=-1", "seed: expected at least 0, found -1"),
        ("trainer.optimizer.betas=[0.9,1.5]", "trainer.optimizer.betas: expected two numbers, 0 ≤ beta < 1"),
        ("trainer.optimizer.betas=[0.9]", "trainer.optimizer.betas: expected two numbers"),
        ("trainer.optimizer.weight_decay=-1", "trainer.optimizer.weight_decay: expected at least 0"),
        ("trainer.optimizer.eps=0", "trainer.optimizer.eps: expected more than 0, found"),
        ("ray.cpus_per_rank=0", "ray.cpus_per_rank: expected more than 0, found"),
        ("ray.cpus_per_replica=-1", "ray.cpus_per_replica: expected more than 0, found"),
        ("validation.temperature=-1", "validation.temperature: expected at least 0"),
        ("validation.temperature=1e-6", "validation.temperature: expected at least 1e-05, found 1e-06"),
        ("validation.max_prompts=-5", "validation.max_prompts: expected at least 0"),
        ("data.max_prompt_tokens=-3", "data.max_prompt_tokens: expected at least 0"),
        ("data.epochs=-1", "data.epochs: expected at least 0"),
        ("rollout.engine.max_context_tokens=-1", "rollout.engine.max_context_tokens: expected at least 0"),
        ("rollout.engine.dtype=float16", "rollout.engine.dtype: expected one of auto, float32, bfloat16"),
        ('rollout.stop_strings=[""]', "rollout.stop_strings: expected texts, found an empty one"),
        (
            "trainer.megatron.tensor_model_parallel_size=2",
            "trainer.megatron: only the megatron backend reads it; expected its default, or trainer.backend=megatron",
        ),
        (
            "model.bridge=mbridge",
            "model.bridge: only the megatron backend reads it; expected its default",
        ),
        ("checkpoint.keep_last=1", "checkpoint.keep_last: expected at least 2"),
        ("checkpoint.keep_best=1", "checkpoint.keep_best: no checkpoint but the last would have a validation/reward"),
        ("name=a/b", "name: expected a word that can name a folder, found 'a/b'"),
        ("name=''", "name: expected a word that can name a folder, found ''"),
    ],
)
def test_impossible_values_are_refused(files, override, expected):
    found = problems([*files, override])
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["algorithm.anchor=proximal", "async_training.staleness_threshold=1"],
            "algorithm.corrections: with algorithm.anchor=proximal nothing corrects stale tokens",
        ),
        (
            ["algorithm.anchor=proximal", "async_training.trigger_parameter_sync_step=2"],
            "algorithm.corrections: with algorithm.anchor=proximal nothing corrects stale tokens",
        ),
        (["algorithm.anchor=proximal", "algorithm.corrections=[tis,mis]"], "tis and mis weigh tokens by importance"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k1"], "as a loss, k1's gradient is zero in the mean"),
        (
            ["algorithm.anchor=loglinear", "async_training.staleness_threshold=0"],
            "algorithm.anchor: loglinear lies between the policies that sampled and train, which here are the same",
        ),
        (
            ["algorithm.kl_reward_coef=0.1", "async_training.overdue=mask", "async_training.staleness_threshold=1"],
            "algorithm.kl_reward_coef: a sample would lose the KL of only those tokens that",
        ),
        (
            ["algorithm.overlong=penalize", "algorithm.overlong_buffer=99999"],
            "algorithm.overlong_buffer: expected at most rollout.max_response_tokens=",
        ),
        (["algorithm.reference_path=there"], "algorithm.reference_path: read only with algorithm.kl_coef or"),
        (["algorithm.corrections=[reject,reject]"], "algorithm.corrections: expected each once, found reject, reject"),
        (
            ["algorithm.advantage=reinforce_pp", "rollout.n=1", "rollout.min_group_size=1"],
            "algorithm.filter_zero_variance: a group of one sample has equal rewards",
        ),
        (
            ["rollout.n=1", "rollout.min_group_size=1", "algorithm.filter_zero_variance=false"],
            "rollout.n: grpo compares the samples of a group and needs at",
        ),
        (
            ["algorithm.surrogate=gspo", "algorithm.dual_clip=3"],
            "algorithm.dual_clip: read only by clip, not selected here",
        ),
    ],
)
def test_options_of_the_loss_that_contradict_each_other_are_refused(files, overrides, expected):
    found = problems([*files, *overrides])
    assert len(found) == 1
    assert expected in found[0]


def test_a_penalty_with_a_target_of_the_entropy_and_two_kinds_of_kl_are_refused():
    common = ["model.path=x", "reward.function=arithmetic", "async_training.staleness_threshold=1"]
    for options, problem in (
        (["entropy_coef=-0.1", "entropy_target=0.5"], "algorithm.entropy_coef: a penalty works against algorithm.entr"),
        (
            ["kl_coef=0.1", "kl_reward_coef=0.1"],
            "algorithm.kl_reward_coef: the KL would count twice, in the reward and",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_config(None, [*common, *(f"algorithm.{option}" for option in options)])


def test_on_policy_training_with_the_proximal_anchor_needs_no_weight(files):
    check(load_config(None, [*files, "algorithm.anchor=proximal"]))


def test_off_policy_training_with_the_proximal_anchor_may_only_reject(files):
    stale = ["async_training.staleness_threshold=1"]
    check(load_config(None, [*files, *stale, "algorithm.anchor=proximal", "algorithm.corrections=[reject]"]))


def test_keep_best_needs_a_checkpoint_that_is_validated(files):
    validated = ["data.validation_files=[train.jsonl]", "validation.every_versions=3", "checkpoint.keep_best=1"]
    often = ["async_training.trigger_parameter_sync_step=2", "checkpoint.every_steps=10"]
    check(load_config(None, [*files, *validated, *often, "trainer.total_steps=31"]))  # step 30 is both
    (found,) = problems([*files, *validated, *often, "trainer.total_steps=30"])
    assert found.startswith("checkpoint.keep_best: no checkpoint but the last")
    check(load_config(None, [*files, "checkpoint.keep_best=1", "checkpoint.best_metric=critic/rewards/mean"]))


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_every_number_must_be_finite(files, value):
    floats = [key for key, kind in known_keys().items() if kind is float]
    written = value.replace("inf", ".inf").replace("nan", ".nan")
    found = problems([*files, *(f"{key}={written}" for key in floats), f"trainer.optimizer.betas=[0.9,{written}]"])
    betas = f"trainer.optimizer.betas: expected finite numbers, found [0.9, {value}]"
    assert set(found) == {betas, *(f"{key}: expected a finite number, found {value}" for key in floats)}


def test_a_baseline_of_the_group_needs_two_samples(files):
    one = ["rollout.n=1", "rollout.min_group_size=1", "algorithm.filter_zero_variance=false"]
    (found,) = problems([*files, *one, "algorithm.advantage=reinforce_pp", "algorithm.group_baseline=true"])
    assert found.startswith("algorithm.group_baseline: an only sample has no baseline but itself")


def test_a_group_of_one_is_refused(files):
    found = problems([*files, "rollout.n=1", "rollout.min_group_size=1", "algorithm.filter_zero_variance=false"])
    assert found == ["rollout.n: grpo compares the samples of a group and needs at least 2, found 1"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["trainer.ranks=3", f"{TENSOR}=2"],
            "trainer.ranks: expected a multiple of the 2",
        ),
        (
            [
                "trainer.ranks=8",
                f"{TENSOR}=2",
                f"{PIPELINE}=2",
            ],
            "trainer.ranks: a step may have only 1 samples, too few for 2 copies of the model",
        ),
        (
            [
                "trainer.ranks=2",
                f"{PIPELINE}=2",
                f"{VIRTUAL}=2",
            ],
            f"{VIRTUAL}: 2 chunks per stage need {PIPELINE} of at least 3, found 2",
        ),
        ([f"{TENSOR}=0"], f"{TENSOR}: expected at least 1"),
        (["trainer.megatron.sequence_parallel=true"], "sequence_parallel: needs tensor parallel ranks"),
        (["trainer.ranks=3", f"{CONTEXT}=2"], "trainer.ranks: expected a multiple of the 2"),
        ([f"{EXPERT}=2"], f"{EXPERT}: expected a divisor of the 1 ranks of a pipeline"),
        (
            ["trainer.cpu_offload=true"],
            "trainer.cpu_offload: expected false; the Megatron backend has trainer.megatron",
        ),
    ],
)
def test_options_that_the_megatron_backend_does_not_support_are_refused(files, overrides, expected):
    few = ["trainer.mini_batch_groups=1", "rollout.min_group_size=1"]
    found = problems([*files, "trainer.backend=megatron", *few, *overrides])
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["model.lora.rank=-1"], "model.lora.rank: expected at least 0, found -1"),
        (["model.lora.alpha=0"], "model.lora.alpha: expected more than 0, found 0"),
        (["model.lora.target_modules=[]"], "model.lora.target_modules: expected all-linear or module name suffixes"),
        (["param_sync.adapters=mixed"], "param_sync.adapters: expected one of adapter, merged; found 'mixed'"),
        (
            ["rollout.engine.name=vllm", "rollout.engine.pipeline_parallel_size=2"],
            "param_sync.adapters: vllm takes no adapters with pipeline stages; expected merged",
        ),
        (
            ["rollout.engine.name=vllm", "model.lora.rank=513"],
            "model.lora.rank: vllm supports ranks up to 512, found 513",
        ),
        (
            ["mtp.enable_train=true"],
            "checkpoint.export_lora: PEFT's format cannot hold the draft of mtp.enable_train; expected merged",
        ),
    ],
)
def test_lora_options_that_no_part_supports_are_refused(files, overrides, expected):
    found = problems([*files, "model.lora.rank=8", *overrides])
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_requests_finish_on_their_adapters_only_if_the_engine_keeps_several(files):
    adapters = ["model.lora.rank=8", "param_sync.in_flight=finish"]
    can = [*files, *adapters, "rollout.engine.name=vllm", "param_sync.pause=keep", "param_sync.kv=keep"]
    check(load_config(None, can))
    check(load_config(None, [*can, "rollout.engine.name=sglang"]))
    for wrong in ("param_sync.kv=recompute", "model.lora.rank=0"):
        (found,) = problems([*can, wrong])
        assert found.startswith("param_sync.in_flight: requests can finish on their own adapter if adapters are synced")
    (found,) = problems([*can, "rollout.engine.name=native"])
    assert found == "param_sync.in_flight: the native engine moves requests to the new weights; expected move"
    (found,) = problems([*can, "async_training.overdue=mask"])
    assert found.startswith("param_sync.in_flight: the number of adapters in use is bounded only if no group outlives")


def test_an_engine_without_adapters_is_sent_merged_weights(files, monkeypatch):
    monkeypatch.setattr("asyncrl.rollouter.engines.native.spec.ENGINE.takes_adapters", False)
    (found,) = problems([*files, "model.lora.rank=8"])
    assert found == "param_sync.adapters: the native engine takes no adapters; expected merged"
    check(load_config(None, [*files, "model.lora.rank=8", "param_sync.adapters=merged"]))
    check(load_config(None, files))


def test_speculation_needs_room_in_the_context_and_excludes_deterministic_mode(files):
    speculate = [*files, "mtp.enable_rollout=true", "mtp.num_speculative_tokens=5"]
    check(load_config(None, [*speculate, "rollout.engine.max_context_tokens=7"]))
    (small,) = problems([*speculate, "rollout.engine.max_context_tokens=6"])
    assert small.startswith("mtp.num_speculative_tokens: expected at most 4")
    (fixed,) = problems([*speculate, "rollout.engine.deterministic=true"])
    assert "mtp.enable_rollout: does not work with rollout.engine.deterministic" in fixed


def test_a_zero_divisor_is_refused(files):
    assert problems([*files, "rollout.n=0"])[0] == "rollout.n: expected at least 1, found 0"


def test_local_memory_does_not_exceed_the_machine_s():
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert 0 < local_memory_bytes() <= total_kib * 1024


def test_pause_must_be_compatible_with_kv_and_partial_rollout(files):
    assert "param_sync.kv" in problems([*files, "param_sync.pause=keep", "param_sync.kv=unload"])[0]
    (stale,) = problems([*files, "param_sync.reload_draft=false"])
    assert "param_sync.allow_stale_draft=true" in stale
    (rolling,) = problems([*files, "param_sync.rollout_update=rolling"])
    assert "expected param_sync.staging full, found bucket" in rolling
    assert problems([*files, "param_sync.kv=keep"]) == [
        "param_sync.kv: keep does not work with pause abort in the native engine; expected one of recompute, unload"
    ]
    cut = problems([*files, "param_sync.pause=abort", "async_training.partial_rollout=false"])
    assert "use wait" in cut[0]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_options_of_the_native_engine_are_refused_for_other_engines(files, engine):
    for option in ("rollout.engine.deterministic=true", "param_sync.staging=full"):
        (problem,) = problems([*files, f"rollout.engine.name={engine}", option])
        assert problem.startswith(option.partition("=")[0])
        assert engine in problem


def test_options_that_sglang_does_not_support_are_refused(files):
    sglang = [*files, "rollout.engine.name=sglang"]
    (problem,) = problems([*sglang, "rollout.engine.pipeline_parallel_size=2"])
    assert "can be opened only once; expected 1, found 2" in problem
    (problem,) = problems([*sglang, "mtp.enable_rollout=true", "rollout.engine.device=cpu"])
    assert "greedy at any temperature" in problem
    (problem,) = problems([*sglang, "rollout.engine.data_parallel_size=2"])
    assert "cannot sync separate copies of a model" in problem
    check(load_config(None, [*sglang, "rollout.engine.delivery=gloo"]))
    (problem,) = problems([*sglang, "rollout.engine.delivery=nccl", "rollout.engine.device=cpu"])
    assert problem.startswith("rollout.engine.delivery: nccl joins GPUs")
    (problem,) = problems([*files, "rollout.engine.delivery=gloo"])
    assert problem == "rollout.engine.delivery: the native engine offers memory, found gloo"
    adapters = [*sglang, "model.lora.rank=8"]
    check(load_config(None, adapters))
    (problem,) = problems([*adapters, "param_sync.pause=keep", "param_sync.kv=keep"])
    assert problem.startswith("param_sync.in_flight: sglang cannot move a request to another adapter")
    (problem,) = problems([*adapters, "rollout.engine.delivery=gloo"])
    assert problem.startswith("rollout.engine.delivery: sglang's server takes adapters only from memory")
    check(load_config(None, [*adapters, "rollout.engine.delivery=gloo", "param_sync.adapters=merged"]))


def test_problems_of_the_config_and_of_all_parts_are_reported_at_once(files):
    parts = ["rollout.engine.name=vlm", "trainer.backend=math:pi", "algorithm.advantage=no_such_module:ADVANTAGE"]
    parts += ["param_sync.transport=pigeon", "reporting.sinks=[nowhere]"]
    found = problems([*files, *parts, "param_sync.in_flight=finish"])
    assert [problem.partition(":")[0] for problem in found] == [
        "param_sync.in_flight",
        "rollout.engine.name",
        "trainer.backend",
        "algorithm.advantage",
        "param_sync.transport",
        "reporting.sinks",
    ]
    assert "expected one of native, sglang, vllm, or an import path such as package.module:ENGINE" in found[1]
    assert "math:pi lacks check_model, distributions" in found[2]
    assert "module no_such_module does not import" in found[3]


def test_more_ranks_than_cpus_are_refused_on_one_machine(files):
    assert "trainer.ranks: 3 ranks" in problems([*files, "trainer.ranks=3"], cpus=2)[0]
    assert "rollout.replicas" in problems([*files, "rollout.replicas=2"], cpus=2)[0]
    check(load_config(None, [*files, "rollout.replicas=2", "ray.cpus_per_replica=0.5"]), cpus=2)


def test_problems_of_several_sections_are_reported_at_once(files):
    assert len(problems([*files, "rollout.replicas=0", "rollout.temperature=0", "trainer.total_steps=0"])) == 3


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["rollout.autoscale={min: 1, max: 9}"], "rollout.shards: each needs a replica; expected at most 1, found 2"),
        (["rollout.max_concurrent_groups=1"], "rollout.max_concurrent_groups: expected at least one for each of 2"),
        (["rollout.agent.path=x:y", "rollout.agent.port=80"], "rollout.agent.port: each of 2 rollout.shards has an"),
        (
            ["data.curriculum.by=level", "data.epochs=0"],
            "rollout.shards: a curriculum draws each prompt by all earlier",
        ),
    ],
)
def test_what_shards_cannot_have_is_refused(files, options, problem):
    found = problems([*files, "rollout.replicas=4", "ray.cpus_per_replica=0.1", "rollout.shards=2", *options])
    assert any(line.startswith(problem) for line in found), found


def test_derived_figures(files):
    config = load_config(
        None,
        [
            *files,
            "trainer.mini_batch_groups=4",
            "async_training.require_batches=2",
            "async_training.trigger_parameter_sync_step=3",
            "async_training.staleness_threshold=0.1",
            "trainer.total_steps=5",
            "async_training.partial_rollout=false",
        ],
    )
    d = derive(config)
    assert (d.groups_per_step, d.groups_per_version, d.total_groups, d.staleness_bound) == (8, 24, 40, 1)
    assert d.staleness_threshold * 10 == 1  # exactly a tenth
    assert d.pause == "wait"


@pytest.mark.parametrize("file", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda file: file.stem)
def test_every_bundled_config_is_valid(file, monkeypatch):
    """Except that files which it names may be missing: they are generated or the user's."""
    for variable in ("MODEL_PATH", "TRAIN_FILE", "VALIDATION_FILE", *PYTHONS):
        monkeypatch.setenv(variable, "/somewhere")
    problems = []
    try:
        check(load_config(file))
    except ConfigError as e:
        problems = e.problems
    assert all("no checkpoint at" in p or "no such file" in p for p in problems), problems
