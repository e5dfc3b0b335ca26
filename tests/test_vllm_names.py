"""Canonical names resolved to vLLM's own models: plans, refusals, and the models' state after updates.

vLLM builds the models from a tiny checkpoint of each family, target and draft, without an engine. Where torchvision is
not installed, empty modules stand in for it while the file of Qwen3.5 is imported.
"""

from __future__ import annotations

import json
import re

import pytest
import torch

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")

import transformers
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from asyncrl.cpu.vllm import experts_stay_unpacked, mla_kernel
from asyncrl.models.checkpoint import read_tensors
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fingerprints import fingerprint
from asyncrl.param_sync.lora.adapters import adapter_shapes
from asyncrl.param_sync.manifest import AdapterSpec, Manifest, ManifestError, TensorSpec
from asyncrl.rollouter.engines.vllm.live_adapters import LiveAdapters
from asyncrl.rollouter.engines.vllm.live_model import LiveModel, plan_loads
from tests.support.vllm_models import (
    FAMILIES,
    Models,
    Tensors,
    engine_config,
    is_draft,
    load_models,
    manifest_of,
    random_weights,
    write_checkpoint,
    write_tensors,
)

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def worker(tmp_path_factory):
    """Sets up what a vLLM worker needs to build a model."""
    patch = pytest.MonkeyPatch()
    if current_platform.is_cpu():
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.accelerator, name, lambda *args, **kwargs: None)
    folder = tmp_path_factory.mktemp("world")
    write_checkpoint(folder, FAMILIES["qwen3_moe"])
    with set_current_vllm_config(
        engine_config(folder, FAMILIES["qwen3_moe"])
    ):  # only MoE models have groups of experts
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, current_platform.dist_backend)
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()
    patch.undo()


class Built:
    """vLLM's models of a family's checkpoint, and its manifest."""

    def __init__(self, name: str, folder, lora: bool = False) -> None:
        self.name, self.family, self.folder, self._lora = name, FAMILIES[name], folder, lora
        write_checkpoint(folder, self.family)
        self.tensors = read_tensors(folder)
        self.manifest = manifest_of(self.family, self.tensors)
        self.models = self.load()

    def load(self) -> Models:
        return load_models(engine_config(self.folder, self.family, lora=self._lora))

    def plan(self, manifest: Manifest) -> None:
        plan_loads(manifest, self.models.target, self.models.draft)

    def update(self, tensors: Tensors) -> None:
        """Update the models as a worker does, in the same order."""
        self.plan(manifest_of(self.family, tensors))
        with set_current_vllm_config(self.models.config):
            for model in self.models.all():
                model.start()
                try:
                    model.load((n, t) for name, t in tensors.items() for n in model.loads.get(name, ()))
                finally:
                    model.finish()


_built: dict[str, Built] = {}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    yield lambda name: _built.get(name) or _built.setdefault(name, Built(name, tmp_path_factory.mktemp("family")))
    _built.clear()


@pytest.fixture(params=list(FAMILIES))
def built(request, build):
    return build(request.param)


def state(net: torch.nn.Module) -> Tensors:
    """All that a model computes with, by name: parameters, persistent buffers, and outputs of packed kernels."""
    found = dict(net.named_parameters(remove_duplicate=False))
    for path, module in net.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        found |= {f"{path}.{n}": b for n, b in module.named_buffers(recurse=False) if n not in transient}
        if hasattr(module, "cpu_linear"):
            found[f"{path} as it multiplies"] = multiplied(module)
    return {name: t.detach().clone() for name, t in found.items()}


def multiplied(module: torch.nn.Module) -> torch.Tensor:
    width = getattr(module, "input_size", 0) or module.embedding_dim
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    return module.cpu_linear(x, module.weight, getattr(module, "bias", None))


def differing(one: Tensors, other: Tensors) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, t in one.items() if not torch.equal(t, other[name])]


