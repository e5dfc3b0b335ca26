"""Qwen3-Next and Qwen3.5 in megatron-core: Gated DeltaNet over packed sequences, round trips of tensors, the draft."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncrl.config.schema import Config
from asyncrl.models.checkpoint import read_tensors
from asyncrl.models.config import CheckpointError
from asyncrl.trainer.backends.megatron.bridges import bridge_of, read_source
from asyncrl.trainer.backends.megatron.delta_net import gated_delta_rule
from asyncrl.trainer.backends.megatron.layout import fit_problems, linear_layers
from tests.support.delta_nets import DELTA_NETS, make_delta_net
from tests.support.megatron import built, process_group, random_tokens, states

pytestmark = pytest.mark.megatron

VOCAB = 67


@pytest.fixture(scope="module", autouse=True)
def alone():
    with process_group():
        yield


def token_by_token(q, k, v, decay, write):
    """The recurrence in the docstring of `gated_delta_rule`."""
    state, outs = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        recalled = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], write[:, t, :, None] * (v[:, t] - recalled))
        outs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("length", [1, 15, 16, 50])
def test_chunks_equal_the_recurrence_token_by_token(length):
    """Values and gradients, for decays from none to nearly complete."""
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(2, length, 3, *shape, generator=generator, dtype=torch.float64)
    q, k, v = random(8), F.normalize(random(8), dim=-1), random(5)
    inputs = [x.requires_grad_() for x in (q, k, v, -10 * random().abs() ** 3, random().sigmoid())]
    found, expected = gated_delta_rule(*inputs, chunk=16), token_by_token(*inputs)
    assert found.shape == (2, length, 3, 5)
    assert (found - expected).abs().max() < 1e-12
    along = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(out, inputs, along) for out in (found, expected)), strict=True):
        assert (one - other).abs().max() < 1e-11


@pytest.mark.parametrize("family", DELTA_NETS)
@torch.no_grad()
def test_logits_equal_transformers_and_tensors_round_trip_bit_for_bit(family, tmp_path):
    theirs = make_delta_net(tmp_path, family, mtp=True)
    (ours,), conversion = built(tmp_path)
    tokens = random_tokens(VOCAB, (2, 100))  # more than a chunk
    expected = theirs(tokens).logits
    (hidden,) = states(ours, tokens)
    assert (F.linear(hidden, ours.head_weight) - expected).abs().max() <= 1e-5
    assert expected.abs().max() > 0.1

    before, after = read_tensors(tmp_path), dict(conversion.whole(lambda parameter: parameter))
    assert after.keys() == before.keys()
    assert sum(name.startswith("mtp.") for name in after) > 10
    assert all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
@torch.no_grad()
def test_draft_states_equal_those_of_transformers_layers(family, tmp_path):
    """The draft's input is the embedding followed by the trunk's normed state, also at the first position."""
    theirs = make_delta_net(tmp_path, family, mtp=True)
    (ours,), _ = built(tmp_path)
    tokens = random_tokens(VOCAB, (2, 30))
    hidden = theirs.model(tokens).last_hidden_state[:, :-1]
    rope = theirs.model.rotary_emb(hidden, torch.arange(29)[None])
    embedded = theirs.mtp["pre_fc_norm_embedding"](theirs.model.embed_tokens(tokens[:, 1:]))
    joined = theirs.mtp["fc"](torch.cat([embedded, theirs.mtp["pre_fc_norm_hidden"](hidden)], -1))
    causal = torch.full((29, 29), -torch.inf).triu(1)[None, None]
    expected = theirs.mtp["norm"](theirs.mtp["layers"][0](joined, rope, attention_mask=causal))
    _, found = states(ours, tokens, depths=1)
    logits = [F.linear(x, ours.head_weight) for x in (found[:, :-1], expected)]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    assert logits[1].abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_packed_sequences_do_not_affect_each_other(family, tmp_path):
    """Neither by state nor by convolution, in both passes; some are shorter than the convolution's width."""
    make_delta_net(tmp_path, family, mtp=True)
    (ours,), _ = built(tmp_path)
    lengths = [7, 1, 70, 2, 3]
    tokens = random_tokens(VOCAB, (1, sum(lengths)))
    together = [state[0].split(lengths) for state in states(ours, tokens, 1, lengths)]
    for b, alone in enumerate(tokens.split(lengths, 1)):
        for depth, state in enumerate(states(ours, alone, 1)):
            defined = slice(None, -1 if depth else None)
            assert torch.allclose(together[depth][b][defined], state[0, defined], atol=1e-5), (b, depth)

    layer = next(m for m in ours.modules() if type(m).__name__ == "DeltaNet")
    sequences = packed(lengths)
    hidden = torch.randn(sum(lengths), 1, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out, _ = layer(hidden, packed_seq_params=sequences)
    for b, of_sequence in enumerate(out.split(lengths)):
        (gradient,) = torch.autograd.grad(of_sequence.square().sum(), hidden, retain_graph=True)
        reached = [bool(part.abs().max()) for part in gradient.split(lengths)]
        assert reached == [i == b for i in range(len(lengths))]


def packed(lengths):
    import torch.distributed as dist

    from asyncrl.models.layout import PackedLayout
    from asyncrl.trainer.backends.megatron.packed import PackedSequences

    lengths = np.array(lengths)
    layout = PackedLayout.from_lengths(lengths)
    return PackedSequences.of(torch.zeros(lengths.sum(), dtype=torch.long), lengths, layout, dist.new_group([0]))


# -- config.json ---------------------------------------------------------------------------------------------------


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def changed(folder, without=(), **fields):
    kept = {name: value for name, value in config_of(folder).items() if name not in without}
    (folder / "config.json").write_text(json.dumps(kept | fields))
    return folder


def test_layer_types_and_mtp_layers_are_read_from_every_form_of_config(tmp_path):
    make_delta_net(tmp_path, "qwen3_next", mtp=True)
    text = config_of(tmp_path)
    assert linear_layers(text) == [True, False, True, True]
    without_types = {name: value for name, value in text.items() if name != "layer_types"}
    assert linear_layers(without_types) == [True, True, True, False]
    assert linear_layers(without_types | {"full_attention_interval": 2}) == [True, False, True, False]
    assert not any(linear_layers({"num_hidden_layers": 4}))

    # as published, and as vLLM reads it
    assert read_source(tmp_path, needs_draft=True).num_mtp_layers == 1
    for field in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        assert read_source(changed(tmp_path, **{field: 1})).num_mtp_layers == 1
        nested = {"architectures": text["architectures"], "text_config": config_of(tmp_path)}
        (tmp_path / "config.json").write_text(json.dumps(nested))
        source = read_source(tmp_path)
        assert source.num_mtp_layers == bridge_of(source).provider.mtp_num_layers == 1
        (tmp_path / "config.json").write_text(json.dumps(text))
    assert bridge_of(read_source(changed(tmp_path, mtp_num_hidden_layers=0))).provider.mtp_num_layers is None


# -- refusals ------------------------------------------------------------------------------------------------------


def test_unsupported_models_are_refused_with_the_reason(tmp_path):
    make_delta_net(tmp_path, "qwen3_5")
    with pytest.raises(CheckpointError, match=r"mbridge has no bridge for qwen3_5_text"):
        bridge_of(read_source(tmp_path), "mbridge")
    with pytest.raises(CheckpointError, match="2 MTP layers, which in Qwen3_5ForCausalLM share norms and projection"):
        bridge_of(read_source(changed(tmp_path, mtp_num_hidden_layers=2)))
    with pytest.raises(CheckpointError, match=r"lacks 'linear_key_head_dim', which Qwen3_5ForCausalLM has"):
        bridge_of(read_source(changed(tmp_path, without=("mtp_num_hidden_layers", "linear_key_head_dim"))))


def test_layouts_that_do_not_fit_linear_attention_are_refused_by_their_key(tmp_path):
    make_delta_net(tmp_path, "qwen3_5", linear_num_key_heads=1)
    config = Config()
    config.trainer.megatron.context_parallel_size = 2
    config.trainer.megatron.tensor_model_parallel_size = 2
    problems = list(fit_problems(config, config_of(tmp_path)))
    assert [problem.partition(":")[0] for problem in problems] == [
        "trainer.megatron.tensor_model_parallel_size",
        "trainer.megatron.context_parallel_size",
    ]
    assert "linear_num_key_heads 1" in problems[0]
    assert "Gated DeltaNet" in problems[1]
