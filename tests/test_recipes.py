"""The recipes of configs/recipes: each plans a run with a checkpoint of its size, on a machine of its size."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.run.placement_plan import Machine, assign_machines, make_plan, with_devices
from asyncrl.run.preflight import preflight
from tests.support.config_only import QWEN25_05B, QWEN25_7B, QWEN35_4B, write

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "configs" / "recipes"

#: recipe → model, GPUs
SIZES = {
    "gsm8k": (QWEN25_05B, 1),
    "lora_7b": (QWEN25_7B, 1),
    "dapo_7b": (QWEN25_7B, 8),
    "reasoning_gym": (QWEN25_05B, 1),
    "code": (QWEN25_05B, 1),
    "guess_game": (QWEN25_05B, 1),
    "qwen35_mtp": (QWEN35_4B, 8),
}
PROMPT = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "tests": '[{"stdin": "", "stdout": "2"}]'}


def test_every_recipe_has_a_size_and_a_page():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == SIZES.keys()
    assert {path.stem for path in (ROOT / "docs/recipes").glob("*.md")} == SIZES.keys()


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_plans_its_run(name, tmp_path, monkeypatch):
    if name == "reasoning_gym" and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("needs the environment of reasoning-gym")
    fields, gpus = SIZES[name]
    draft = {"mtp.layers.0.self_attn.q_proj.weight": (8, 8)} if name == "qwen35_mtp" else {}
    model = write(tmp_path / "model", fields, draft)
    for variable in ("TRAIN_FILE", "VALIDATION_FILE", "ASYNCRL_VLLM_PYTHON", "ASYNCRL_MEGATRON_PYTHON"):
        monkeypatch.setenv(variable, "unused")
    monkeypatch.setenv("MODEL_PATH", str(model))
    options = [f"run_dir={tmp_path / 'run'}"]
    if name != "reasoning_gym":
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(PROMPT) + "\n" for _ in range(64)))
        options += [f"data.{kind}_files=[{tmp_path / 'prompts.jsonl'}]" for kind in ("train", "validation")]
    config = load_config(RECIPES / f"{name}.yaml", options)
    found = preflight(config, cpus=None)
    config = with_devices(config, gpus)
    plan = make_plan(config, found, assign_machines(config, [Machine("one", cpus=32, gpus=gpus)]))
    assert {actor.split("/")[0] for actor in plan.machines} == {"trainer", "replica"}
    assert "GiB" in plan.memory["trainer"]
