"""Models of transformers in the torch backend: ranks, checkpoints, adapters, precision, and what is refused."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config
from transformers.models.gemma2 import modeling_gemma2

from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.config import CheckpointError
from asyncrl.models.scoring import balance_loss, check_scores, scoring
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.backends.torch.checks import check, implementation, problems
from asyncrl.trainer.rank import TrainerRank
from tests.support.families import FAMILIES, model_of, sequences, write
from tests.support.trainer import first_gradient, make_config, make_groups, relative, started_ranks, weights

start_rank = pytest.fixture(started_ranks)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Checkpoint folders by family, written when first asked for."""
    made = {}

    def folder(name, dtype=torch.float32):
        if (name, dtype) not in made:
            made[name, dtype] = tmp_path_factory.mktemp("model")
            write(FAMILIES[name], made[name, dtype], dtype)
        return str(made[name, dtype])

    return folder


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama 3"])
def test_both_implementations_train_alike_and_go_on_from_each_other(family, folders, start_rank, tmp_path):
    config = {
        kind: make_config(folders(family), implementation=kind, kl_coef=0.05) for kind in ("native", "transformers")
    }
    metrics, exported, last = {}, {}, {}
    for kind, options in config.items():
        rank = start_rank(options)
        metrics[kind] = [rank.train(step, make_groups(seed=step)) for step in range(2)]
        exported[kind] = weights(rank)
        rank.save(tmp_path / kind)
        last[kind] = rank.train(2, make_groups(seed=2))
    assert exported["native"].keys() == exported["transformers"].keys()
    for name, tensor in exported["native"].items():
        assert relative(exported["transformers"][name], tensor) < 1e-4, name
    for one, other in zip(metrics["native"], metrics["transformers"], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-5)
    for kind, other in (("native", "transformers"), ("transformers", "native"), ("transformers", "transformers")):
        rank = start_rank(config[kind])
        rank.load(tmp_path / other)
        found = rank.train(2, make_groups(seed=2))
        assert found == (last[other] if kind == other else pytest.approx(last[other], rel=1e-3, abs=1e-5))


def run_two_ranks(rank, config, folder):
    torch.set_num_threads(1)
    trainer = TrainerRank(config, rank, 2, f"file://{folder}/rendezvous", Recorder(f"trainer/{rank}"))
    metrics = [trainer.train(step, make_groups((4, 3, 1), seed=step)) for step in range(3)]
    exported = weights(trainer)
    trainer.save(folder / "of_two")
    trainer.close()
    torch.save({"metrics": metrics, "exported": exported}, folder / f"rank{rank}.pt")


def on_two_ranks(config, folder):
    config.trainer.ranks = 2
    mp.spawn(run_two_ranks, args=(config, folder), nprocs=2)
    two = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert two[0]["metrics"] == two[1]["metrics"]
    return two


#: mini-batches of two groups: the second one is a single sequence, so one of two ranks has none
TWO_RANKS = {"implementation": "transformers", "max_tokens_per_micro_batch": 40, "mini_batch_groups": 2}


SEPARATE_EXPERTS = """
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP


class OwnConfig(Qwen3Config):
    model_type = "own"


class Mixture(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(Qwen3MLP(config) for _ in range(4))

    def forward(self, hidden):
        tokens = hidden.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            if len(own := (chosen == number).nonzero().flatten()):
                made = made.index_add(0, own, expert(tokens[own]) * weights[own, None])
        return made.view_as(hidden)


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixture(config)
        self.post_init()
"""


