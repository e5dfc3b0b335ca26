"""Parcels of tensors for SGLang, and comparison of its checksums with the sent tensors; without a server."""

from __future__ import annotations

import hashlib

import pytest
import torch

from asyncrl.param_sync.manifest import TensorSpec
from asyncrl.rollouter.engines.sglang import checksums
from asyncrl.rollouter.engines.sglang.checksums import SentChecksums, unmoved
from asyncrl.rollouter.engines.sglang.delivery import Parcel, parcels

MLA_HALVES = ("q_a_proj", "kv_a_proj_with_mqa")


def deepseek_layer(i, hidden=448, q_rank=96, kv_rank=32, rope=4):
    """Shapes of a DeepSeek-V3.2 layer, an eighth to a sixteenth as wide, in the order of its safetensors files."""
    shapes = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, 1152),
        "mlp.gate_proj": (1152, hidden),
        "mlp.up_proj": (1152, hidden),
        "self_attn.indexer.k_norm": (8,),
        "self_attn.indexer.weights_proj": (64, hidden),
        "self_attn.indexer.wk": (8, hidden),
        "self_attn.indexer.wq_b": (512, q_rank),
        "self_attn.kv_a_layernorm": (kv_rank,),
        "self_attn.kv_a_proj_with_mqa": (kv_rank + rope, hidden),
        "self_attn.kv_b_proj": (1024, kv_rank),
        "self_attn.o_proj": (hidden, 1024),
        "self_attn.q_a_layernorm": (q_rank,),
        "self_attn.q_a_proj": (q_rank, hidden),
        "self_attn.q_b_proj": (768, q_rank),
    }
    return {f"model.layers.{i}.{name}.weight": shape for name, shape in shapes.items()}


@pytest.mark.parametrize("align_bytes", [1, 64])
@pytest.mark.parametrize("order", ["as they are stored", "any"])
def test_tensors_that_sglang_joins_are_in_one_parcel(order, align_bytes):
    """SGLang's loaders drop a half that arrives without the other."""
    shapes = {name: shape for i in range(6) for name, shape in deepseek_layer(i).items()}
    names = list(shapes)
    generator = torch.Generator().manual_seed(0)
    if order == "any":
        names = [names[i] for i in torch.randperm(len(names), generator=generator)]
    tensors = {name: torch.randn(shapes[name], generator=generator).bfloat16() for name in names}
    arriving = ((TensorSpec(name, "bfloat16", shapes[name]), tensor) for name, tensor in tensors.items())
    capacity = 2 * 448 * 1024 * 2  # two of the large tensors
    pair = Parcel("cpu", capacity, align_bytes), Parcel("cpu", capacity, align_bytes)
    contents = []
    for parcel in parcels(arriving, pair, tensors.keys()):
        flat = parcel.flat()
        contents.append({place.name for place in parcel.places})
        for place in parcel.places:
            found = flat[place.start_idx : place.end_idx].view(torch.bfloat16).view(place.shape)
            assert torch.equal(found, tensors[place.name])
    assert len(contents) > 12
    assert sorted(name for parcel in contents for name in parcel) == sorted(names)
    for halves in MLA_HALVES, ("indexer.wk", "indexer.weights_proj"):
        for i in range(6):
            one, other = (f"model.layers.{i}.self_attn.{half}.weight" for half in halves)
            assert any({one, other} <= parcel for parcel in contents)


def test_a_tensor_without_another_half_does_not_wait_for_one():
    """As in the attention of DeepSeek-V2-Lite."""
    names = ["layers.0.self_attn.kv_a_proj_with_mqa.weight", "layers.0.self_attn.q_proj.weight"]
    arriving = ((TensorSpec(name, "float32", (4,)), torch.ones(4)) for name in names)
    filled = parcels(arriving, (Parcel("cpu", 16), Parcel("cpu", 16)), names)
    assert [[place.name for place in parcel.places] for parcel in filled] == [[name] for name in names]


def test_halves_that_exceed_a_parcel_together_still_share_one():
    names = [f"layers.0.self_attn.{half}.weight" for half in MLA_HALVES]
    arriving = ((TensorSpec(name, "float32", (8,)), torch.full((8,), float(i))) for i, name in enumerate(names, 1))
    (parcel,) = parcels(arriving, (Parcel("cpu", 32), Parcel("cpu", 32)), names)
    assert parcel.flat().view(torch.float32).tolist() == 8 * [1.0] + 8 * [2.0]


def test_parcels_without_padding_accept_only_aligned_tensors():
    parcel = Parcel("cpu", 64)
    odd, wide = TensorSpec("odd", "bfloat16", (3,)), TensorSpec("wide", "float32", (1,))
    parcel.add((odd, torch.ones(3, dtype=torch.bfloat16)))
    assert not parcel.takes(wide)
    assert parcel.takes(TensorSpec("narrow", "bfloat16", (1,)))
    assert not parcel.takes(TensorSpec("large", "bfloat16", (30,)))
    assert parcel.flat().numel() == odd.nbytes


