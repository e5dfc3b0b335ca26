"""Hugging Face folders in megatron-core: logits, drafts, round trips of tensors, and refusals."""

import inspect
import json
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from asyncrl.cpu import megatron as megatron_cpu
from asyncrl.models.checkpoint import read_tensors, save_checkpoint
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.trainer.backends.megatron import packages
from asyncrl.trainer.backends.megatron.bridges import bridge_of, expect_same_rope, read_source
from asyncrl.trainer.backends.megatron.packages import UnsupportedPackage, check_packages
from asyncrl.trainer.backends.megatron.vocab_parallel import VocabParallelCrossEntropy
from tests.support.megatron import built, only_where_wanted, process_group, random_tokens, states
from tests.support.trainer import make_checkpoint

pytestmark = pytest.mark.megatron
PACKAGES = ("megatron_bridge", "mbridge")

SMALL = {
    "vocab_size": 301,  # odd: no parallel size of 2 or 4 divides it
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHER_BASE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, OTHER_BASE),
    "qwen2-tied": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32, **OTHER_BASE}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama3-rope": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": True},
    ),
    "qwen3-moe-shares": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {**EXPERTS, "norm_topk_prob": False},
    ),
}


def saved(folder, family, **more):
    """A random model of a family, saved by transformers."""
    config_class, model_class, options = FAMILIES[family]
    options = SMALL | options | more
    if transformers.__version__ < "5" and (rope := options.pop("rope_parameters", None)):
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        options |= {"rope_theta": rope["rope_theta"]}
        options |= {"rope_scaling": scaling} if rope["rope_type"] != "default" else {}
    torch.manual_seed(0)
    model = model_class(config_class(**options)).float().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", autouse=True)
