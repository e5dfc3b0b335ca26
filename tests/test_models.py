"""The native decoder compared with transformers, and refusal of mismatched checkpoints."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from asyncrl.models import kernels
from asyncrl.models.checkpoint import (
    check_checkpoint,
    copy_tokenizer,
    is_draft,
    load_decoder,
    open_tensors,
    read_tensors,
    save_checkpoint,
)
from asyncrl.models.chunked import ChunkedAcceptance, ChunkedCrossEntropy
from asyncrl.models.config import CheckpointError, DecoderConfig, ModelConfig
from asyncrl.models.decoder import Decoder, DraftTargets, rope_table
from asyncrl.models.layout import PackedLayout
from asyncrl.models.mtp_from_trunk import HIDDEN_SHARE
from asyncrl.models.overridden import overridden
from asyncrl.rollouter.engines.native.speculation import judge

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
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES = {
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen2-tied": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3-biases": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32, "attention_bias": True}),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama-biases": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 32, "attention_bias": True}),
    "llama-linear-rope": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "llama3-rope": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
}


@pytest.fixture
def saved(tmp_path, request):
    """A random model of a family and the folder where transformers saved it."""
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


def test_a_checkpoint_with_a_draft_round_trips(tmp_path):
    before = tiny_mimo(tmp_path)
    after = load_decoder(tmp_path)
    assert {n for n, _ in after.named_parameters()} == set(read_tensors(tmp_path))
    assert any(n.startswith("model.mtp_layers.0.") for n, _ in after.named_parameters())
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_mismatched_checkpoints_are_refused_with_the_reason(tmp_path):
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
    with pytest.raises(CheckpointError, match="use_sliding_window is set"):
        check_checkpoint(changed(use_sliding_window=True))
    with pytest.raises(CheckpointError, match="hidden_act 'gelu' is not supported"):
        check_checkpoint(changed(hidden_act="gelu"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        check_checkpoint(tmp_path)
    changed()
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        check_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors files, found none"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ['{"weight_map": {"a', "{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', b"\xff"]
)
def test_a_damaged_index_is_reported(tmp_path, index):
    tiny_mimo(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    file = tmp_path / "model.safetensors.index.json"
    file.write_bytes(index if isinstance(index, bytes) else index.encode())
    with pytest.raises(CheckpointError, match=r"index\.json: expected a JSON object whose weight_map"):
        check_checkpoint(tmp_path)


def test_other_files_beside_the_model_s_are_not_read(tmp_path):
    """Mistral's consolidated weights, an adapter, an old index; transformers prefers model.safetensors to an index."""
    tiny_mimo(tmp_path)
    for name in ("consolidated", "adapter_model"):
        save_file({"other": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    check_checkpoint(tmp_path)
    index, shard = tmp_path / "model.safetensors.index.json", "model-00001-of-00001.safetensors"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(read_tensors(tmp_path), shard)}))
    check_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / shard)
    check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (b'{"text_config": 3}', "expected a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"model_type": "\xff"}', "not valid JSON"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content, says):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {says}"):
        ModelConfig.load(tmp_path)
    with pytest.raises(CheckpointError, match=rf"config\.json: {says}"):
        overridden(tmp_path, {"rope_theta": 5e5}, tmp_path / "model")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": None}, "vocab_size is None"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf"),
        ({"num_key_value_heads": [2]}, r"num_key_value_heads is \[2\]"),
        ({"architectures": 3}, "'int' object is not subscriptable"),
        ({"num_nextn_predict_layers": "one"}, "invalid literal .*'one'"),
        ({"rms_norm_eps": "small"}, "could not convert .*'small'"),
        ({"rope_parameters": "long"}, ""),
    ],
)
def test_a_field_of_another_type_is_refused(tmp_path, fields, says):
    raw = {"architectures": ["MiMoForCausalLM"], **SMALL, **fields}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"config\.json: malformed field \({says}"):
        DecoderConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("raw", "sizes"),
    [
        (
            {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": 300},
            (300, 64, 2, 4, 4, 16, 128),
        ),
        (
            {"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}},
            (262208, 2560, 34, 8, 4, 256, 131072),
        ),
        ({"model_type": "nothing", "n_embd": 64}, None),
    ],
)
def test_names_and_defaults_of_a_family_are_those_of_transformers(tmp_path, raw, sizes):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if sizes is None:
        with pytest.raises(CheckpointError, match=r"config\.json: field 'num_attention_heads' is missing"):
            ModelConfig.load(tmp_path)
        return
    m = ModelConfig.load(tmp_path)
    found = (m.vocab_size, m.hidden_size, m.num_layers, m.num_heads, m.num_kv_heads)
    assert (*found, m.head_dim, m.max_position_embeddings) == sizes


def test_written_weights_are_world_readable(tmp_path):
    tiny_mimo(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, 0),
        ({"num_nextn_predict_layers": 2}, 2),
        ({"mtp_num_hidden_layers": 1}, 1),
        ({"text_config": {"num_nextn_predict_layers": 1}}, 1),
        ({"text_config": {"mtp_num_hidden_layers": 2}}, 2),
    ],
)
def test_mtp_layers_are_counted_under_either_name_and_nested(fields, layers):
    raw = {"architectures": ["MiMoForCausalLM"], **SMALL, **fields}
    config = DecoderConfig.from_dict(raw)
    assert config.num_mtp_layers == layers
    for count in (0, 3):
        changed = config.with_mtp_layers(count)
        assert DecoderConfig.from_dict(changed.raw) == changed
        assert changed.num_mtp_layers == count


