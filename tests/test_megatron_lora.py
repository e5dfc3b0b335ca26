"""LoRA in the Megatron backend compared with the torch backend: steps, exports, checkpoints, one and two ranks."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from asyncrl.config.schema import LoraConfig, MegatronConfig
from asyncrl.models.checkpoint import is_draft, load_decoder, read_tensors, save_checkpoint
from asyncrl.models.config import CheckpointError
from asyncrl.models.lora import linear_shapes, linear_shapes_at
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.lora.adapters import adapter_spec, check_adapter
from asyncrl.param_sync.manifest import ManifestError, is_adapter
from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from tests.support.delta_nets import make_delta_net
from tests.support.megatron import APART, CUTS, OPTIONS, in_processes
from tests.support.trainer import make_checkpoint, make_config, make_groups, weights

pytestmark = pytest.mark.megatron

SIZES = {"vocab_size": 67, "num_attention_heads": 4, "num_key_value_heads": 2}
TARGETS = {
    "all": ["all-linear"],
    "some": ["q_proj", "o_proj", "up_proj"],
    "one-layer": ["layers.1.self_attn.v_proj", "layers.1.mlp.down_proj"],
}
TWO = ("tensor", "pipeline", "data", "context", "sequence")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), **SIZES)


def lora_config(checkpoint, backend="megatron", targets="some", **options):
    config = make_config(str(checkpoint), backend=backend, **{"lr": 1e-2, **options})
    config.model.lora = LoraConfig(rank=3, alpha=8.0, target_modules=TARGETS[targets])
    return config


def train(rank, steps):
    return [rank.train(step, make_groups((4, 3, 1), seed=step)) for step in steps]


def logprobs(rank, reference=False):
    batch = build_batch([Group.from_buffer(data) for data in make_groups(seed=1)])
    return rank._backend.outputs(batch, 0.7, "reference" if reference else "policy")["logprobs"]


def expect_alike(found, expected, tolerance=1e-4):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance / 50), (step, name)


def distance(found, expected):
    assert found.keys() == expected.keys()
    flat = lambda tensors: torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    return ((flat(found) - flat(expected)).norm() / flat(expected).norm()).item()


def adapters(tensors):
    return {name: tensor for name, tensor in tensors.items() if is_adapter(name)}


def draft(tensors):
    return {name: tensor for name, tensor in tensors.items() if is_draft(name)}


# -- compared with the torch backend -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        ("all", {**OPTIONS, **APART, "lr": 1e-3, "weight_decay": 0.1, "logprob_chunk_tokens": 7}),
        ("some", {**OPTIONS, "lr": 1e-3, "detach_encoder": False, "activation_checkpointing": True}),
        ("one-layer", {"lr": 1e-3, "activation_checkpointing": True, "schedule": "cosine"}),
    ],
    ids=["all-draft-apart", "attached-draft-recomputed", "one-layer-recomputed-mbridge"],
)
def test_ten_steps_equal_the_torch_backends(targets, options, checkpoint, start_rank):
    results = {}
    for backend in ("torch", "megatron"):
        config = lora_config(checkpoint, backend, targets, **options)
        config.model.bridge = "mbridge" if (backend, targets) == ("megatron", "one-layer") else "megatron_bridge"
        rank = start_rank(config)
        before = weights(rank)
        results[backend] = (before, train(rank, range(10)), weights(rank))
    (begun, expected, trained), (same, found, found_trained) = results["torch"], results["megatron"]
    assert begun.keys() == same.keys()
    assert all(torch.equal(same[name], begun[name]) for name in begun)
    expect_alike(found, expected)
    assert distance(adapters(found_trained), adapters(trained)) < 1e-4
    assert distance(adapters(trained), adapters(begun)) > 1e-2
    if "enable_train" in options:
        assert distance(draft(found_trained), draft(trained)) < 1e-4
    still = [name for name in begun if not is_adapter(name) and not (is_draft(name) and "enable_train" in options)]
    assert all(torch.equal(found_trained[name], begun[name]) for name in still)


def test_bfloat16_steps_are_near_the_torch_backends(checkpoint, start_rank):
    """The base has no master copy; adapters are updated in float32 and sent in the compute dtype."""
    options = {"mixed_precision": "bfloat16", "lr": 1e-3, "kl_coef": 0.05}
    results = {}
    for backend in ("torch", "megatron"):
        rank = start_rank(lora_config(checkpoint, backend, "all", **options))
        results[backend] = train(rank, range(5))
    for name in ("actor/grad_norm", "actor/entropy"):
        for found, expected in zip(results["megatron"], results["torch"], strict=True):
            assert found[name] == pytest.approx(expected[name], rel=0.03), name
    before = read_tensors(checkpoint)
    for name, tensor in rank.export():
        exact = before.get(name)
        assert exact is None or torch.equal(tensor, exact.bfloat16().float()), name
    kept = rank._backend.state()["model"]
    assert kept.keys() == {name.removeprefix("base_model.model.") for name, _ in rank.export(base=False)}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in kept.values())


def test_the_policy_starts_as_its_base_which_remains_the_reference(checkpoint, start_rank):
    base = logprobs(start_rank(make_config(checkpoint, backend="megatron")))
    rank = start_rank(lora_config(checkpoint, targets="all", kl_coef=0.1))
    assert np.array_equal(logprobs(rank), base)
    metrics = train(rank, range(3))
    assert np.array_equal(logprobs(rank, reference=True), base)
    assert np.abs(logprobs(rank) - base).max() > 0.05
    assert metrics[-1]["actor/kl_reference"] > 0


def test_the_adapters_of_a_mixture_of_experts_are_in_its_attention(tmp_path, start_rank):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "head_dim": 32}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4}
    config = transformers.Qwen3MoeConfig(vocab_size=67, **sizes, **counts, num_experts_per_tok=2)
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(tmp_path)
    rank = start_rank(lora_config(tmp_path, targets="all"))
    before = adapters(weights(rank))
    assert {name.split(".")[-3] for name in before} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    train(rank, range(2))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in adapters(weights(rank)).items())


@pytest.mark.parametrize(("family", "parts"), [("qwen3_next", ("qkvz", "ba")), ("qwen3_5", ("qkv", "z", "b", "a"))])
def test_adapters_of_linear_attention_equal_their_merged_weights(family, parts, tmp_path, start_rank):
    """Each linear layer of the checkpoint has an adapter pair, including those that feed gates."""
    make_delta_net(tmp_path / "model", family, mtp=True)
    config = lora_config(tmp_path / "model", targets="all", lr=1e-3)
    config.checkpoint.export_lora = "merged"
    rank = start_rank(config)
    before = adapters(weights(rank))
    dense = {"gate_proj", "up_proj", "down_proj"} if family == "qwen3_5" else set()
    attention = {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", *(f"in_proj_{part}" for part in parts)}
    assert {name.split(".")[-3] for name in before} == attention | dense
    modules = linear_shapes_at(tmp_path / "model")  # as engines find them
    check_adapter(rank.manifest(), modules)
    others = LoraConfig(rank=3, target_modules=["in_proj", "shared_expert_gate", "gate", "conv1d"])
    with pytest.raises(ManifestError, match=r"in_proj, shared_expert_gate, gate, conv1d: no linear layer .*out_proj"):
        adapter_spec(others, modules, "float32")
    base = logprobs(rank)
    train(rank, range(3))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in adapters(weights(rank)).items())
    rank.export_hf(tmp_path / "merged")
    scores = logprobs(rank)
    assert np.abs(scores - base).max() > 0.05
    whole = start_rank(make_config(str(tmp_path / "merged"), backend="megatron"))
    np.testing.assert_allclose(logprobs(whole), scores, rtol=0, atol=2e-5)


# -- exports -------------------------------------------------------------------------------------------------------


def test_the_manifest_lists_everything_and_can_omit_its_base(checkpoint, start_rank):
    config = lora_config(checkpoint, enable_train=True, loss="cross_entropy", updates_per_pass=1)
    config.rollout.engine.dtype = "bfloat16"
    rank = start_rank(config)
    manifest, modules = rank.manifest(), linear_shapes(load_decoder(checkpoint).config)
    check_adapter(manifest, modules)
    check_adapter(manifest.without_base(), modules)
    for listed, base in ((manifest, True), (manifest.without_base(), False)):
        exported = [(name, str(t.dtype), tuple(t.shape)) for name, t in rank.export(base)]
        assert exported == [(t.name, f"torch.{t.dtype}", t.shape) for t in listed.sent()]
    assert {t.name for t in manifest.without_base()} == {n for n, _ in rank.export() if is_adapter(n) or is_draft(n)}


def test_exports_equal_the_torch_backends(checkpoint, start_rank, tmp_path):
    """Adapters in PEFT's format, and merged weights, on disk and to engines that take no adapters."""
    for backend in ("torch", "megatron"):
        config = lora_config(checkpoint, backend, lr=1e-3)
        rank = start_rank(config)
        train(rank, range(2))
        rank.export_hf(tmp_path / backend / "adapter")
        config.param_sync.adapters = config.checkpoint.export_lora = "merged"
        rank = start_rank(config)
        train(rank, range(2))
        rank.export_hf(tmp_path / backend / "merged")
        assert rank.manifest().adapter is None
        sent, written = weights(rank), read_tensors(tmp_path / backend / "merged")
        assert all(torch.equal(written[name], tensor) for name, tensor in sent.items())
        scores = logprobs(rank)
    whole = start_rank(make_config(str(tmp_path / "megatron" / "merged"), backend="megatron"))
    np.testing.assert_allclose(logprobs(whole), scores, rtol=0, atol=2e-5)
    read = lambda backend, *path: (tmp_path / backend).joinpath(*path)
    pair = [load_file(read(backend, "adapter", "adapter_model.safetensors")) for backend in ("torch", "megatron")]
    assert distance(*pair) < 1e-4
    assert distance(*(read_tensors(read(backend, "merged")) for backend in ("torch", "megatron"))) < 1e-5
    described = [json.loads(read(b, "adapter", "adapter_config.json").read_text()) for b in ("torch", "megatron")]
    assert described[0] == described[1]


