"""The quickstart's checkpoint: readable by transformers with equal logits, and warm-started."""

import hashlib
import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from asyncrl.models.checkpoint import load_decoder, read_tensors
from asyncrl.models.config import DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.models.make_checkpoint import main, make_checkpoint
from asyncrl.models.warm_start import Demonstration, demonstration_losses, warm_start

CHAT = [{"role": "user", "content": "Compute 7-5+2"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("arith-mimo"), seed=0, warm_start_steps=4)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_config_is_mimo_s_and_suits_the_engines(folder, tokenizer):
    raw = json.loads((folder / "config.json").read_text())
    assert (raw["architectures"], raw["model_type"]) == (["MiMoForCausalLM"], "qwen2")
    config = DecoderConfig.load(folder)
    assert (config.num_mtp_layers, config.tie_word_embeddings, config.qkv_bias) == (1, False, True)
    assert config.head_dim >= 32
    assert config.vocab_size >= len(tokenizer)
    assert config.vocab_size % 64 == 0
    generation = json.loads((folder / "generation_config.json").read_text())
    for settings in (raw, generation):
        assert settings["eos_token_id"] == tokenizer.eos_token_id
        assert settings["pad_token_id"] == tokenizer.pad_token_id


def test_the_mtp_layer_is_named_as_in_mimo(folder):
    tensors = read_tensors(folder)
    draft = {name.removeprefix("model.mtp_layers.0.") for name in tensors if "mtp" in name}
    assert {n.split(".")[0] for n in draft} == {
        *("token_layernorm", "hidden_layernorm", "input_proj", "input_layernorm", "self_attn"),
        *("post_attention_layernorm", "mlp", "final_layernorm"),
    }
    assert sum(t.numel() for t in tensors.values()) < 3_000_000


def test_the_trunk_scores_as_transformers_does(folder):
    reference = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = load_decoder(folder)
    lengths = np.array([17, 3, 40])
    tokens = torch.randint(
        0, model.config.vocab_size, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        ours = model.logits(tokens, PackedLayout.from_lengths(lengths)).split(lengths.tolist())
        theirs = [reference(row[None]).logits[0] for row in tokens.split(lengths.tolist())]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("7-5+2+4\n4+4\n8\nanswer: 8", "Grüße, 世界 🙂\t\r\n  two  spaces"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert max(ids) < len(tokenizer)


def test_every_digit_is_a_separate_token(tokenizer):
    assert tokenizer.tokenize("1024-77") == ["1", "0", "2", "4", "-", "7", "7"]


def test_the_chat_template_opens_the_assistants_turn_with_single_special_tokens(tokenizer):
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nCompute 7-5+2<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nCompute 7-5+2\nassistant\n"


def test_weights_are_determined_by_the_seed(folder, tmp_path):
    main(["--out", str(tmp_path / "again"), "--warm-start-steps", "4"])
    main(["--out", str(tmp_path / "other"), "--warm-start-steps", "4", "--seed", "1"])
    assert digest(folder) == digest(tmp_path / "again") != digest(tmp_path / "other")
    assert (folder / "tokenizer.json").read_bytes() == (tmp_path / "other" / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model-type", "nonsense"], "model type 'nonsense': expected mimo, or"),
        (["--model-type", "vit"], "model type 'vit': expected mimo, or"),
        (["--demonstrations", "nonsense"], "expected an import path such as package.module:name, found 'nonsense'"),
        (["--tokens", "nonsense:texts"], "nonsense:texts: module nonsense does not import"),
    ],
)
def test_an_unknown_family_or_import_path_is_a_usage_error(tmp_path, capsys, arguments, says):
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2
    assert f"error: {says}" in capsys.readouterr().err.splitlines()[-1]


def test_an_interrupted_run_leaves_no_model_file(tmp_path):
    out = tmp_path / "out"
    (out / "generation_config.json").mkdir(parents=True)  # makes the write before the weights fail
    with pytest.raises(IsADirectoryError):
        make_checkpoint(out, warm_start_steps=0)
    assert not (out / "model.safetensors").exists()


def tiny_decoder(**changes):
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "vocab_size": 16,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "num_nextn_predict_layers": 1,
    }
    model = Decoder(DecoderConfig.from_dict(raw | changes))
    model.init_weights(0, std=0.1)
    return model


def test_a_warm_start_teaches_target_and_draft():
    def counting():  # token t is always followed by t + 1, so the draft too can predict two tokens ahead
        generator = torch.Generator().manual_seed(0)
        while True:
            t = int(torch.randint(0, 8, (1,), generator=generator))
            yield Demonstration([t, t + 1], [t + 2, t + 3, t + 4, t + 5])

    losses = warm_start(tiny_decoder(), counting(), steps=60, batch_size=8, lr=1e-2, warmup_steps=5)
    assert losses[0].target > 2
    assert losses[0].draft > 2
    assert losses[-1].target < 0.1
    assert losses[-1].draft < 0.1


def test_the_drafts_loss_changes_no_weight_of_the_target():
    model = tiny_decoder()
    demonstrations = [Demonstration([1, 2], [3, 4, 5]), Demonstration([7], [8, 9])]
    _, draft = demonstration_losses(model, demonstrations)
    draft.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched
    assert all(name.startswith("model.mtp_layers.") for name in touched)


def test_losses_do_not_depend_on_the_rest_of_the_batch():
    model = tiny_decoder()
    demonstrations = [Demonstration([1, 2], [3, 4, 5]), Demonstration([7], [8, 9, 10, 11])]
    # response tokens that each head predicts: the draft cannot predict the second token of a sequence
    for head, weights in ((0, (3, 4)), (1, (3, 3))):
        together = demonstration_losses(model, demonstrations)[head]
        alone = [demonstration_losses(model, [d])[head] for d in demonstrations]
        mean = sum(w * loss for w, loss in zip(weights, alone)) / sum(weights)
        torch.testing.assert_close(together, mean, atol=1e-6, rtol=0)


def test_a_decoder_without_mtp_layers_can_be_warm_started():
    losses = warm_start(
        tiny_decoder(num_nextn_predict_layers=0), iter([Demonstration([1], [2, 3])] * 4), steps=2, batch_size=2
    )
    assert [loss.draft for loss in losses] == [0.0, 0.0]