def alone():
    with process_group():
        yield


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers_and_tensors_round_trip_bit_for_bit(family, package, tmp_path):
    theirs = saved(tmp_path, family)
    (ours,), conversion = built(tmp_path, package=package)
    tokens = random_tokens(SMALL["vocab_size"])
    expected = theirs(tokens).logits
    (hidden,) = states(ours, tokens)
    assert (F.linear(hidden, ours.head_weight) - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 0.1

    before, after = read_tensors(tmp_path), dict(conversion.whole(lambda parameter: parameter))
    assert list(after) == list(conversion.shapes)
    assert {name: tuple(tensor.shape) for name, tensor in after.items()} == conversion.shapes
    assert after.keys() == before.keys() - ({"lm_head.weight"} if family == "qwen2-tied" else set())
    assert all(torch.equal(after[name], before[name]) for name in after)


def test_without_its_patch_an_expert_has_no_number(tmp_path):
    only_where_wanted("experts")
    saved(tmp_path, "qwen3-moe")
    _, conversion = built(tmp_path)
    with megatron_cpu.patch_named("experts").suspended(), pytest.raises(ValueError, match="int"):
        list(conversion.whole(lambda parameter: parameter))


@pytest.mark.parametrize(
    ("architecture", "layers"), [("MiMoForCausalLM", 1), ("MiMoForCausalLM", 2), ("Qwen3ForCausalLM", 1)]
)
@pytest.mark.parametrize("package", PACKAGES)
@torch.no_grad()
def test_draft_states_equal_the_native_decoders(architecture, layers, package, tmp_path):
    raw = {
        **SMALL,
        "architectures": [architecture],
        "model_type": "qwen3" if "Qwen3" in architecture else "qwen2",
        "head_dim": 32,
        "num_nextn_predict_layers": layers,
        "rope_theta": 640000.0,
    }
    native = Decoder(DecoderConfig.from_dict(raw))
    native.init_weights(0, std=0.15)
    save_checkpoint(tmp_path, native.named_parameters(), native.config)
    (ours,), conversion = built(tmp_path, package=package)

    tokens = random_tokens(SMALL["vocab_size"], (2, 30))
    layout = PackedLayout.from_lengths(np.array([30, 30]))
    hidden = native.hidden_states(tokens.flatten(), layout)
    drafts = native.draft_states(hidden, tokens.flatten(), layout, layers, detach=True)
    found_hidden, *found = states(ours, tokens, depths=layers)
    assert (found_hidden.flatten(0, 1) - hidden).abs().max() <= 1e-5
    for depth, (mine, theirs) in enumerate(zip(found, drafts, strict=True), 1):
        # states at a sequence's last position and its first depth − 1 are undefined
        defined = slice(depth - 1, -1)
        logits = [F.linear(x.view(2, 30, -1)[:, defined], native.lm_head.weight) for x in (mine, theirs)]
        assert (logits[0] - logits[1]).abs().max() <= 1e-5, depth
        assert logits[1].abs().max() > 0.1

    before = read_tensors(tmp_path)
    after = dict(conversion.whole(lambda parameter: parameter))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@torch.no_grad()
def test_packed_sequences_do_not_affect_each_other(tmp_path):
    """Trunk and draft states of each sequence equal those of the sequence alone."""
    (ours,), _ = built(make_checkpoint(tmp_path, num_nextn_predict_layers=2))
    lengths = [7, 1, 30, 2]
    tokens = random_tokens(64, (1, sum(lengths)))
    together = [state[0].split(lengths) for state in states(ours, tokens, 2, lengths)]
    for b, alone in enumerate(tokens.split(lengths, 1)):
        for depth, state in enumerate(states(ours, alone, 2)):
            defined = slice(max(depth - 1, 0), -1 if depth else None)
            assert torch.allclose(together[depth][b][defined], state[0, defined], atol=1e-5), (b, depth)


@torch.no_grad()
def test_swapping_the_projections_halves_changes_the_drafts(tmp_path):
    """Shows that the draft test above distinguishes hidden state and embedding."""
    (ours,), _ = built(make_checkpoint(tmp_path))
    tokens = random_tokens(64)
    _, right = states(ours, tokens, depths=1)
    weight = ours.mtp.layers[0].eh_proj.weight
    weight.copy_(weight.roll(weight.shape[1] // 2, 1))
    _, wrong = states(ours, tokens, depths=1)
    assert (right - wrong).abs().max() > 0.1


def test_a_forward_pass_without_labels_runs_with_mtp_layers(tmp_path):
    """The scoring pass, in which megatron-core's own head would clone missing labels."""
    (ours,), _ = built(make_checkpoint(tmp_path))
    assert ours.config.mtp_num_layers == 1
    assert len(states(ours, random_tokens(64), depths=0)) == 1


def test_the_drafts_gradient_equals_that_of_newer_cores_own_loss(tmp_path):
    """megatron-core's `process_mtp_loss`, called by its signature, on the same hidden states. With per-token losses its
    gradients are larger by the number of positions with a label, by which megatron-core divides them later."""
    from megatron.core.transformer import multi_token_prediction

    if not (process_mtp_loss := getattr(multi_token_prediction, "process_mtp_loss", None)):
        pytest.skip("the installed megatron-core has no such function")
    (ours,), _ = built(make_checkpoint(tmp_path))
    tokens = random_tokens(64, (1, 20))
    hidden_SM, draft_SM = (state[0] for state in states(ours, tokens, depths=1))
    weight, positions = ours.head_weight, tokens.shape[1]

    mine = draft_SM.clone().requires_grad_()
    taught = slice(0, positions - 2)  # position p predicts the token at p + 2
    part, targets = ours.vocabulary_part, tokens[0, 2:]
    loss, _ = VocabParallelCrossEntropy.apply(mine[taught], weight, targets, part, 1.0, 7)
    (loss / len(targets)).backward()

    theirs = draft_SM.clone().requires_grad_()
    given = {
        "hidden_states": torch.cat([hidden_SM, theirs]).unsqueeze(1),
        "labels": tokens.roll(-1, 1),
        "loss_mask": (torch.arange(positions) < positions - 1).float().unsqueeze(0),
        "output_layer": ours.output_layer,
        "output_weight": weight,
        "runtime_gather_output": None,
        "is_training": False,
        "compute_language_model_loss": ours.compute_language_model_loss,
        "config": ours.config,
    }
    optional = inspect.signature(process_mtp_loss).parameters.keys() - given.keys()
    assert all(inspect.signature(process_mtp_loss).parameters[name].default is None for name in optional)
    (process_mtp_loss(**given) * 0).sum().backward()
    scale = ours.config.mtp_loss_scaling_factor * (positions - 1)
    assert (theirs.grad / scale - mine.grad).abs().max() <= 1e-6
    assert mine.grad.abs().max() > 1e-3


# -- refusals ------------------------------------------------------------------------------------------------------


def changed(folder, **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_without_a_bridge_is_refused_by_name(tmp_path):
    saved(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match=r"no bridge for GPT2LMHeadModel .*Qwen3ForCausalLM"):
        bridge_of(read_source(changed(tmp_path, architectures=["GPT2LMHeadModel"])))


def test_latent_attention_is_refused_by_the_models_name(tmp_path):
    saved(tmp_path, "qwen2")
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"DeepseekV3ForCausalLM has latent attention, which this backend cannot"):
        bridge_of(read_source(changed(tmp_path, architectures=["DeepseekV3ForCausalLM"])))


def test_a_model_that_mbridge_lacks_or_builds_differently_is_refused_by_name(tmp_path):
    saved(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match=r"mbridge has no bridge for gpt2 .*qwen3_moe.* use model\.bridge"):
        bridge_of(read_source(changed(tmp_path, model_type="gpt2")), "mbridge")
    transformers.DeepseekV3Config().save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"deepseek_v3 is built by mbridge's DeepseekV3Bridge, which this backend"
    ):
        bridge_of(read_source(tmp_path), "mbridge")


def test_training_a_missing_draft_is_refused(tmp_path):
    saved(tmp_path, "qwen2")
    with pytest.raises(CheckpointError, match=r"has no MTP layers .*mtp\.init_from_trunk"):
        read_source(tmp_path, needs_draft=True)


def test_tensors_on_which_config_and_files_disagree_are_listed(tmp_path):
    make_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.2.* and 8 more"):
        built(changed(tmp_path, num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.mtp_layers\.0"):
        built(changed(tmp_path, num_hidden_layers=2, num_nextn_predict_layers=0))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_source(tmp_path)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_source(tmp_path / "absent")


@pytest.mark.parametrize(
    ("package", "fields", "says"),
    [
        *((package, {"use_sliding_window": True}, "use_sliding_window is set") for package in PACKAGES),
        ("mbridge", {"hidden_act": "gelu"}, "hidden_act is 'gelu', but the bridge of Qwen3MoeForC.* uses silu"),
    ],
)
def test_attention_and_activation_that_a_bridge_ignores_are_refused(package, fields, says, tmp_path):
    saved(tmp_path, "qwen3-moe")
    bridge_of(read_source(tmp_path), package)
    with pytest.raises(CheckpointError, match=says):
        bridge_of(read_source(changed(tmp_path, **fields)), package)


def test_another_activation_equals_transformers(tmp_path):
    theirs, tokens = saved(tmp_path, "qwen3-moe", hidden_act="gelu"), random_tokens(SMALL["vocab_size"])
    (ours,), _ = built(tmp_path)
    (hidden,) = states(ours, tokens)
    with torch.no_grad():
        assert (F.linear(hidden, ours.head_weight) - theirs(tokens).logits).abs().max() <= 1e-5


def test_a_rope_that_megatron_core_cannot_compute_is_refused(tmp_path):
    saved(tmp_path, "llama", rope_parameters={**LLAMA3_ROPE, "original_max_position_embeddings": 64})
    with pytest.raises(CheckpointError, match=r"rope .base 500000.* is not the one that megatron-core computes"):
        built(tmp_path)
    with pytest.raises(CheckpointError, match="rope type 'yarn'"):
        bridge_of(read_source(changed(tmp_path, rope_parameters={"rope_type": "yarn", "factor": 2.0})))


def test_a_rope_base_lost_by_the_bridge_is_detected(tmp_path):
    """transformers 5 has no rope_theta on its config objects, and the bridge then defaults to 10000."""
    saved(tmp_path, "qwen2")
    source = read_source(tmp_path)
    assert bridge_of(source).provider.rotary_base == 1000000.0
    lost = 1 / 10000 ** (torch.arange(0, 16, 2) / 16)
    with pytest.raises(CheckpointError, match=r"rope .base 1e\+06"):
        expect_same_rope(source, lost, None)


def test_incompatible_packages_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(packages, "MADE_FOR", dict.fromkeys(packages.MADE_FOR, "0.99"))
    with pytest.raises(UnsupportedPackage, match=r"as 0\.99 with 0\.3, .*; 0\.\d+ with 0\.\d is installed"):
        check_packages()


def test_unsupported_releases_are_refused_in_one_line(monkeypatch):
    check_packages()
    here = version("megatron-core")
    monkeypatch.setitem(packages.SUPPORTED, "megatron-core", ">=0.99,<1")
    monkeypatch.setitem(packages.SUPPORTED, "no-such-package", ">=1,<2")
    with pytest.raises(UnsupportedPackage) as e:
        check_packages("megatron-core", "no-such-package")
    assert f"megatron-core >=0.99,<1 is needed, {here} is installed" in str(e.value)
    assert "no-such-package >=1,<2 is needed, none is installed" in str(e.value)
    assert "\n" not in str(e.value)
