"""Canonical names resolved to the parameters of live models, with real name sets as in engines like vLLM."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.manifest import Manifest, ManifestError, TensorSpec
from asyncrl.param_sync.names import PACKED, LiveTensor, NameResolver, Resolved, is_adapter, unwrap, wrap

Shapes = dict[str, tuple[int, ...]]
H, Q, KV, MLP, V, E, MOE_I = 64, 96, 32, 160, 320, 8, 48


class Model(NamedTuple):
    """Sent names and live parameters of a model; ``rename``: renaming by the engine's own loader."""

    sent: Shapes
    live: Shapes
    packed: Mapping[str, Any] = PACKED
    rename: Callable[[str], str] | None = None
    tied: Mapping[str, str] = MappingProxyType({})


def prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def attention(bias: bool = False, qk_norm: bool = False) -> tuple[Shapes, Shapes]:
    sent: Shapes = {
        "q_proj.weight": (Q, H),
        "k_proj.weight": (KV, H),
        "v_proj.weight": (KV, H),
        "o_proj.weight": (H, Q),
    }
    live: Shapes = {"qkv_proj.weight": (Q + 2 * KV, H), "o_proj.weight": (H, Q)}
    if bias:
        sent |= {"q_proj.bias": (Q,), "k_proj.bias": (KV,), "v_proj.bias": (KV,)}
        live |= {"qkv_proj.bias": (Q + 2 * KV,)}
    norms: Shapes = {"q_norm.weight": (32,), "k_norm.weight": (32,)} if qk_norm else {}
    return prefixed("self_attn", sent | norms), prefixed("self_attn", live | norms)


def latent_attention() -> tuple[Shapes, Shapes]:
    """DeepSeek's attention: the first projections of queries and of keys and values are packed."""
    both: Shapes = {
        "q_a_layernorm.weight": (24,),
        "q_b_proj.weight": (Q, 24),
        "kv_a_layernorm.weight": (16,),
        "kv_b_proj.weight": (128, 16),
        "o_proj.weight": (H, Q),
    }
    sent: Shapes = {"q_a_proj.weight": (24, H), "kv_a_proj_with_mqa.weight": (24, H)}
    live: Shapes = {"fused_qkv_a_proj.weight": (48, H)}
    return prefixed("self_attn", both | sent), prefixed("self_attn", both | live)


def gated_delta_net(fused: bool) -> tuple[Shapes, Shapes]:
    both: Shapes = {
        "conv1d.weight": (128, 1, 4),
        "dt_bias": (4,),
        "A_log": (4,),
        "norm.weight": (16,),
        "out_proj.weight": (H, 64),
    }
    live: Shapes = {"in_proj_qkvz.weight": (192, H), "in_proj_ba.weight": (8, H)}
    split: Shapes = {
        "in_proj_qkv.weight": (128, H),
        "in_proj_z.weight": (64, H),
        "in_proj_b.weight": (4, H),
        "in_proj_a.weight": (4, H),
    }
    return prefixed("linear_attn", both | (live if fused else split)), prefixed("linear_attn", both | live)


def mlp(inner: int = MLP, name: str = "mlp") -> tuple[Shapes, Shapes]:
    sent: Shapes = {"gate_proj.weight": (inner, H), "up_proj.weight": (inner, H), "down_proj.weight": (H, inner)}
    live: Shapes = {"gate_up_proj.weight": (2 * inner, H), "down_proj.weight": (H, inner)}
    return prefixed(name, sent), prefixed(name, live)


def experts(shared: str | None = None, gate: Shapes | None = None) -> tuple[Shapes, Shapes]:
    router: Shapes = {"mlp.gate.weight": (E, H)} | (gate or {})
    sent, live = dict(router), dict(router)
    for i in range(E):
        sent |= mlp(MOE_I, f"mlp.experts.{i}")[0]
    live |= {"mlp.experts.w13_weight": (E, 2 * MOE_I, H), "mlp.experts.w2_weight": (E, H, MOE_I)}
    if shared:
        sent, live = sent | mlp(name=f"mlp.{shared}")[0], live | mlp(name=f"mlp.{shared}")[1]
    return sent, live


def layer(prefix: str, *blocks: tuple[Shapes, Shapes]) -> tuple[Shapes, Shapes]:
    norms: Shapes = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
    sent, live = dict(norms), dict(norms)
    for block in blocks:
        sent, live = sent | block[0], live | block[1]
    return prefixed(prefix, sent), prefixed(prefix, live)


def model(*layers: tuple[Shapes, Shapes], tied: bool = False, **options: Any) -> Model:
    sent: Shapes = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not tied:
        sent["lm_head.weight"] = (V, H)
    live = dict(sent)
    for one in layers:
        sent, live = sent | one[0], live | one[1]
    return Model(sent, live, tied={"lm_head.weight": "model.embed_tokens.weight"} if tied else {}, **options)


def qwen2() -> Model:
    return model(*(layer(f"model.layers.{i}", attention(bias=True), mlp()) for i in range(3)), tied=True)


def qwen3() -> Model:
    return model(*(layer(f"model.layers.{i}", attention(qk_norm=True), mlp()) for i in range(3)))