def test_every_name_of_the_checkpoint_is_planned_and_every_parameter_is_fed(built):
    built.plan(built.manifest)
    loaded = {name for model in built.models.all() for name in model.loads}
    assert built.tensors.keys() - loaded == elsewhere(built)
    assert not any(is_draft(built.family, name) for name in built.models.target.loads)


def elsewhere(built: Built) -> set[str]:
    """The draft's copies of the embedding and the head: vLLM's drafts use those of their target."""
    return {name for name in built.tensors if re.search(r"layers\.2\.(embed_tokens|shared_head\.head)\.", name)}


def test_an_update_equals_a_fresh_load(built):
    before = [state(model.net) for model in built.models.all()]
    for seed in (1, 2):
        tensors = random_weights(built.tensors, seed)
        built.update(tensors)
    write_tensors(built.folder, tensors)
    fresh = built.load()
    for model, other, old in zip(built.models.all(), fresh.all(), before, strict=True):
        expected = state(other.net)
        assert differing(state(model.net), expected) == []
        constant = re.compile(r"_(k|v|q|prob)_scale$")  # of attention over a KV cache that is not quantised
        assert {n for n, t in expected.items() if torch.equal(t, old[n]) and t.numel()} == set(
            filter(constant.search, expected)
        )


@pytest.mark.parametrize("family", ["qwen2, tied", "qwen3_moe", "deepseek_v3", "qwen3_5"])
def test_an_update_equals_a_fresh_load_if_lora_layers_wrap_the_modules(family, tmp_path):
    """Names are the checkpoint's, except for loaders that expect those of the wrapped modules."""
    built = Built(family, tmp_path, lora=True)
    wrapped = [name for name, _ in built.models.target.net.named_parameters() if "base_layer" in name]
    assert len(wrapped) > 5
    tensors = random_weights(built.tensors, 1)
    built.update(tensors)
    write_tensors(built.folder, tensors)
    for model, other in zip(built.models.all(), built.load().all(), strict=True):
        assert differing(state(model.net), state(other.net)) == []