# -- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saver", "loader"), [("torch", "megatron"), ("megatron", "torch"), ("megatron", "megatron")])
def test_one_backend_continues_from_the_others_checkpoint(saver, loader, checkpoint, start_rank, tmp_path):
    options = {**OPTIONS, "lr": 1e-3, "schedule": "linear"}
    rank = start_rank(lora_config(checkpoint, saver, **options))
    train(rank, range(3))
    rank.save(tmp_path / "state")
    expected = train(rank, (3, 4)), weights(rank)
    rank = start_rank(lora_config(checkpoint, loader, **options))
    rank.load(tmp_path / "state")
    found = train(rank, (3, 4)), weights(rank)
    if saver == loader:
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    expect_alike(found[0], expected[0])


def test_the_state_of_another_base_or_kind_of_training_is_refused(checkpoint, start_rank, tmp_path):
    start_rank(lora_config(checkpoint)).save(tmp_path / "lora")
    tensors = read_tensors(checkpoint)
    tensors["model.norm.weight"] += 1e-3
    save_checkpoint(tmp_path / "other", tensors, load_decoder(checkpoint).config)
    with pytest.raises(CheckpointError, match="holds adapters of another base model than"):
        start_rank(lora_config(tmp_path / "other")).load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="holds LoRA adapters, the run to load it into trains all weights"):
        start_rank(make_config(checkpoint, backend="megatron")).load(tmp_path / "lora")


