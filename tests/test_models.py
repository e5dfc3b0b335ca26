"""The native decoder against transformers, and checkpoints that do not fit."""

import json

import numpy as np
import pytest
import torch
import transformers

from asyncrl.models.checkpoint import check_checkpoint, load_decoder, read_tensors, save_checkpoint
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2-tied": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama3-rope": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.fixture
def saved(tmp_path, request):
    """A random model of a family, as transformers saves it, and its folder."""
    config_class, model_class, more = FAMILIES[request.param]
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL, **more)).float().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.15)
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
@torch.no_grad()
def test_logits_of_packed_sequences_equal_transformers_one_by_one(saved):
    theirs, folder = saved
    ours = load_decoder(folder)
    lengths = np.array([7, 100, 33])
    tokens = torch.randint(0, SMALL["vocab_size"], (int(lengths.sum()),))
    expected = torch.cat([theirs(row[None]).logits[0] for row in tokens.split(lengths.tolist())])
    found = ours.logits(tokens, PackedLayout.from_lengths(lengths))
    assert (found - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 0.1


@pytest.mark.parametrize("saved", ["qwen2"], indirect=True)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_scores_and_their_gradients_equal_those_of_whole_logits(saved, chunk):
    _, folder = saved
    model = load_decoder(folder)
    tokens = torch.randint(0, SMALL["vocab_size"], (41,))
    layout = PackedLayout.from_lengths(np.array([20, 21]))
    rows, targets = torch.arange(40), tokens[1:]
    weight, entropy_weight = torch.randn(40), torch.randn(40)

    scores = model(tokens, layout, rows, targets, temperature=0.7, chunk=chunk)
    (scores.logprobs @ weight + scores.entropy @ entropy_weight).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    logp = torch.log_softmax(model.logits(tokens, layout)[:-1] / 0.7, -1)
    expected, entropy = logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)
    (expected @ weight + entropy @ entropy_weight).backward()
    torch.testing.assert_close(scores.logprobs, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(scores.entropy, entropy, atol=1e-5, rtol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-4, rtol=1e-4)


def tiny_mimo(folder, **changes):
    config = {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1, **SMALL}
    decoder = Decoder(DecoderConfig.from_dict(config | changes))
    decoder.init_weights(0)
    save_checkpoint(folder, dict(decoder.named_parameters()), decoder.config)
    return decoder


def test_a_checkpoint_with_a_draft_comes_back_whole(tmp_path):
    before = tiny_mimo(tmp_path)
    after = load_decoder(tmp_path)
    assert {n for n, _ in after.named_parameters()} == set(read_tensors(tmp_path))
    assert any(n.startswith("model.mtp_layers.0.") for n, _ in after.named_parameters())
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_checkpoints_that_do_not_fit_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        check_checkpoint(tmp_path / "absent")
    tiny_mimo(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def changed(**changes):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    with pytest.raises(CheckpointError, match=r"unknown tensors: model\.layers\.2"):
        check_checkpoint(changed(num_hidden_layers=2))
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.layers\.3.* and 8 more"):
        check_checkpoint(changed(num_hidden_layers=4))
    with pytest.raises(CheckpointError, match=r"misshapen tensors: .*config says \(400, 64\), file has \(300, 64\)"):
        check_checkpoint(changed(vocab_size=400))
    with pytest.raises(CheckpointError, match="architecture GPT2LMHeadModel is not one"):
        check_checkpoint(changed(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(CheckpointError, match="rope type 'yarn'"):
        check_checkpoint(changed(rope_scaling={"rope_type": "yarn", "factor": 2.0}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        check_checkpoint(tmp_path)
    changed()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        check_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a', "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', b"\xff"]
)
def test_a_damaged_index_is_named(tmp_path, index):
    tiny_mimo(tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    file.write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(CheckpointError, match=r"index\.json: expected a JSON object whose weight_map"):
        check_checkpoint(tmp_path)


def test_written_weights_are_readable_by_all(tmp_path):
    tiny_mimo(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644