def test_checksums_account_for_fused_and_shared_tensors():
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in ("v", "q", "k")]
    tensors = {name: torch.randn(2, 3, generator=generator) for name in [*names, "model.norm.weight"]}
    tensors["mtp.layers.0.fc.weight"] = torch.randn(2, 3, generator=generator)
    specs = {n: TensorSpec(n, "float32", (2, 3), "draft" if "mtp" in n else "target") for n in tensors}
    sent = SentChecksums(specs.values())
    for name, tensor in tensors.items():
        sent.add(specs[name], tensor)

    def live(*parts):
        return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]

    v, q, k, norm, fc = tensors.values()
    assert sent.differences("target", [live(q, k, v), live(norm)]) == []
    assert sent.differences("target", [live(q), live(k), live(v), live(norm)]) == []
    (stale,) = sent.differences("target", [live(q, k, v), live(norm), live(norm + 1)])
    assert stale == "1 live parameters of the target match no sent tensor"
    assert sent.differences("target", [live(q, k, v)]) == ["model.norm.weight: sent, but no live parameter matches it"]
    assert len(sent.differences("target", [live(k, q, v), live(norm)])) == 4
    assert sent.differences("draft", [live(fc), live(norm)], shared=True) == []
    later = SentChecksums([specs["mtp.layers.0.fc.weight"]], sent)  # the draft alone, beside the same target
    later.add(specs["mtp.layers.0.fc.weight"], fc + 1)
    assert later.differences("draft", [live(fc + 1), live(norm)], shared=True) == []
    assert len(sent.differences("draft", [live(fc), live(norm)])) == 1


def test_checksums_account_for_joined_halves_of_latent_attention():
    halves = {f"layers.0.self_attn.{half}.weight": i * torch.ones(2, 3) for i, half in enumerate(MLA_HALVES)}
    specs = {name: TensorSpec(name, "float32", (2, 3)) for name in halves}
    sent = SentChecksums(specs.values())
    for name in reversed(halves):  # in reverse order
        sent.add(specs[name], halves[name])

    def live(*parts):
        return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]

    q, kv = halves.values()
    assert sent.differences("target", [live(q, kv)]) == []
    assert len(sent.differences("target", [live(q + 1, kv)])) == 3


def test_fused_tensors_are_hashed_once_they_are_known(monkeypatch):
    hashed = []
    sha256 = checksums._sha256
    monkeypatch.setattr(checksums, "_sha256", lambda tensors: hashed.append(len(tensors)) or sha256(tensors))
    names = [f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    specs = [TensorSpec(name, "float32", (2, 3)) for name in names]
    last = None
    for scale in (1, 2):
        hashed.clear()
        tensors = [scale * (i + 1) * torch.ones(2, 3) for i in range(3)]
        last = SentChecksums(specs, last)
        for spec, tensor in zip(specs, tensors):
            last.add(spec, tensor)
        live = [sha256(tensors[:2]), sha256(tensors[2:])]
        assert last.differences("target", live) == []
        assert last.differences("target", live[1:])[0] == f"{names[0]}: sent, but no live parameter matches it"
        assert sorted(hashed) == ([1, 1, 1, 2] if scale == 1 else [1, 2])


def test_parameters_that_did_not_change_are_reported_by_the_names_of_sent_tensors():
    layer = "model.layers.0"
    live = {
        "fused": f"{layer}.self_attn.fused_qkv_a_proj_with_mqa.weight",
        "experts": f"{layer}.mlp.experts.w13_weight",
        "norm": f"{layer}.input_layernorm.weight",
    }
    before = {f"{worker}: {name}": "old" for worker in range(2) for name in live.values()}
    sent = [f"{layer}.self_attn.{half}.weight" for half in MLA_HALVES]
    sent += [f"{layer}.mlp.experts.17.up_proj.weight", live["norm"], f"{layer}.mlp.unknown.weight"]

    def wrong(**now):
        changed = {f"{worker}: {live[which]}": f"{worker}" for which in now for worker in now[which]}
        return unmoved(sent, before, before | changed)

    assert wrong(fused=[0, 1], experts=[1], norm=[0, 1]) == []  # a worker's part may be the same
    assert wrong(fused=[0, 1], norm=[0, 1]) == [f"{sent[2]}: it changed, but SGLang's {live['experts']} did not"]
    assert wrong(experts=[0], norm=[0, 1]) == [
        f"{name}: it changed, but SGLang's {live['fused']} did not" for name in sorted(sent[:2])
    ]
    assert unmoved([], before, before) == []