# -- several ranks -------------------------------------------------------------------------------------------------


def train_cut(rank, ranks, cut, checkpoint, targets, options, folder):
    """Export, train three steps, save, write a Hugging Face folder, and continue from the state of one rank."""
    config = lora_config(checkpoint, targets=targets, **options)
    config.trainer.megatron = MegatronConfig(**CUTS[cut])
    meet = f"file://{folder}/rendezvous_{cut}" if ranks > 1 else None
    trainer = TrainerRank(config, rank, ranks, meet, Recorder(f"trainer/{rank}"))
    first, metrics = weights(trainer), train(trainer, range(3))
    trained = {name: tensor.clone() for name, tensor in trainer.export(base=False)}
    trainer.save(folder / cut)
    trainer.export_hf(folder / f"{cut}_hf")
    metrics += train(trainer, (3,))
    trainer.load(folder / cut)
    again = train(trainer, (3,))
    trainer.load(folder / "one")
    loaded = {name: tensor.clone() for name, tensor in trainer.export(base=False)}
    metrics += train(trainer, (3,))
    trainer.close()
    found = {"first": first, "metrics": metrics, "trained": trained, "again": again, "loaded": loaded}
    torch.save(found, folder / f"{cut}_{rank}.pt")


def train_cuts(rank, ranks, cuts, *arguments):
    torch.set_num_threads(1)
    for cut in cuts:
        train_cut(rank, ranks, cut, *arguments)