def tiny_drafting(layers):
    decoder = Decoder(
        DecoderConfig.from_dict({"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": layers, **SMALL})
    )
    decoder.init_weights(0, std=0.15)
    return decoder


@torch.no_grad()
def test_a_repeated_layer_is_trained_as_it_drafts():
    """Drafting from position i: the layer's first step covers all positions up to i; each further step adds a position,
    whose inputs are the previous step's output and the next token."""
    model, depths = tiny_drafting(1), 3
    tokens, layout = torch.randint(0, SMALL["vocab_size"], (19,)), PackedLayout.from_lengths(np.array([7, 12]))
    hidden = model.hidden_states(tokens, layout)
    found = model.draft_states(hidden, tokens, layout, depths, detach=True)
    layer, start, i = model.model.mtp_layers[0], 7, 5  # in the second sequence
    steps, embeds = hidden[start : start + i + 1], model.model.embed_tokens(tokens[start + 1 :])
    embeds[0] = 0
    for depth in range(1, depths + 1):
        place = i + depth - 1
        rope, row = rope_table(model.config, torch.arange(place + 1)), PackedLayout.from_lengths(np.array([place + 1]))
        out, _ = layer.draft(steps, embeds[: place + 1], rope, row)
        torch.testing.assert_close(found[depth - 1][start + place], out[-1], atol=1e-5, rtol=0)
        steps = torch.cat([steps, out[-1:]])