def test_the_embedding_that_is_also_the_head_reaches_both(build):
    built = build("qwen2, tied")
    assert "lm_head.weight" not in built.tensors
    built.plan(built.manifest)
    assert built.models.target.loads["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    embedding = built.manifest.tensors[list(built.tensors).index("model.embed_tokens.weight")]
    tied = embedding._replace(name="lm_head.weight", tied_to=embedding.name)
    built.plan(Manifest((*built.manifest, tied)))
    assert built.models.target.loads["model.embed_tokens.weight"] == ("model.embed_tokens.weight", "lm_head.weight")
    with pytest.raises(ManifestError, match=r"model.embed_tokens.weight: fed by .*lm_head.weight"):
        built.plan(Manifest((*built.manifest, tied._replace(tied_to=None))))


def refused(built: Built, specs) -> str:
    with pytest.raises(ManifestError) as error:
        built.plan(Manifest(tuple(specs)))
    return str(error.value)


def test_a_wrong_shape_is_refused_with_both_names(built):
    for model in built.models.all():
        assert of(built, model, r"\.o_proj\.weight")
        for leaf in ("o_proj", "k_proj", "kv_b_proj", "input_layernorm", "experts.3.down_proj", "experts.3.up_proj"):
            for name in of(built, model, rf"\.{leaf}\.weight"):
                wrong = [s._replace(shape=(3, 5)) if s.name == name else s for s in built.manifest]
                clash = refused(built, wrong).partition("clashing: ")[2]
                assert name in clash
                assert "[3, 5]" in clash
                assert re.search(r"model\.\S+ holds float32\[\d|do not fill model\.\S+weight\[\d", clash)


def test_a_wrong_dtype_is_refused_with_both_names(built):
    name = of(built, built.models.target, r"0.input_layernorm\.weight")[0]
    wrong = [s._replace(dtype="float16") if s.name == name else s for s in built.manifest]
    assert f"{name}: sent as float16[64], model.layers." in refused(built, wrong)


def test_an_unknown_name_is_refused(built):
    for spec in built.manifest:
        if spec.name.endswith("input_layernorm.weight"):
            message = refused(built, [*built.manifest, spec._replace(name=spec.name + "x")])
            assert f"unknown to the live model: {spec.name}x." in message


def test_a_missing_tensor_is_refused_by_the_name_of_its_owner(built):
    """Each tensor in turn, except those that no model loads."""
    for lost in built.tensors.keys() - elsewhere(built):
        message = refused(built, [s for s in built.manifest if s.name != lost])
        leaf = lost.rpartition(".")[2]
        part = re.search(r"([qkv]_proj|gate_proj|up_proj|down_proj|in_proj_\w+|[qk]v?_a_proj\w*)\.", lost)
        assert leaf in message
        if "nothing sent feeds it" not in message:
            assert part is not None
            assert f" lacks {part[1]}" in message or re.search(rf" lacks expert \d \({part[1]}\)", message)


def of(built: Built, model: LiveModel, pattern: str) -> list[str]:
    role = "draft" if model is built.models.draft else "target"
    return [s.name for s in built.manifest if s.role == role and re.search(pattern + "$", s.name)]


def test_no_name_is_mapped_twice(build):
    """Qwen3-Next has one projection where Qwen3.5 has two, and their names contain one another."""
    built = build("qwen3_next")
    built.plan(built.manifest)
    at = "model.layers.0.linear_attn."
    for name in (f"{at}in_proj_qkvz.weight", f"{at}in_proj_ba.weight"):
        assert built.models.target.loads[name] == (name,)
    parts = [TensorSpec(f"{at}in_proj_{part}.weight", "float32", (4, 64)) for part in ("qkv", "z", "b", "a")]
    message = refused(built, [*built.manifest, *parts])
    assert f"unknown to the live model: {'; '.join(p.name for p in parts)}." in message

    built = build("qwen3_5")
    built.plan(built.manifest)
    loads = {name: to for name, to in built.models.target.loads.items() if "in_proj" in name}
    assert len(loads) == 4
    assert all(to == (name,) for name, to in loads.items())
    fused = [TensorSpec(f"{at}in_proj_qkvz.weight", "float32", (1536, 64))]
    kept = [s for s in built.manifest if "in_proj_qkv." not in s.name and "in_proj_z." not in s.name]
    assert f"unknown to the live model: {fused[0].name}." in refused(built, [*kept, *fused])


def test_tensors_that_vllm_computes_itself_are_left_out(build):
    built = build("llama")
    frequencies = TensorSpec("model.layers.0.self_attn.rotary_emb.inv_freq", "float32", (8,))
    built.plan(Manifest((*built.manifest, frequencies)))
    assert frequencies.name not in built.models.target.loads


def test_a_float32_parameter_of_a_bfloat16_model_accepts_the_checkpoint_s_dtype(tmp_path):
    family = FAMILIES["qwen3_next"]
    write_checkpoint(tmp_path, family, torch.bfloat16)
    models = load_models(engine_config(tmp_path, family, "bfloat16"))
    tensors = read_tensors(tmp_path)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert models.target.net.model.layers[0].linear_attn.A_log.dtype == torch.float32
    plan_loads(manifest_of(family, tensors), models.target, models.draft)


def test_live_parameters_are_compared_with_what_was_sent(built):
    """On the CPU only those that kernels do not repack: embeddings, heads, norms, biases."""
    for seed in (11, 12):
        tensors = random_weights(built.tensors, seed)
        built.update(tensors)
        sent = {name: fingerprint(tensor) for name, tensor in tensors.items()}
        for model in built.models.all():
            assert not model.verdict(sent).wrong
            assert not model.verdict(sent).stale
    never_loaded = {name: fingerprint(tensor) for name, tensor in random_weights(built.tensors, 13).items()}
    for model in built.models.all():
        wrong = model.verdict(never_loaded).wrong
        assert any("norm" in name for name in wrong)
        assert any("embed_tokens" in name for name in wrong) == (model.role == "target")


def test_an_adapter_of_modules_that_the_model_does_not_adapt_is_reported(tmp_path):
    """vLLM skips them, so rollouts would come from the base model."""
    net = Built("qwen3", tmp_path, lora=True).models.target.net
    adapters = LiveAdapters(net.lora_manager)
    spec = AdapterSpec("policy", 4, 8.0, ("q_proj", "gate_proj", "down_proj"), "float32")
    weights = {"self_attn.q_proj": (128, 64), "mlp.gate_proj": (128, 64), "mlp.down_proj": (64, 128)}
    pairs = [adapter_shapes(f"model.layers.1.{at}", weight, spec.r) for at, weight in weights.items()]
    tensors = {name: torch.ones(shape) for pair in pairs for name, shape in pair.items()}
    assert adapters.adopt(spec, tensors, 1, []) == []
    elsewhere = {name.replace("layers.1.mlp.down", "block.1.mlp.down"): t for name, t in tensors.items()}
    assert adapters.adopt(spec, elsewhere, 2, []) == ["model.block.1.mlp.down_proj"]


def test_tensors_that_a_loader_skips_are_reported(build):
    built = build("mimo")
    built.plan(built.manifest)
    draft = built.models.draft
    kept = [name for name in draft.loads if "input_proj" not in name]
    with set_current_vllm_config(built.models.config):
        draft.start()
        try:
            with pytest.raises(SyncError, match=r"passed over model.mtp_layers.2.input_proj.weight of the draft"):
                draft.load((name, built.tensors[name]) for name in kept)
        finally:
            draft.finish()


def test_the_cpu_build_still_leaves_experts_unpacked(build):
    """Else `asyncrl.cpu.vllm.repack_experts` is no longer needed."""
    experts = build("qwen3_moe").models.target.net.model.layers[0].mlp.experts.routed_experts
    assert current_platform.is_cpu() == experts_stay_unpacked(experts.quant_method)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="needs a processor with AMX")