def qwen3_moe() -> Model:
    return model(*(layer(f"model.layers.{i}", attention(qk_norm=True), experts()) for i in range(3)))


def deepseek_v3() -> Model:
    gate: Shapes = {"mlp.gate.e_score_correction_bias": (E,)}
    return model(
        layer("model.layers.0", latent_attention(), mlp()),
        *(layer(f"model.layers.{i}", latent_attention(), experts("shared_experts", gate)) for i in (1, 2)),
        packed={**PACKED, "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]},
    )


def gated_delta_net_model(fused: bool) -> Model:
    gate: Shapes = {"mlp.shared_expert_gate.weight": (1, H)}
    feed_forward = experts("shared_expert", gate) if fused else mlp()
    return model(
        *(layer(f"model.layers.{i}", gated_delta_net(fused), feed_forward) for i in (0, 1)),
        layer("model.layers.2", attention(qk_norm=True), feed_forward),
        # vLLM's own mapping of Qwen3-Next, where packed modules are listed as their own parts
        packed={**PACKED, "in_proj_qkvz": ["in_proj_qkvz"], "in_proj_ba": ["in_proj_ba"]} if fused else PACKED,
    )


def mtp_layer(prefix: str, block: str) -> tuple[Shapes, Shapes]:
    own: Shapes = {
        "token_layernorm.weight": (H,),
        "hidden_layernorm.weight": (H,),
        "input_proj.weight": (H, 2 * H),
        "final_layernorm.weight": (H,),
    }
    sent, live = layer("", attention(bias=True), mlp())
    return prefixed("model.mtp_layers.0", own) | {f"model.mtp_layers.0{n}": s for n, s in sent.items()}, prefixed(
        prefix, own
    ) | {f"{prefix}{block}{n}": s for n, s in live.items()}


def mimo() -> Model:
    """Target and draft in one model, as in the native engine, but packed."""
    return model(layer("model.layers.0", attention(bias=True), mlp()), mtp_layer("model.mtp_layers.0", ""))


def mimo_draft() -> Model:
    """vLLM's draft model: layers are numbered after the target's, and the decoder block is one level deeper."""

    def rename(name: str) -> str:
        name = name.replace("mtp_layers.0.", "mtp_layers.36.")
        return re.sub(
            r"(mtp_layers\.36\.)(self_attn|mlp|input_layernorm|post_attention_layernorm)", r"\1mtp_block.\2", name
        )

    sent, live = mtp_layer("model.mtp_layers.36", ".mtp_block")
    return Model(sent, live, rename=rename)


MODELS = {
    "qwen2": qwen2(),
    "qwen3": qwen3(),
    "qwen3_moe": qwen3_moe(),
    "mimo": mimo(),
    "mimo_draft": mimo_draft(),
    "deepseek_v3": deepseek_v3(),
    "qwen3_next": gated_delta_net_model(fused=True),
    "qwen3_5": gated_delta_net_model(fused=False),
}

LORA_MODULES = {
    *("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "experts", "gate"),
    *("in_proj_qkvz", "in_proj_ba", "out_proj", "fused_qkv_a_proj", "q_b_proj", "kv_b_proj"),
}
WRAPPINGS: dict[str, Callable[[str], bool]] = {
    "nowhere": lambda module: False,
    "everywhere": lambda module: True,
    "attention only": lambda module: "attn" in module,
    "one layer": lambda module: ".0." in module,
    "experts only": lambda module: module.endswith("experts"),
}


def wrapped(live: Shapes, which: Callable[[str], bool]) -> Shapes:
    def name_in_model(name: str) -> str:
        module, _, leaf = name.rpartition(".")
        wraps = module.rpartition(".")[2] in LORA_MODULES and which(module)
        return f"{module}.base_layer.{leaf}" if wraps else name

    return {name_in_model(name): shape for name, shape in live.items()}


def manifest_of(shapes: Shapes, tied: Mapping[str, str] | None = None, dtype: str = "bfloat16") -> Manifest:
    specs = [TensorSpec(name, dtype, shape) for name, shape in shapes.items()]
    specs += [TensorSpec(name, dtype, shapes[to], tied_to=to) for name, to in (tied or {}).items()]
    return Manifest(tuple(specs))


def live_of(shapes: Shapes, dtype: str = "bfloat16") -> dict[str, LiveTensor]:
    return {name: LiveTensor(dtype, shape) for name, shape in shapes.items()}


def resolver_of(m: Model, live: Shapes | None = None, **options: Any) -> NameResolver:
    live = m.live if live is None else live
    return NameResolver(live_of(live), packed=m.packed, rename=m.rename, **options)


class EngineLoader:
    """Finds parameters as an engine's loader does: by replacing substrings; the first rule that gives a live name wins.

    With ``expects_base_layer`` names are matched unchanged; otherwise the wrapping of modules is ignored."""

    def __init__(self, m: Model, live: Shapes, expects_base_layer: bool) -> None:
        self.rename = m.rename or (lambda name: name)
        self.rules = [(packed, part) for packed, parts in m.packed.items() for part in parts if part != packed]
        self.names = {name if expects_base_layer else unwrap(name): name for name in live}

    def owner(self, name: str) -> str | None:
        name = self.rename(name)
        candidates = [
            name.replace(part, packed) for packed, part in self.rules if part in name and ".experts." not in name
        ]
        if one := re.search(r"experts\.\d+\.(gate_proj|up_proj|down_proj)\.(base_layer\.)?", name):
            fused = "w2_" if one[1] == "down_proj" else "w13_"
            candidates = [name.replace(one[0], f"experts.{one[2] or ''}{fused}")]
        return next((self.names[c] for c in [*candidates, name] if c in self.names), None)


every_model = pytest.mark.parametrize("m", MODELS.values(), ids=MODELS.keys())
every_wrapping = pytest.mark.parametrize("which", WRAPPINGS.values(), ids=WRAPPINGS.keys())
either_loader = pytest.mark.parametrize("expects", [False, True], ids=["inner names", "base_layer names"])


@every_model
@every_wrapping
@either_loader
def test_every_name_leads_the_engine_s_loader_to_its_owner(m, which, expects):
    live = wrapped(m.live, which)
    plan = resolver_of(m, live, expects_base_layer=expects).resolve(manifest_of(m.sent, m.tied))
    assert [t.name for t in plan.tensors] == [*m.sent, *m.tied]
    loader = EngineLoader(m, live, expects)
    loaded = [t for t in plan.tensors if t.load_as is not None]
    assert {t.name: t.owner for t in loaded} == {t.name: loader.owner(t.load_as) for t in loaded}
    assert {t.owner for t in loaded} == set(live)
    assert {t.name for t in plan.tensors} - {t.name for t in loaded} == set(m.tied)
    assert len({(t.owner, t.part, t.expert) for t in loaded}) == len(loaded)


@every_model
@every_wrapping
def test_a_name_contains_base_layer_exactly_if_its_own_module_is_wrapped(m, which):
    live = wrapped(m.live, which)
    for sent in (m.sent, {wrap(name): shape for name, shape in m.sent.items()}):
        for expects in (False, True):
            for t in resolver_of(m, live, expects_base_layer=expects).resolve(manifest_of(sent)).tensors:
                assert ("base_layer" in t.load_as) == (expects and "base_layer" in t.owner), t
                assert unwrap(t.load_as) == unwrap(t.name)


def test_a_model_with_the_sender_s_names_uses_them_unchanged():
    m = qwen3_moe()
    plan = NameResolver(live_of(m.sent), expects_base_layer=True).resolve(manifest_of(m.sent))
    assert all(t.load_as == t.owner == t.name and t.kind == "whole" for t in plan.tensors)
    assert plan.loads() == {name: (name,) for name in m.sent}


def resolved(sent: list[str], live: list[str], **options: Any) -> dict[str, Resolved]:
    """Resolution by names alone, without dtypes and shapes."""
    resolver = NameResolver({name: LiveTensor(None, None) for name in live}, **options)
    return {t.name: t for t in resolver.resolve(TensorSpec(name, "bfloat16", (4, 4)) for name in sent).tensors}


def test_a_packing_rule_never_rewrites_a_live_name():
    sent = ["x.in_proj_qkvz.weight", "x.in_proj_qkvzz.weight", "x.in_proj_ba.weight"]
    packed = {**PACKED, "in_proj_qkvzz": ["in_proj_qkvz"], "in_proj_ba": ["in_proj_ba"]}
    for t in resolved(sent, sent, packed=packed).values():
        assert (t.load_as, t.owner, t.kind) == (t.name, t.name, "whole")


def test_a_part_is_loaded_under_its_own_name_and_is_not_packed_twice():
    split = [f"x.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    live = ["x.in_proj_qkvz.base_layer.weight", "x.in_proj_ba.base_layer.weight"]
    plan = resolved(split, live)
    assert [t.load_as for t in plan.values()] == split
    assert [(t.owner, t.part) for t in plan.values()] == [
        (live[0], "in_proj_qkv"),
        (live[0], "in_proj_z"),
        (live[1], "in_proj_b"),
        (live[1], "in_proj_a"),
    ]


def test_parts_that_a_lora_engine_keeps_separate_are_whole_beside_packed_ones():
    """With LoRA, vLLM's Qwen3.5 keeps in_proj_qkv and in_proj_z separate, and packs the other two."""
    split = [f"x.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")]
    live = [wrap("x.in_proj_qkv.weight"), wrap("x.in_proj_z.weight"), wrap("x.in_proj_ba.weight")]
    plan = resolved(split, live, expects_base_layer=True)
    assert [t.load_as for t in plan.values()] == [wrap(name) for name in split]
    assert [t.kind for t in plan.values()] == ["whole", "whole", "packed", "packed"]


def test_rules_match_whole_segments_only():
    with pytest.raises(ManifestError, match=r"unknown to the live model: x.own_up_proj.weight; x.up_proj2.weight"):
        resolved(["x.own_up_proj.weight", "x.up_proj2.weight"], ["x.own_gate_up_proj.weight", "x.gate_up_proj.weight"])


def test_a_rule_of_two_segments_packs_only_below_its_own_module():
    packed = {"attn.qkv": ["attn.q", "attn.k", "attn.v"]}
    plan = resolved(
        ["a.attn.q.bias", "a.attn.k.bias", "a.attn.v.bias", "a.cross.q.bias"],
        ["a.attn.qkv.bias", "a.cross.q.bias"],
        packed=packed,
    )
    assert [t.kind for t in plan.values()] == ["packed"] * 3 + ["whole"]


def test_wrapped_and_unwrapped_modules_of_one_kind_may_coexist():
    """A vision tower's merger is not wrapped, but the language model is; some senders mark both."""
    sent = [
        "merger.fc1.base_layer.weight",
        "merger.fc1.base_layer.bias",
        "layers.0.o_proj.weight",
        "layers.1.o_proj.weight",
    ]
    live = ["merger.fc1.weight", "merger.fc1.bias", "layers.0.o_proj.base_layer.weight", "layers.1.o_proj.weight"]
    assert [t.load_as for t in resolved(sent, live, expects_base_layer=True).values()] == live
    assert [t.load_as for t in resolved(sent, live).values()] == [unwrap(name) for name in live]
    assert [t.owner for t in resolved(sent, live).values()] == live


@pytest.mark.parametrize("leaf", ["weight", "bias", "weight_scale", "weight_scale_inv", "input_scale", "qweight"])
def test_any_leaf_of_a_wrapped_module_gets_base_layer(leaf):
    sent = [f"x.q_proj.{leaf}", f"x.k_proj.{leaf}", f"x.v_proj.{leaf}", f"x.o_proj.{leaf}"]
    live = [f"x.qkv_proj.base_layer.{leaf}", f"x.o_proj.base_layer.{leaf}"]
    assert [t.load_as for t in resolved(sent, live, expects_base_layer=True).values()] == [wrap(name) for name in sent]


def test_a_leaf_that_is_live_under_both_names_keeps_each():
    both = ["x.proj.weight", "x.proj.base_layer.weight"]
    assert [(t.load_as, t.owner) for t in resolved(both, both, expects_base_layer=True).values()] == list(
        zip(both, both)
    )


@either_loader
@pytest.mark.parametrize("live_middle", ["", "base_layer.", "routed_experts.", "base_layer.routed_experts."])
@pytest.mark.parametrize("sent_middle", ["", "base_layer."])
def test_tensors_of_all_experts_lose_base_layer(expects, live_middle, sent_middle):
    live = [f"mlp.experts.{live_middle}w13_weight", f"mlp.experts.{live_middle}w2_weight"]
    sent = [f"mlp.experts.{sent_middle}gate_up_proj", f"mlp.experts.{sent_middle}down_proj"]
    plan = resolved(sent, live, expects_base_layer=expects)
    assert [(t.load_as, t.owner, t.kind) for t in plan.values()] == [
        ("mlp.experts.gate_up_proj", live[0], "fused"),
        ("mlp.experts.down_proj", live[1], "fused"),
    ]
    if "routed" not in live_middle:
        plan = resolved(
            [f"mlp.experts.{sent_middle}w13_weight", "mlp.experts.w2_weight"], live, expects_base_layer=expects
        )
        assert [t.load_as for t in plan.values()] == ["mlp.experts.w13_weight", "mlp.experts.w2_weight"]
        assert [t.owner for t in plan.values()] == live


ADAPTERS = [
    "model.layers.0.self_attn.q_proj.lora_A.weight",
    "model.layers.0.self_attn.q_proj.lora_B.default.weight",
    "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
    "model.embed_tokens.lora_embedding_A.default",
    "model.embed_tokens.lora_embedding_B",
]


def test_adapter_tensors_are_passed_through_and_reported():
    live = live_of({wrap("model.layers.0.self_attn.o_proj.weight"): (4, 4)})
    specs = [TensorSpec(name, "bfloat16", (4, 4)) for name in ADAPTERS]
    plan = NameResolver(live, expects_base_layer=True).resolve(specs, partial=True)
    adapters = [(t.name, t.load_as, t.owner) for t in plan.tensors if t.kind == "adapter"]
    assert adapters == [(name, name, None) for name in ADAPTERS]
    assert plan.loads() == {}


def test_names_that_only_resemble_adapters_are_not_adapters():
    assert not any(is_adapter(name) for name in ("x.lora_A_norm.weight", "my_lora_A.weight", "x.q_proj.weight"))


def test_live_adapter_parameters_need_no_data_but_accept_it_by_their_own_names():
    live = {"x.weight": LiveTensor("bfloat16", (4, 4)), "x.lora_A.default.weight": LiveTensor("bfloat16", (2, 4))}
    base = TensorSpec("x.weight", "bfloat16", (4, 4))
    NameResolver(live).resolve([base])
    plan = NameResolver(live).resolve([base, TensorSpec("x.lora_A.default.weight", "bfloat16", (2, 4))])
    assert next(t for t in plan.tensors if t.kind == "adapter").owner == "x.lora_A.default.weight"
    with pytest.raises(
        ManifestError, match=r"sent as bfloat16\[3, 4\], x.lora_A.default.weight holds bfloat16\[2, 4\]"
    ):
        NameResolver(live).resolve([base, TensorSpec("x.lora_A.default.weight", "bfloat16", (3, 4))])


def test_over_a_frozen_base_only_adapters_are_needed_but_never_half_of_a_parameter():
    m = qwen3()
    resolver = resolver_of(m)
    adapters = [TensorSpec(name, "bfloat16", (4, 4)) for name in ADAPTERS]
    assert len(resolver.resolve(adapters, partial=True).tensors) == len(ADAPTERS)
    with pytest.raises(ManifestError, match="nothing sent feeds it"):
        resolver.resolve(adapters)
    half = TensorSpec("model.layers.0.self_attn.q_proj.weight", "bfloat16", (Q, H))
    with pytest.raises(ManifestError, match=r"qkv_proj.weight lacks k_proj, v_proj"):
        resolver.resolve([*adapters, half], partial=True)


def one_moe_layer() -> Model:
    sent, live = layer("l", experts())
    return Model(sent, live)


def test_a_missing_expert_is_reported():
    m = one_moe_layer()
    for name in (
        "l.mlp.experts.7.up_proj.weight",
        "l.mlp.experts.3.gate_proj.weight",
        "l.mlp.experts.3.up_proj.weight",
    ):
        del m.sent[name]
    with pytest.raises(ManifestError) as error:
        resolver_of(m).resolve(manifest_of(m.sent))
    assert "l.mlp.experts.w13_weight lacks expert 3 (gate_proj, up_proj), expert 7 (up_proj)." in str(error.value)
    assert "w2_weight" not in str(error.value)


def test_a_rank_of_an_expert_parallel_engine_needs_the_number_of_all_experts():
    m = one_moe_layer()
    live = m.live | {"l.mlp.experts.w13_weight": (2, 2 * MOE_I, H), "l.mlp.experts.w2_weight": (2, H, MOE_I)}
    resolver_of(m, live, num_experts=E).resolve(manifest_of(m.sent))
    too_many = (
        r"w13_weight: 2 experts expected \(num_experts\), expert 2, expert 3, expert 4, expert 5 and 2 more sent too"
    )
    with pytest.raises(ManifestError, match=too_many):
        resolver_of(m, live).resolve(manifest_of(m.sent))
    del m.sent["l.mlp.experts.7.down_proj.weight"]
    with pytest.raises(ManifestError, match=r"w2_weight lacks expert 7 \(down_proj\)"):
        resolver_of(m, live, num_experts=E).resolve(manifest_of(m.sent))


def test_other_leaves_of_experts_have_their_own_fused_parameters():
    sent = [f"experts.{i}.{part}.weight_scale" for i in (0, 1) for part in ("gate_proj", "up_proj")]
    plan = resolved(sent, ["experts.w13_weight_scale"])
    assert {t.owner for t in plan.values()} == {"experts.w13_weight_scale"}
    assert [t.expert for t in plan.values()] == [0, 0, 1, 1]
    with pytest.raises(ManifestError, match=r"unknown to the live model: experts.0.gate_proj.weight_scale"):
        resolved(sent, ["experts.gate_up_proj"])  # holds weights only


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
EMBED_SPEC = TensorSpec(EMBED, "bfloat16", (V, H))
TIED_HEAD = TensorSpec(HEAD, "bfloat16", (V, H), tied_to=EMBED)


@pytest.mark.parametrize("listed", [False, True])
def test_a_tied_name_is_not_missing_and_not_loaded_twice(listed):
    live = live_of({EMBED: (V, H)} | ({HEAD: (V, H)} if listed else {}))
    plan = NameResolver(live, ties={HEAD: EMBED}).resolve([EMBED_SPEC, TIED_HEAD])
    assert (plan.tensors[1].kind, plan.tensors[1].owner, plan.tensors[1].source) == ("tied", EMBED, EMBED)
    assert plan.loads() == {EMBED: (EMBED,)}


def test_a_tie_of_the_sender_fills_both_if_the_live_model_holds_both():
    plan = NameResolver(live_of({EMBED: (V, H), HEAD: (V, H)})).resolve([EMBED_SPEC, TIED_HEAD])
    assert plan.loads() == {EMBED: (EMBED, HEAD)}


def test_either_name_of_shared_storage_may_be_sent():
    live = live_of({wrap(EMBED): (V, H)})
    plan = NameResolver(live, ties={HEAD: wrap(EMBED)}).resolve([TensorSpec(HEAD, "bfloat16", (V, H))])
    assert (plan.tensors[0].load_as, plan.tensors[0].owner) == (HEAD, wrap(EMBED))


def test_two_tensors_for_shared_storage_are_a_clash():
    resolver = NameResolver(live_of({EMBED: (V, H), HEAD: (V, H)}), ties={HEAD: EMBED})
    with pytest.raises(ManifestError, match=f"{EMBED}: fed by {EMBED} and by {HEAD}"):
        resolver.resolve([EMBED_SPEC, TensorSpec(HEAD, "bfloat16", (V, H))])


def test_a_tie_to_a_tensor_that_is_not_sent_is_an_error_unless_nothing_needs_it():
    with pytest.raises(ManifestError, match=f"{HEAD}: tied to {EMBED}, which is not sent"):
        NameResolver(live_of({HEAD: (V, H)})).resolve([TIED_HEAD])
    plan = NameResolver(live_of({HEAD: (V, H)}), ignore={HEAD}).resolve([TIED_HEAD])
    assert plan.tensors[0].load_as is None


@pytest.mark.parametrize("ties", [{HEAD: "gone"}, {HEAD: EMBED, EMBED: HEAD}])
def test_a_tie_must_end_at_a_live_parameter(ties):
    with pytest.raises(
        ValueError, match="expected ties to live parameters that are not tied themselves, found lm_head"
    ):
        NameResolver(live_of({EMBED: (V, H), HEAD: (V, H)}), ties=ties)


def test_buffers_may_be_ignored_on_either_side():
    live = live_of({EMBED: (V, H), "model.rotary.cache": (8, 8)})
    cache, frequencies = "model.rotary.cache", TensorSpec("model.rotary.inv_freq", "float32", (8,))
    plan = NameResolver(live, ignore={cache, frequencies.name}).resolve([EMBED_SPEC, frequencies])
    assert [(t.kind, t.load_as) for t in plan.tensors] == [("whole", EMBED), ("ignored", None)]
    with pytest.raises(
        ManifestError, match=r"unknown to the live model: model.rotary.inv_freq\. .*feeds it: model.rotary.cache\."
    ):
        NameResolver(live).resolve([EMBED_SPEC, frequencies])


def test_a_name_without_a_location_is_unknown_even_if_a_live_name_resembles_it():
    """For example, a draft numbers its layers from 0: they are not the target's."""
    live = live_of({"model.layers.0.q.weight": (4, 4)})
    rename = lambda name: "model." + name.removeprefix("mtp.") if name.startswith("mtp.") else None
    resolver = NameResolver(live, rename=rename)
    own, of_the_target = (TensorSpec(f"{at}.layers.0.q.weight", "bfloat16", (4, 4)) for at in ("mtp", "model"))
    assert resolver.resolve([own]).loads() == {own.name: (own.name,)}
    assert not resolver.wants(of_the_target.name)
    with pytest.raises(ManifestError, match=f"unknown to the live model: {of_the_target.name}"):
        resolver.resolve([own, of_the_target])


def test_names_of_parameters_that_another_model_holds_are_known():
    """For example, the draft's copy of an embedding that it shares with its target."""
    rename = lambda name: name.replace("model.layers.2.embed", "model.embed")
    resolver = NameResolver(live_of({}), ignore={EMBED}, rename=rename)
    (copy,) = resolver.resolve([EMBED_SPEC._replace(name="model.layers.2.embed_tokens.weight")]).tensors
    assert (copy.kind, copy.load_as) == ("ignored", None)
    assert not resolver.wants(EMBED)


def test_tensors_that_a_loader_computes_are_passed_to_it_only_if_live():
    frequencies = TensorSpec("model.rotary.inv_freq", "float32", (8,))
    drops = lambda name: name.endswith("inv_freq")
    (left_out,) = NameResolver({}, drops=drops).resolve([frequencies]).tensors
    assert (left_out.kind, left_out.load_as) == ("ignored", None)
    live = {frequencies.name: LiveTensor("float32", (8,))}
    assert NameResolver(live, drops=drops).resolve([frequencies]).loads() == {frequencies.name: (frequencies.name,)}


def test_loaders_of_one_model_may_differ_in_expecting_base_layer():
    live = live_of({"a.q.base_layer.weight": (4, 4), "b.q.base_layer.weight": (4, 4), "b.norm.weight": (4,)})
    resolver = NameResolver(live, expects_base_layer=lambda name: name.startswith("b."))
    sent = [TensorSpec(unwrap(name), "bfloat16", t.shape) for name, t in live.items()]
    assert [t.load_as for t in resolver.resolve(sent).tensors] == [
        "a.q.weight",
        "b.q.base_layer.weight",
        "b.norm.weight",
    ]


def test_roles_are_preserved():
    name = "model.mtp_layers.0.input_proj.weight"
    plan = NameResolver(live_of({name: (4, 4)})).resolve([TensorSpec(name, "bfloat16", (4, 4), "draft")])
    assert plan.tensors[0].role == "draft"


def test_one_message_lists_four_of_each_kind_on_both_sides_and_counts_the_rest():
    sent = {f"sent.{i}.weight": (4,) for i in range(6)} | {f"both.{i}.weight": (4,) for i in range(5)}
    live = {f"live.{i}.weight": (4,) for i in range(5)} | {f"both.{i}.weight": (5,) for i in range(5)}
    with pytest.raises(ManifestError) as error:
        NameResolver(live_of(live)).resolve(manifest_of(sent))
    assert str(error.value) == (
        "the manifest does not fit the live model. "
        "sent, but unknown to the live model: sent.0.weight; sent.1.weight; sent.2.weight; sent.3.weight and 2 more. "
        "live, but nothing sent feeds it: live.0.weight; live.1.weight; live.2.weight; live.3.weight and 1 more. "
        "clashing: both.0.weight: sent as bfloat16[4], both.0.weight holds bfloat16[5]; "
        "both.1.weight: sent as bfloat16[4], both.1.weight holds bfloat16[5]; "
        "both.2.weight: sent as bfloat16[4], both.2.weight holds bfloat16[5]; "
        "both.3.weight: sent as bfloat16[4], both.3.weight holds bfloat16[5] and 1 more. "
        "Both sides must build the model from the same checkpoint, and the resolver must know its packed modules, ties "
        "and buffers"
    )


def test_shapes_of_packed_parameters_are_checked_if_known():
    m = qwen3()
    m.sent["model.layers.1.self_attn.v_proj.weight"] = (KV - 1, H)
    clash = r"v_proj.weight\[31, 64\]: do not fill model.layers.1.self_attn.qkv_proj.weight\[160, 64\] along dim 0"
    with pytest.raises(ManifestError, match=clash):
        resolver_of(m).resolve(manifest_of(m.sent))
    m.sent["model.layers.1.self_attn.v_proj.weight"] = (KV, H + 1)
    with pytest.raises(ManifestError, match=r"v_proj.weight\[32, 65\]: do not fill"):
        resolver_of(m).resolve(manifest_of(m.sent))
    sharded = {name: LiveTensor("bfloat16", None) for name in m.live}
    NameResolver(sharded, packed=m.packed, rename=m.rename).resolve(manifest_of(m.sent))


def test_shapes_of_experts_are_checked_along_the_dimension_after_theirs():
    m = one_moe_layer()
    m.sent["l.mlp.experts.5.up_proj.weight"] = (MOE_I + 1, H)
    m.sent["l.mlp.experts.6.down_proj.weight"] = (H, MOE_I + 1)
    with pytest.raises(ManifestError) as error:
        resolver_of(m).resolve(manifest_of(m.sent))
    assert "experts.5.up_proj.weight[49, 64]: do not fill l.mlp.experts.w13_weight[8, 96, 64] along dim 1" in str(
        error.value
    )
    assert "experts.6.down_proj.weight[64, 49]: do not fill l.mlp.experts.w2_weight[8, 64, 48] along dim 1" in str(
        error.value
    )


def test_scalar_scales_have_no_shapes_to_check():
    sent: Shapes = {f"x.{part}.weight_scale": () for part in PACKED["qkv_proj"]}
    resolver = NameResolver(live_of({"x.qkv_proj.weight_scale": (3,)}))
    assert len(resolver.resolve(manifest_of(sent)).tensors) == 3


def test_dtypes_are_compared_for_parts_too_unless_the_live_dtype_is_unknown():
    m = one_moe_layer()
    with pytest.raises(ManifestError, match=r"gate_proj.weight: sent as float32, l.mlp.experts.w13_weight holds bf"):
        resolver_of(m).resolve(manifest_of(m.sent, dtype="float32"))
    unknown_dtypes = {name: LiveTensor(None, None) for name in m.live}
    NameResolver(unknown_dtypes).resolve(manifest_of(m.sent, dtype="float32"))


def test_a_parameter_cannot_be_fed_whole_and_in_parts_or_twice():
    m = qwen3()
    whole = "model.layers.0.self_attn.qkv_proj.weight"
    with pytest.raises(ManifestError, match=f"{whole}: fed whole by {whole}, and in parts"):
        resolver_of(m).resolve(manifest_of(m.sent | {whole: m.live[whole]}))
    part = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ManifestError, match=f"{whole}: fed by {part} and by {wrap(part)}"):
        resolver_of(m).resolve(manifest_of(m.sent | {wrap(part): m.sent[part]}))


@st.composite
def models_with_lora(draw):
    """A model with any of its modules wrapped, whose sender marks any of the names as wrapped."""
    m = draw(st.sampled_from(list(MODELS.values())))
    modules = draw(st.frozensets(st.sampled_from(sorted({name.rpartition(".")[0] for name in m.live}))))
    marked = draw(st.frozensets(st.sampled_from(sorted(m.sent))))
    sent = {wrap(name) if name in marked else name: shape for name, shape in m.sent.items()}
    return m, sent, wrapped(m.live, lambda module: module in modules), draw(st.booleans())


@settings(max_examples=100, deadline=None)
@given(models_with_lora())
def test_resolving_a_resolved_name_changes_nothing(case):
    m, sent, live, expects = case
    resolver = resolver_of(m, live, expects_base_layer=expects)
    once = resolver.resolve(manifest_of(sent)).tensors
    twice = resolver.resolve(manifest_of({t.load_as: sent[t.name] for t in once})).tensors
    assert [t[1:5] + t[6:] for t in once] == [t[1:5] + t[6:] for t in twice]
    assert [t.load_as for t in once] == [t.name for t in twice]


@settings(max_examples=100, deadline=None)
@given(models_with_lora(), st.data())
def test_any_missing_or_misspelt_name_is_reported(case, data):
    m, sent, live, expects = case
    lost = data.draw(st.sampled_from(sorted(sent)))
    resolver = resolver_of(m, live, expects_base_layer=expects)
    owner = next(t.owner for t in resolver.resolve(manifest_of(sent)).tensors if t.name == lost)
    shape = sent.pop(lost)
    with pytest.raises(ManifestError, match=re.escape(owner)):
        resolver.resolve(manifest_of(sent))
    with pytest.raises(ManifestError, match=re.escape(f"unknown to the live model: {lost}x.")):
        resolver.resolve(manifest_of(sent | {f"{lost}x": shape}))


segments = st.text("abz_019", min_size=1, max_size=6)


@given(st.lists(segments, min_size=1, max_size=6).map(".".join))
def test_unwrapping_reverses_wrapping(name):
    assert unwrap(wrap(name)) == name == unwrap(name)
    assert "base_layer" in wrap(name).split(".")


def resolving_s(layers: int) -> float:
    """CPU seconds to resolve the names of ``layers`` layers of 256 experts: the minimum of three."""
    count = 256
    sent: Shapes = {}
    live: Shapes = {}
    for i in range(layers):
        moe = f"model.layers.{i}.mlp.experts"
        parts = {"gate_proj": (MOE_I, H), "up_proj": (MOE_I, H), "down_proj": (H, MOE_I)}
        sent |= {f"{moe}.{e}.{part}.weight": shape for e in range(count) for part, shape in parts.items()}
        live |= {
            f"{moe}.base_layer.w13_weight": (count, 2 * MOE_I, H),
            f"{moe}.base_layer.w2_weight": (count, H, MOE_I),
        }
    specs = manifest_of(sent).tensors
    assert len(specs) == 768 * layers
    seconds = []
    for _ in range(3):
        start = time.process_time()
        NameResolver(live_of(live), expects_base_layer=True).resolve(specs)
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_resolving_fifty_thousand_names_takes_less_than_quadratic_time():
    assert resolving_s(64) < 64 * resolving_s(4)  # 16 times the names; 256 times the time if it were quadratic


class LoraLinear(torch.nn.Module):
    """A linear layer, wrapped as by LoRA libraries."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(base_layer.in_features, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, base_layer.out_features, bias=False)})


def real_config(kind: str):
    import transformers

    shared = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
    }
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if kind == "qwen2, tied":
        return transformers.Qwen2Config(**shared, tie_word_embeddings=True)
    if kind == "qwen3_moe":
        return transformers.Qwen3MoeConfig(**shared, **moe)
    if kind == "qwen3_next":
        return transformers.Qwen3NextConfig(**shared, **moe, layer_types=["linear_attention", "full_attention"])
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    groups = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    return transformers.DeepseekV3Config(**shared, **latent, **groups, moe_intermediate_size=24)


def write(live: torch.Tensor, tensor: torch.Tensor, entry: Resolved, parts: Sequence[str]) -> None:
    """Copy a tensor into its part of a live parameter: all of it, or one of the equal parts of an expert."""
    if entry.expert is not None:
        live = live[entry.expert].chunk(len(parts))[parts.index(entry.part)]
    live.copy_(tensor)


@pytest.mark.parametrize("kind", ["qwen2, tied", "qwen3_moe", "qwen3_next", "deepseek_v3"])
def test_a_real_checkpoint_restores_the_model_in_memory_with_lora_on_some_modules(kind, tmp_path):
    """transformers keeps all experts of a layer in one parameter, and saves them one by one."""
    import transformers

    torch.manual_seed(0)
    net = transformers.AutoModelForCausalLM.from_config(real_config(kind))
    net.save_pretrained(tmp_path)
    expected = {name: p.clone() for name, p in net.state_dict().items()}
    for name, module in list(net.named_modules()):
        parent, _, child = name.rpartition(".")
        if child in ("q_proj", "down_proj", "in_proj_ba", "kv_b_proj") and isinstance(module, torch.nn.Linear):
            setattr(net.get_submodule(parent), child, LoraLinear(module))
    live = net.state_dict()  # includes buffers: DeepSeek-V3's router bias is one, and is in the checkpoint
    ties = {HEAD: EMBED} if kind == "qwen2, tied" else {}

    with safe_open(tmp_path / "model.safetensors", "pt") as saved:
        tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        for p in live.values():
            p.zero_()
        specs = [TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in tensors.items()]
        specs += [
            TensorSpec(name, dtype_name(live[to]), tuple(live[to].shape), tied_to=to) for name, to in ties.items()
        ]
        here = {name: LiveTensor(dtype_name(p), tuple(p.shape)) for name, p in live.items()}
        resolver = NameResolver(here, ties=ties, expects_base_layer=True)
        plan = resolver.resolve(specs)
        for t in plan.tensors:
            if t.load_as is not None:
                write(
                    live[t.owner], tensors[t.name], t, ("gate_proj", "up_proj") if t.part != "down_proj" else (t.part,)
                )

    assert sum("base_layer" in name for name in live) >= 2
    assert {unwrap(name) for name in live if not is_adapter(name)} == set(expected)
    for name, p in live.items():
        if not is_adapter(name):
            torch.testing.assert_close(p, expected[unwrap(name)], rtol=0, atol=0)


def test_parts_of_experts_have_other_names_too():
    """Mixtral's."""
    sent = [f"experts.{i}.{part}.weight" for i in (0, 1) for part in ("w1", "w2", "w3")]
    plan = resolved(sent, ["experts.w13_weight", "experts.w2_weight"])
    assert {name: t.owner for name, t in plan.items() if t.expert == 1} == {
        "experts.1.w1.weight": "experts.w13_weight",
        "experts.1.w3.weight": "experts.w13_weight",
        "experts.1.w2.weight": "experts.w2_weight",
    }
    with pytest.raises(ManifestError, match=r"experts.w13_weight lacks expert 1 \(up_proj\)"):
        resolved(sent[:-1], ["experts.w13_weight", "experts.w2_weight"])