CASES = {
    "draft": ("some", {**OPTIONS, "lr": 1e-3}, SIZES),
    "one-layer": ("one-layer", {"lr": 1e-3}, {**SIZES, "tie_word_embeddings": True, "num_nextn_predict_layers": 0}),
}


@pytest.fixture(scope="module", params=CASES)
def runs(request, tmp_path_factory):
    targets, options, sizes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    if not sizes.get("num_nextn_predict_layers", 1):
        sizes = {**sizes, "architectures": ["Qwen2ForCausalLM"]}
    checkpoint = make_checkpoint(folder / "model", **sizes)
    train_cut(0, 1, "one", checkpoint, targets, options, folder)
    in_processes(2, train_cuts, 2, TWO, checkpoint, targets, options, folder)
    return folder


@pytest.mark.parametrize("cut", TWO)
def test_two_ranks_train_like_one(runs, cut):
    """Including a pipeline stage without adapters."""
    expect_like_one(runs, cut)


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("qwen3_5", ("tensor",)),
        pytest.param("qwen3_5", ("pipeline", "sequence"), marks=pytest.mark.slow),
        pytest.param("qwen3_next", ("expert-tensor", "pipeline"), marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_adapters_of_linear_attention_like_one(family, cuts, tmp_path):
    """Here a rank's rows of a pair are not contiguous: they belong to its heads' queries, keys, values and gates."""
    make_delta_net(tmp_path / "model", family, mtp=True)
    train_cut(0, 1, "one", str(tmp_path / "model"), "all", CASES["draft"][1], tmp_path)
    in_processes(2, train_cuts, 2, cuts, str(tmp_path / "model"), "all", CASES["draft"][1], tmp_path)
    for cut in cuts:
        expect_like_one(tmp_path, cut)


def expect_like_one(runs, cut):
    one, found, other = (torch.load(runs / name) for name in ("one_0.pt", f"{cut}_0.pt", f"{cut}_1.pt"))
    assert found["first"].keys() == one["first"].keys()
    assert all(torch.equal(found["first"][name], tensor) for name, tensor in one["first"].items())
    expect_alike(found["metrics"], one["metrics"])
    assert other["metrics"] == found["metrics"], "ranks disagree"
    assert not other["first"]
    assert not other["trained"]
    assert distance(found["trained"], one["trained"]) < 1e-5
    assert found["again"] == found["metrics"][3:4]
    assert all(torch.equal(found["loaded"][name], tensor) for name, tensor in one["trained"].items())
    written = load_file(runs / f"{cut}_hf" / "adapter_model.safetensors")
    assert written.keys() == adapters(found["trained"]).keys()
    assert all(torch.equal(tensor, found["trained"][name]) for name, tensor in written.items())