@torch.no_grad()
def test_a_second_layer_reads_the_first_s_output_one_position_later():
    model = tiny_drafting(2)
    tokens, layout = torch.randint(0, SMALL["vocab_size"], (12,)), PackedLayout.from_lengths(np.array([12]))
    hidden = model.hidden_states(tokens, layout)
    first, second = model.draft_states(hidden, tokens, layout, 2, detach=True)
    embeds, rope = model.model.embed_tokens(tokens.roll(-1)), rope_table(model.config, layout.positions)
    embeds[0] = 0
    shifted = torch.cat([torch.zeros_like(first[:1]), first[:-1]])
    expected, _ = model.model.mtp_layers[1].draft(shifted, embeds, rope, layout)
    torch.testing.assert_close(second, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("saved", ["qwen2"], indirect=True)
def test_blocks_of_sequences_do_not_change_what_is_computed(saved):
    _, folder = saved
    model, lengths = load_decoder(folder), np.array([17, 16, 5, 3])
    tokens, weight = torch.randint(0, SMALL["vocab_size"], (41,)), torch.randn(41, SMALL["hidden_size"])
    found = []
    for blocks in ((), (2, 2), (1, 3)):
        layout = PackedLayout.from_lengths(lengths, blocks=blocks)
        hidden = model.hidden_states(tokens, layout)
        (hidden * weight).sum().backward()
        found.append((hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        model.zero_grad()
    assert [batch * length for batch, length in layout.blocks] == [17, 48]
    for hidden, gradients in found[1:]:
        torch.testing.assert_close(hidden, found[0][0], atol=1e-5, rtol=0)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_depths_beyond_the_layers_repeat_the_last_one_and_ignore_packed_neighbours():
    model = tiny_drafting(2)
    tokens, lengths = torch.randint(0, SMALL["vocab_size"], (30,)), [13, 17]
    whole = PackedLayout.from_lengths(np.array(lengths))
    packed = model.draft_states(model.hidden_states(tokens, whole), tokens, whole, 3, detach=True)
    for row, start in zip(tokens.split(lengths), (0, lengths[0]), strict=True):
        layout = PackedLayout.from_lengths(np.array([len(row)]))
        alone = model.draft_states(model.hidden_states(row, layout), row, layout, 3, detach=True)
        for mine, theirs in zip(packed, alone, strict=True):
            torch.testing.assert_close(mine[start : start + len(row) - 1], theirs[:-1], atol=1e-5, rtol=0)
    model.model.mtp_layers[1].final_layernorm.weight.zero_()
    silent = model.draft_states(model.hidden_states(tokens, whole), tokens, whole, 3, detach=True)
    assert [bool(state.any()) for state in silent] == [True, False, False]


@pytest.mark.parametrize("loss", ["acceptance", "cross_entropy"])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("detach", [True, False])
def test_the_drafts_scores_and_gradients_equal_those_of_whole_logits(chunk, detach, loss):
    model = tiny_drafting(1)
    tokens, layout = torch.randint(0, SMALL["vocab_size"], (41,)), PackedLayout.from_lengths(np.array([20, 21]))
    targets = [
        DraftTargets(places, tokens[places + 2]) for places in (torch.arange(17, 9, -1), torch.arange(18, 3, -2))
    ]
    scores = model(tokens, layout, torch.arange(1), tokens[1:2], 0.7, chunk, targets, loss, detach)
    (scores.drafts[0].loss * 0.3 + scores.drafts[1].loss * 0.2).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    hidden = model.hidden_states(tokens, layout)
    assert torch.equal(scores.hidden, hidden)
    states = model.draft_states(hidden, tokens, layout, 2, detach)
    head = model.lm_head.weight.detach() if detach else model.lm_head.weight
    policy = torch.softmax(model.logits(tokens, layout) / 0.7, -1).detach()
    total = torch.zeros(())
    for state, target, score, factor in zip(states, targets, scores.drafts, (0.3, 0.2), strict=True):
        logits = state[target.places] @ head.T / 0.7
        if loss == "acceptance":  # at any depth, token p + 2 was sampled from the policy at p + 1
            accepted = torch.minimum(torch.softmax(logits, -1), policy[target.places + 1]).sum(-1)
            expected = -accepted.log().sum()
        else:
            expected = torch.nn.functional.cross_entropy(logits, target.tokens, reduction="sum")
        torch.testing.assert_close(score.loss, expected, atol=1e-4, rtol=0)
        assert score.hits == (logits.argmax(1) == target.tokens).sum()
        total = total + expected * factor
    total.backward()
    for name, p in model.named_parameters():
        assert (found[name] is None) == (p.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad, atol=1e-4, rtol=1e-4)
    reached = {name for name, gradient in found.items() if gradient is not None}
    assert (reached == {name for name in found if is_draft(name)}) == detach


def test_the_acceptance_loss_is_the_log_of_the_measured_acceptance_rate():
    """Many draws from a draft for one context are verified as in the engine."""
    torch.manual_seed(0)
    hidden, target, weight, draws = torch.randn(1, 6), torch.randn(1, 6), torch.randn(9, 6), 200_000
    loss, _ = ChunkedAcceptance.apply(hidden, weight, target, torch.zeros(1).long(), 0.7, 8)
    q, p = (torch.softmax(h @ weight.T / 0.7, -1) for h in (hidden, target))
    drafted = torch.multinomial(q.expand(draws, -1), 1)
    accepted, _ = judge(
        p.expand(draws, 2, -1), q.expand(draws, 1, -1), drafted, torch.rand(draws, 1), torch.rand(draws, 2)
    )
    assert 0.1 < accepted.float().mean() < 0.9
    assert accepted.float().mean().item() == pytest.approx(loss.neg().exp().item(), abs=5e-3)


def test_the_acceptance_loss_is_cross_entropy_for_a_deterministic_policy_and_zero_for_equal_ones():
    torch.manual_seed(0)
    weight, tokens = torch.eye(7), torch.randint(0, 7, (11,))
    sure = 200 * torch.nn.functional.one_hot(tokens, 7).float()
    gradients = []
    for loss, others in ((ChunkedAcceptance, (sure, tokens)), (ChunkedCrossEntropy, (tokens,))):
        hidden = torch.linspace(-40, 40, 77).view(11, 7).roll(3, 0).requires_grad_()  # including q near zero
        (total, hits) = loss.apply(hidden, weight, *others, 0.7, 4)
        total.backward()
        gradients.append((total.detach(), hits, hidden.grad))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)

    hidden = torch.randn(11, 7).requires_grad_()
    total, _ = ChunkedAcceptance.apply(hidden, weight, hidden.detach(), tokens, 1.0, 4)
    total.backward()
    assert total.abs() < 1e-5
    assert hidden.grad.abs().max() < 1e-6


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
@torch.no_grad()
def test_a_missing_draft_is_made_from_the_trunk(saved, tmp_path):
    theirs, folder = saved
    plain, model = load_decoder(folder), load_decoder(folder, mtp_from_trunk=True)
    assert check_checkpoint(folder).num_mtp_layers == plain.config.num_mtp_layers == 0
    assert check_checkpoint(folder, mtp_from_trunk=True) == model.config
    tokens, layout = torch.randint(0, SMALL["vocab_size"], (30,)), PackedLayout.from_lengths(np.array([30]))
    hidden = model.hidden_states(tokens, layout)
    (state,) = model.draft_states(hidden, tokens, layout, 1, detach=True)
    norm = lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()
    rope = rope_table(model.config, layout.positions)
    embed = norm(model.model.embed_tokens(tokens.roll(-1)))
    embed[0] = 0
    stream = HIDDEN_SHARE * norm(hidden) + embed
    one_more = plain.model.norm(plain.model.layers[-1](stream, rope, layout))  # a copy of the last layer
    torch.testing.assert_close(state, one_more, atol=1e-4, rtol=1e-4)

    save_checkpoint(tmp_path / "out", model.named_parameters(), model.config)
    back = load_decoder(tmp_path / "out")
    assert back.config == model.config
    assert back.config.raw["num_nextn_predict_layers"] == 1
    before = plain.config.architecture
    assert back.config.architecture == ("MiMoForCausalLM" if before == "Qwen2ForCausalLM" else before)
    drawn = load_decoder(folder, mtp_from_trunk=True)
    for (name, a), (_, b), (_, c) in zip(*(m.named_parameters() for m in (model, back, drawn)), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c), name
    known = type(theirs).from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(known(tokens[None]).logits, theirs(tokens[None]).logits, atol=1e-5, rtol=0)


def test_missing_draft_weights_are_reported_with_advice(tmp_path):
    tiny_mimo(tmp_path)
    trunk = {name: tensor for name, tensor in read_tensors(tmp_path).items() if not is_draft(name)}
    save_checkpoint(tmp_path, trunk, DecoderConfig.load(tmp_path))  # config.json still says one layer
    with pytest.raises(CheckpointError, match=r"missing tensors: model\.mtp_layers.*mtp\.init_from_trunk=true"):
        load_decoder(tmp_path)
    assert load_decoder(tmp_path, mtp_from_trunk=True).config.num_mtp_layers == 1


def test_an_existing_draft_is_kept(tmp_path):
    before = tiny_mimo(tmp_path)
    after = load_decoder(tmp_path, mtp_from_trunk=True)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_tensors_read_one_at_a_time_equal_those_read_at_once(tmp_path):
    tiny_mimo(tmp_path)
    with open_tensors(tmp_path) as read:
        assert all(torch.equal(read(name), tensor) for name, tensor in read_tensors(tmp_path).items())
        with pytest.raises(CheckpointError, match="no tensor absent in its files"):
            read("absent")


def test_kernels_that_fail_on_a_gpu_leave_the_eager_code_with_one_warning(monkeypatch, caplog):
    on_gpu, attempts = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 99)), []

    def fail(device):
        attempts.append(device)
        raise torch.OutOfMemoryError if len(attempts) == 1 else RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "_check", fail)
    monkeypatch.setattr(kernels.log, "propagate", True)
    with pytest.raises(torch.OutOfMemoryError):
        kernels.fuses(on_gpu)
    assert not any(kernels.fuses(on_gpu) for _ in range(3))
    assert len(attempts) == 2
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "cuda:99 is slower" in caplog.text
    assert "RuntimeError: Failed to find C compiler" in caplog.text


def test_an_export_has_what_engines_need_to_load_a_vision_model(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    names = {"tokenizer.json", "processor_config.json", "preprocessor_config.json"}  # transformers 5 writes the second
    for folder in (source, target):
        folder.mkdir()
    for name in (*names, "README.md"):
        (source / name).write_text("{}")
    copy_tokenizer(source, target)
    assert {file.name for file in target.iterdir()} == names