@pytest.fixture(scope="module")
def separate_experts(folders, tmp_path_factory):
    """A checkpoint with code of its own, in which experts are modules: each gets gradients only on some ranks."""
    folder = tmp_path_factory.mktemp("own")
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    raw = json.loads(Path(folders("Qwen3"), "config.json").read_text()) | {"model_type": "own", "auto_map": own}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "own.py").write_text(SEPARATE_EXPERTS)
    torch.manual_seed(0)
    built = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(built, trust_remote_code=True, dtype=torch.float32)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("Gemma 2", marks=pytest.mark.slow),  # a tied head
        pytest.param("Qwen3 MoE", marks=pytest.mark.slow),  # fused experts
        "separate experts",
    ],
)
def test_two_ranks_train_like_one(family, folders, separate_experts, start_rank, tmp_path):
    own = family == "separate experts"
    folder = separate_experts if own else folders(family)
    config = make_config(folder, **TWO_RANKS, kl_coef=0.05, trust_remote_code=own)
    one = start_rank(config)
    expected = [one.train(step, make_groups((4, 3, 1), seed=step)) for step in range(3)]
    alone = weights(one)
    following = one.train(3, make_groups(seed=3))
    two = on_two_ranks(config, tmp_path)
    for mine, theirs in zip(expected, two[0]["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)
    assert not two[1]["exported"]  # rank 0 is the sender
    assert two[0]["exported"].keys() == alone.keys()
    for name, tensor in two[0]["exported"].items():
        assert relative(tensor, alone[name]) < 1e-4, name
    one.load(tmp_path / "of_two")
    assert one.train(3, make_groups(seed=3)) == pytest.approx(following, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_two_ranks_balance_experts_though_one_has_no_sequences(tmp_path):
    model = model_of(FAMILIES["Mixtral"], output_router_logits=True, router_aux_loss_coef=0.1)
    model.save_pretrained(tmp_path / "model")
    two = on_two_ranks(make_config(str(tmp_path / "model"), **TWO_RANKS), tmp_path)
    assert all(metrics["actor/balance_loss"] > 0 for metrics in two[0]["metrics"])


@pytest.mark.parametrize("family", ["Gemma 2", "gpt-oss", "Qwen3-Next"])
def test_neither_micro_batches_nor_chunks_nor_checkpointing_change_the_gradient(family, folders, start_rank):
    options = {"grad_clip": 0.0, "entropy_coef": 0.01, "implementation": "transformers", "temperature": 0.7}
    whole = first_gradient(start_rank(make_config(folders(family), **options)), make_groups())
    for other in (
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 50},
        {"logprob_chunk_tokens": 7},
        {"activation_checkpointing": True},
    ):
        found = first_gradient(start_rank(make_config(folders(family), **options, **other)), make_groups())
        assert relative(found, whole) < 5e-5, other


@pytest.mark.parametrize("family", ["Gemma 2", "GLM 4.5", "Qwen3.5"])
def test_a_16_bit_checkpoint_trains_in_bfloat16(family, folders, start_rank, tmp_path):
    rank = start_rank(make_config(folders(family, torch.bfloat16), implementation="transformers"))
    before = weights(rank)
    assert {t.dtype for t in before.values()} == {torch.bfloat16}
    assert math.isfinite(rank.train(0, make_groups())["actor/grad_norm"])
    rank.export_hf(tmp_path)
    written = read_tensors(tmp_path)
    assert written.keys() == read_tensors(folders(family, torch.bfloat16)).keys()
    assert any(not torch.equal(written[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3 MoE"])
def test_the_load_of_experts_is_balanced_if_config_json_says_so(family, tmp_path, start_rank):
    model = model_of(FAMILIES[family], output_router_logits=True, router_aux_loss_coef=0.5)
    model.save_pretrained(tmp_path)
    tokens = sequences(1)[0][None]
    found = model(input_ids=tokens)
    torch.testing.assert_close(balance_loss(found.router_logits, 2), found.aux_loss)

    config = make_config(str(tmp_path), implementation="transformers", max_tokens_per_micro_batch=40, grad_clip=0.0)
    groups = make_groups(rewards=1.0)  # equal rewards: nothing but the balance is learned
    first = start_rank(config).train(0, groups)
    assert first["actor/grad_norm"] > 0
    assert 0.9 < first["actor/balance_loss"] < 2.0  # half of E · Σ f · P: 2 with equal loads, at most 4


def test_adapters_train_on_a_frozen_base_and_merge_into_it(folders, start_rank, tmp_path):
    options = {"implementation": "transformers", "kl_coef": 0.05}
    config = make_config(folders("Phi 3"), **options)
    config.model.lora.rank, config.param_sync.adapters = 4, "merged"
    rank, files = start_rank(config), read_tensors(folders("Phi 3"))
    assert all(torch.equal(tensor, files[name]) for name, tensor in rank.export())  # merged: B is zero
    rank.train(0, make_groups())
    changed = {name for name, tensor in rank.export() if not torch.equal(tensor, files[name])}
    linear = re.compile(r"model\.layers\.\d\.(self_attn|mlp)\.(qkv|o|gate_up|down)_proj\.weight")
    assert changed == {name for name in files if linear.fullmatch(name)}
    base = {name: p.full_tensor() for name, p in rank._backend._policy.named_parameters() if name in files}
    assert all(torch.equal(base[name], tensor) for name, tensor in files.items())
    rank.save(tmp_path / "state")
    following = rank.train(1, make_groups(seed=1))
    again = start_rank(config)
    again.load(tmp_path / "state")
    assert again.train(1, make_groups(seed=1)) == following


def test_tensors_that_transformers_leaves_out_are_carried(folders, start_rank, tmp_path):
    """The MTP layer of GLM's published checkpoints."""
    folder = tmp_path / "model"
    shutil.copytree(folders("GLM 4.5"), folder)
    extra = {"model.layers.92.enorm.weight": torch.rand(64)}
    save_file(read_tensors(folder) | extra, folder / "model.safetensors", metadata={"format": "pt"})
    config = make_config(str(folder), implementation="transformers")
    check(config, str(folder), mtp_from_trunk=False)
    rank = start_rank(config)
    rank.train(0, make_groups())
    rank.export_hf(tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")["model.layers.92.enorm.weight"], *extra.values())
    assert "model.layers.92.enorm.weight" in dict(rank.export())


def test_what_is_float32_beside_bfloat16_weights_stays_so(folders, start_rank, tmp_path):
    """GLM's and DeepSeek's corrections of routing, which bfloat16 would make equal; and a norm."""
    folder = tmp_path / "model"
    shutil.copytree(folders("GLM 4.5", torch.bfloat16), folder)
    tensors = read_tensors(folder)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = torch.tensor([5.031, 5.035, 5.033, 5.029])
    norm = "model.layers.0.input_layernorm.weight"
    tensors[norm] = tensors[norm].float() + 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rank = start_rank(make_config(str(folder), implementation="transformers"))
    assert torch.equal(dict(rank._backend._policy.named_parameters())[norm].full_tensor(), tensors[norm])
    assert torch.equal(dict(rank.export())[bias], tensors[bias])
    sent = {spec.name: spec.dtype for spec in rank.manifest()}
    assert (sent[bias], sent[norm]) == ("float32", "bfloat16")
    rank.export_hf(tmp_path / "out")
    assert torch.equal(read_tensors(tmp_path / "out")[bias], tensors[bias])


def test_the_text_of_a_multimodal_model_trains_and_all_of_it_is_exported(start_rank, tmp_path):
    """Gemma 3 with its vision part: files nest its modules otherwise than the model, and its head is tied."""
    text = model_of(FAMILIES["Gemma 3"]).config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    made = make_config(str(tmp_path / "model"), implementation="transformers")
    check(made, made.model.path, mtp_from_trunk=False)
    rank, files = start_rank(made), read_tensors(tmp_path / "model")
    rank.train(0, make_groups())
    tied = {spec.name: spec.tied_to for spec in rank.manifest() if spec.tied_to}
    assert tied["lm_head.weight"] in files
    sent = {name: tensor.clone() for name, tensor in rank.export()}
    assert sent.keys() == files.keys()
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor, files[name])}
    assert any("language_model" in name for name in changed)
    rank.export_hf(tmp_path / "out")
    assert read_tensors(tmp_path / "out").keys() == files.keys()


class TestRefusals:
    def changed(self, folder, tmp_path, **fields):
        copy = tmp_path / "changed"
        shutil.copytree(folder, copy)
        raw = json.loads((copy / "config.json").read_text()) | fields
        (copy / "config.json").write_text(json.dumps(raw))
        return str(copy)

    def refused(self, path, kind="transformers"):
        with pytest.raises(CheckpointError) as error:
            check(make_config(path, implementation=kind), path, mtp_from_trunk=False)
        assert "\n" not in str(error.value)
        return str(error.value)

    def test_auto_takes_the_native_decoder_where_it_builds_the_model(self, folders, tmp_path):
        assert implementation(make_config(folders("Qwen3")), folders("Qwen3")) == "native"
        assert implementation(make_config(folders("Gemma 2")), folders("Gemma 2")) == "transformers"
        windowed = self.changed(folders("Qwen2"), tmp_path, use_sliding_window=True, max_window_layers=0)
        assert implementation(make_config(windowed), windowed) == "transformers"

    def test_a_model_that_neither_builds_is_refused_with_what_was_tried(self, folders, tmp_path):
        path = self.changed(folders("Qwen3"), tmp_path, architectures=["NewForCausalLM"], model_type="new")
        found = self.refused(path, "auto")
        assert "architecture NewForCausalLM is not one the native decoder builds" in found
        assert re.search(r"transformers 5\S+ cannot load it \(ValueError: .*`new`", found)

    def test_a_missing_or_misshapen_tensor(self, folders, tmp_path):
        tensors = read_tensors(folders("Mixtral"))
        path = self.changed(folders("Mixtral"), tmp_path)
        missing = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
        kept = {name: t for name, t in tensors.items() if name != missing}
        save_file(kept, f"{path}/model.safetensors", metadata={"format": "pt"})
        assert f"missing tensors: {missing}" in self.refused(path)
        save_file(kept | {missing: torch.zeros(3, 4)}, f"{path}/model.safetensors", metadata={"format": "pt"})
        assert f"misshapen tensors: {missing} (config says (128, 192), file has (3, 4))" in self.refused(path)

    def test_a_missing_shard(self, folders, tmp_path):
        path = self.changed(folders("Gemma 2"), tmp_path)
        model = AutoModelForCausalLM.from_pretrained(path)
        (tmp_path / "changed" / "model.safetensors").unlink()
        model.save_pretrained(path, max_shard_size="100KB")
        check(make_config(path), path, mtp_from_trunk=False)
        shard = sorted((tmp_path / "changed").glob("*.safetensors"))[1]
        shard.unlink()
        assert f"{shard.name}: named by model.safetensors.index.json, but missing" in self.refused(path)

    def test_quantized_weights(self, folders, tmp_path):
        path = self.changed(folders("Gemma 2"), tmp_path, quantization_config={"quant_method": "mxfp4"})
        assert "its weights are quantized (mxfp4); expected a checkpoint in bfloat16" in self.refused(path)
        shutil.rmtree(path)
        path = self.changed(folders("Gemma 2"), tmp_path)
        tensors = {name: t.to(torch.float8_e4m3fn) for name, t in read_tensors(path).items()}
        save_file(tensors, f"{path}/model.safetensors", metadata={"format": "pt"})
        assert re.search(
            r"is stored as F8_E4M3, expected F32.*; quantized weights cannot be trained", self.refused(path)
        )

    def test_code_of_the_checkpoint_runs_only_if_asked(self, folders, tmp_path, start_rank):
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        path = self.changed(folders("Qwen3"), tmp_path, model_type="own", auto_map=own)
        assert re.search(r"it may need .*, which model.trust_remote_code=true would run", self.refused(path))
        Path(path, "own.py").write_text(
            "from transformers import Qwen3Config, Qwen3ForCausalLM\n\n\n"
            "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n\n\n"
            "class OwnForCausalLM(Qwen3ForCausalLM):\n    config_class = OwnConfig\n"
        )
        config = make_config(path, trust_remote_code=True)
        check(config, path, mtp_from_trunk=False)
        found = start_rank(config).train(0, make_groups())
        expected = start_rank(make_config(folders("Qwen3"))).train(0, make_groups())
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)

    @pytest.mark.parametrize(
        ("family", "options", "expected"),
        [
            ("Gemma 2", {"attention": "sdpa"}, "model.attention: sdpa lacks caps of attention logits, which Gemma2"),
            ("gpt-oss", {"attention": "sdpa"}, "model.attention: sdpa lacks attention sinks, which GptOss"),
            ("LFM 2", {"attention": "flash_attention_2"}, "flash_attention_2 lacks layers that remember"),
            ("Gemma 2", {"enable_train": True}, "mtp.enable_train: models of transformers have no MTP layers"),
            ("Qwen3", {"implementation": "auto", "attention": "sdpa"}, "model.attention: the native decoder has only"),
        ],
    )
    def test_options_that_do_not_suit_the_model(self, family, options, expected, folders):
        config = make_config(folders(family), **{"implementation": "transformers", **options})
        raw = json.loads(Path(folders(family), "config.json").read_text())
        (found,) = problems(config, raw)
        assert expected in found

    def test_positions_that_depend_on_other_sequences(self, folders):
        config = make_config(folders("Phi 3"), implementation="transformers")
        rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
        (found,) = problems(config, {"rope_parameters": rope, "max_position_embeddings": 256})
        assert found.startswith("rollout.engine.max_context_tokens: beyond 64 tokens the model's longrope positions")
        config.rollout.engine.max_context_tokens = 64
        assert not list(problems(config, {"rope_parameters": rope, "max_position_embeddings": 256}))

    def test_a_model_that_mixes_the_sequences_of_a_batch(self, monkeypatch):
        """As of a family whose code is unknown: found when the trainer starts."""
        plain = modeling_gemma2.Gemma2MLP.forward
        mixed = lambda self, x: plain(self, x) + (x.flip(0) if len(x) > 1 else 0)
        monkeypatch.setattr(modeling_gemma2.Gemma2MLP, "forward", mixed)
        model = scoring(model_of(FAMILIES["Gemma 2"]), attention="eager")
        with pytest.raises(CheckpointError, match=r"together, sequences get other logprobs .*Gemma2ForCausalLM cannot"):
            check_scores(model, "folder", torch.device("cpu"), bfloat16=False)
