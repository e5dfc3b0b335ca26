"""``asyncrl eval``: checkpoints of runs and Hugging Face folders on prompt files."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from asyncrl.cli import eval as command
from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.schema import CheckpointConfig
from asyncrl.evaluation.answers import evaluation_config
from asyncrl.evaluation.checkpoints import export, find
from asyncrl.evaluation.estimates import Estimate, pass_at_k
from asyncrl.evaluation.evaluate import plan
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.config import ModelConfig
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.run.checks import check
from asyncrl.run.preflight import kv_cache_bytes, preflight
from asyncrl.trainer.checkpoints import CheckpointMetadata, CheckpointStore
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.versions import PolicyVersion
from tests.support.tiny import make_inputs, overrides
from tests.support.trainer import make_groups

ON_CPUS = "rollout.engine.device=cpu"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def run(inputs, tmp_path_factory):
    """Folder of a run with checkpoints of steps 2 and 4, of which the last has exported weights."""
    folder = tmp_path_factory.mktemp("run") / "run"
    config = load_config(None, [*overrides(inputs, folder), ON_CPUS, "trainer.device=cpu"])
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    store = CheckpointStore(folder / "checkpoints", config.checkpoint)
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    for step in range(1, 5):
        rank.train(step, make_groups(seed=step))
        if step % 2 == 0:
            partial = store.begin(step)
            rank.save(partial / "state")
            if step == 4:
                rank.export_hf(partial / "hf")
            store.complete(partial, CheckpointMetadata(step, PolicyVersion(0, step), 3 * step, 3 * step))
    rank.close()
    return folder


def evaluated(capsys, *arguments):
    status = command.main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    return status, out, err


def test_all_checkpoints_of_a_run_are_evaluated_alike_whenever_it_is_asked(run, capsys, tmp_path):
    status, out, err = evaluated(capsys, run, "validation.samples=3", "--out", tmp_path)
    assert status == 0, err
    figures = json.loads(out.splitlines()[-1])
    assert list(figures) == ["step_000002", "step_000004"]
    assert json.loads((tmp_path / "figures.json").read_text()) == figures
    for name, values in figures.items():
        answers = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert len(answers) == 6 * 3
        assert values["prompts"] == 6
        successes = np.array([a["success"] for a in answers]).reshape(6, 3)
        assert values["pass@1"] == pytest.approx(successes.mean())
        assert values["pass@3"] == pytest.approx(successes.any(1).mean())
        assert values["mean@3"] == pytest.approx(np.mean([a["reward"] for a in answers]))
        assert values["pass@1"] <= values["pass@2"] <= values["pass@3"]
    again = evaluated(capsys, run / "checkpoints/step_000004", "validation.samples=3", "--out", tmp_path / "again")
    assert json.loads(again[1].splitlines()[-1]) == {"step_000004": figures["step_000004"]}


def test_a_checkpoint_without_exported_weights_is_exported(run, tmp_path):
    first, last = find(run)
    assert (first.folder, last.folder) == (None, run / "checkpoints/step_000004/hf")
    export(last, tmp_path)
    ours, theirs = read_tensors(tmp_path), read_tensors(last.folder)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())


def test_a_hugging_face_folder_is_evaluated_with_a_config(inputs, tmp_path, capsys):
    options = (*overrides(inputs, tmp_path / "run"), ON_CPUS)
    (tmp_path / "config.yaml").write_text("name: tiny\n")
    status, out, err = evaluated(
        capsys, inputs / "checkpoint", "--config", tmp_path / "config.yaml", "--out", tmp_path / "out", *options
    )
    assert status == 0, err
    assert list(json.loads(out.splitlines()[-1])) == ["checkpoint"]
    options += ("model.overrides.max_position_embeddings=16",)
    options += ("--config", tmp_path / "config.yaml", "--out", tmp_path / "again")
    status, _, err = evaluated(capsys, inputs / "checkpoint", *options)
    assert status == 1
    assert "checkpoint: rollout.engine.max_context_tokens: 64 is more than the model's 16" in err


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "expected a run's folder, a checkpoint of one, or a Hugging Face folder"),
        ("checkpoint", "--config: expected a file of options, as the paths are not all of one run"),
    ],
)
def test_bad_paths_are_refused_in_a_line(inputs, capsys, path, message):
    status, _, err = evaluated(capsys, inputs / path)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_without_prompts_there_is_nothing_to_evaluate(run, capsys):
    status, _, err = evaluated(capsys, run, "data.validation_files=[]")
    assert (status, err.count("\n")) == (2, 1)
    assert "data.validation_files: expected the prompt files to evaluate on, found none" in err


@pytest.mark.parametrize(
    "options",
    [
        "rollout.replicas=2 rollout.shards=2",
        "rollout.replicas=2 rollout.autoscale.min=2 rollout.autoscale.max=4",
        "mtp.enable_train=true mtp.init_from_trunk=true",
        "rollout.engine.name=vllm model.lora.rank=4 param_sync.pause=keep param_sync.kv=keep "
        "param_sync.in_flight=finish",
        "async_training.partial_rollout=false param_sync.kv=keep",
        "checkpoint.keep_best=1 trainer.total_steps=200 validation.every_versions=1",
    ],
)
def test_options_that_only_a_run_reads_do_not_prevent_its_evaluation_on_one_cpu(inputs, tmp_path, options):
    config = load_config(None, [*overrides(inputs, tmp_path / "run"), *options.split()])
    check(config)
    check(evaluation_config(config, inputs / "checkpoint"), cpus=1)


def test_an_evaluation_needs_the_memory_of_one_replica(inputs, tmp_path, monkeypatch):
    each = kv_cache_bytes(ModelConfig.load(inputs / "checkpoint"), 8, 64, "float32")
    monkeypatch.setattr("asyncrl.run.preflight.local_memory_bytes", lambda: 4 * each)
    config = load_config(None, [*overrides(inputs, tmp_path / "run"), ON_CPUS, "rollout.autoscale.max=16"])
    with pytest.raises(ConfigError, match="of KV cache, more than"):
        preflight(config, cpus=1)
    preflight(evaluation_config(config, inputs / "checkpoint"), cpus=1)


def test_a_run_and_one_of_its_checkpoints_are_of_one_run_however_their_paths_are_written(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    _, models, out = plan([Path("run"), Path("run/checkpoints/step_000004")], None, None, [])
    assert [model.name for model in models] == ["step_000002", "step_000004"]
    assert out == run / "eval"


def test_an_override_may_be_longer_than_a_files_name(run, capsys):
    status, _, err = evaluated(capsys, run, f"rollout.stop_strings=[{'x' * 300}]", "data.validation_files=[]")
    assert (status, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("taken", ["out", "out/figures.json/folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_any_answer(run, capsys, tmp_path, taken):
    (tmp_path / taken).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / taken).touch()
    status, out, err = evaluated(capsys, run, "--out", tmp_path / "out")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"--out: expected a folder to write to, found {tmp_path / 'out'}" in err


def test_figures_outlive_answers_that_cannot_be_written(run, capsys, tmp_path):
    (tmp_path / "step_000004.jsonl").mkdir()
    status, out, err = evaluated(capsys, run / "checkpoints/step_000004", "--out", tmp_path)
    assert status == 1
    assert "step_000004: IsADirectoryError: " in err
    assert list(json.loads(out.splitlines()[-1])) == ["step_000004"]
    assert json.loads((tmp_path / "figures.json").read_text()) == json.loads(out.splitlines()[-1])


def test_prompts_with_a_failed_answer_are_left_out_and_counted(run, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lengths = (1, 500, 1)
    rows = [json.dumps({"prompt": f"Compute {'+'.join('1' * n)}", "answer": str(n)}) + "\n" for n in lengths]
    prompts.write_text("".join(rows))
    path = run / "checkpoints/step_000004"
    options = (f"data.validation_files=[{prompts}]", "validation.samples=2", "--out", tmp_path)
    status, out, err = evaluated(capsys, path, *options)
    assert status == 0
    figures = json.loads(out.splitlines()[-1])["step_000004"]
    assert (figures["prompts"], figures["left_out"], figures["failed"]) == (3, 1, 2)
    assert "2 of 6 answers failed, so 1 of 3 prompts are left out of the figures" in err


def test_half_an_emoji_is_written_as_a_question_mark(run, capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Compute 1+1", "answer": "2 \ud83d"}) + "\n")
    path = run / "checkpoints/step_000004"
    status, _, err = evaluated(capsys, path, f"data.validation_files=[{prompts}]", "--out", tmp_path)
    assert status == 0, err
    assert json.loads((tmp_path / "step_000004.jsonl").read_text())["answer"] == "2 ?"


def test_a_damaged_checkpoint_is_reported_and_the_others_evaluated(run, capsys, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    weights = copy / "checkpoints/step_000004/hf/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")  # it would load
    status, out, err = evaluated(capsys, copy)
    assert status == 1
    assert list(json.loads(out.splitlines()[-1])) == ["step_000002"]
    assert f"step_000004: CheckpointError: {weights} is damaged" in err


@pytest.mark.slow
def test_a_checkpoint_whose_weights_do_not_load_is_reported_and_the_others_evaluated(run, capsys, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy, symlinks=True)
    store = CheckpointStore(copy / "checkpoints", CheckpointConfig())
    partial, first = store.begin(2), store.all()[0]
    shutil.copytree(first.path / "state", partial / "state", copy_function=lambda _, file: Path(file).touch())
    store.complete(partial, first.metadata)
    status, out, err = evaluated(capsys, copy)
    assert status == 1
    assert list(json.loads(out.splitlines()[-1])) == ["step_000004"]
    assert "step_000002: " in err
    assert "its weights cannot be exported" in err


def test_pass_at_k_is_the_share_of_draws_with_a_success():
    rng = np.random.default_rng(0)
    for samples, successes, k in ((8, 3, 2), (8, 1, 8), (5, 0, 3), (4, 4, 1)):
        made = np.arange(samples) < successes
        drawn = np.mean([made[rng.permutation(samples)[:k]].any() for _ in range(4000)])
        assert pass_at_k(samples, successes, k) == pytest.approx(drawn, abs=0.03)
    with pytest.raises(ValueError, match="pass@9 needs at least 9 samples of a prompt, found 8"):
        pass_at_k(8, 1, 9)


def test_the_interval_covers_the_mean_of_the_population_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        found = Estimate.of(rng.binomial(4, 0.3, 200) / 4)
        covered += abs(found.mean - 0.3) <= found.half_width
    assert covered / 2000 == pytest.approx(0.95, abs=0.015)
    assert math.isnan(Estimate.of([1.0]).half_width)


def test_models_of_the_same_name_are_told_apart_and_a_broken_one_spares_the_others(inputs, tmp_path, capsys):
    for name in ("one", "two", "three"):
        shutil.copytree(inputs / "checkpoint", tmp_path / name / "hf")
    (tmp_path / "two/hf/model.safetensors").write_bytes(b"")
    (tmp_path / "config.yaml").write_text("name: tiny\n")
    options = ("--config", tmp_path / "config.yaml", "--out", tmp_path / "out", "validation.max_prompts=1")
    options += (*overrides(inputs, tmp_path / "run"), ON_CPUS)
    status, out, err = evaluated(capsys, *(tmp_path / name / "hf" for name in ("one", "two", "three")), *options)
    assert status == 1
    figures = json.loads(out.splitlines()[-1])
    assert list(figures) == ["one-hf", "three-hf"]
    assert figures["one-hf"]["pass@1_half_width"] is None  # of a single prompt there is none
    assert "two-hf: model.path: " in err
    assert json.loads((tmp_path / "out/figures.json").read_text()) == figures