def test_the_cpu_build_still_gives_latent_attention_of_float32_a_kernel_for_bfloat16(build):
    """Else `asyncrl.cpu.vllm.mla_kernel` is no longer needed."""
    wanted = AttentionSelectorConfig(48, torch.float32, None, None, use_mla=True)
    assert AMXMLABackend.supported_dtypes == [torch.bfloat16]
    assert current_platform.get_attn_backend_cls(None, wanted) == AttentionBackendEnum.AMX_MLA.get_path()
    raw = json.loads((build("deepseek_v3").folder / "config.json").read_text())
    assert mla_kernel(raw, "float32") is AttentionBackendEnum.CPU_MLA
    assert mla_kernel(raw, "bfloat16") is None
    assert mla_kernel(json.loads((build("qwen3_moe").folder / "config.json").read_text()), "float32") is None


def test_experts_compute_the_same_as_in_transformers(build):
    """After an update: each expert's tensors are where they belong."""
    built = build("qwen3_moe")
    tensors = random_weights(built.tensors, 5)
    built.update(tensors)
    write_tensors(built.folder, tensors)
    reference = transformers.Qwen3MoeForCausalLM.from_pretrained(built.folder, dtype=torch.float32)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2))
    config = built.models.config
    for ours, theirs in zip(built.models.target.net.model.layers, reference.model.layers, strict=True):
        with torch.no_grad(), set_current_vllm_config(config), set_forward_context(None, config, num_tokens=7):
            found = ours.mlp(x.clone())
        with torch.no_grad():
            expected = theirs.mlp(x[None])
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(found, expected.view_as(found), rtol=1e-5, atol=1e-6)
