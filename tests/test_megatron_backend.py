"""The Megatron backend in one process against the torch backend: losses, norms, weights, checkpoints, exports."""

import json
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.models.checkpoint import is_draft, load_decoder, read_tensors, save_checkpoint
from asyncrl.models.chunked import ChunkedAcceptance, ChunkedCrossEntropy, ChunkedScores
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.trainer.backends.base import NonFiniteError
from asyncrl.trainer.backends.megatron import draft
from asyncrl.trainer.backends.megatron.bridges import bridge_of
from asyncrl.trainer.backends.megatron.core_loss import process_mtp_loss, through_core
from asyncrl.trainer.backends.megatron.offload import Offload
from asyncrl.trainer.backends.megatron.vocab_parallel import (
    VocabParallelAcceptance,
    VocabParallelCrossEntropy,
    VocabParallelScores,
    VocabularyPart,
)
from asyncrl.trainer.batches import build_batch
from asyncrl.types.groups import Group
from tests.support.delta_nets import make_delta_net
from tests.support.megatron import APART, OPTIONS, make_experts
from tests.support.trainer import expect_memory_named, make_checkpoint, make_config, make_groups, weights

from megatron.core.transformer import multi_token_prediction  # isort: skip (after what makes it run without CUDA)

pytestmark = pytest.mark.megatron

#: turns on everything that a step can depend on
ALL = OPTIONS | {"logprob_chunk_tokens": 7, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=67)


def expect_alike(found, expected, tolerance=1e-4):
    """Compare metrics of several steps; values near zero by absolute difference."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance / 100), (step, name)


def distance(found, expected):
    flat = lambda tensors: torch.cat([tensors[name].flatten() for name in sorted(tensors)])
    return ((flat(found) - flat(expected)).norm() / flat(expected).norm()).item()


@pytest.mark.parametrize(
    "options",
    [
        ALL,
        {**ALL, **APART},
        {**ALL, "detach_encoder": False},
        {**ALL, "detach_encoder": False, "loss": "acceptance"},
        {"loss_aggregation": "sequence_mean", "schedule": "cosine", "activation_checkpointing": True},
        {
            "grad_clip": 0.1,
            "enable_train": True,
            "loss": "cross_entropy",
            "updates_per_pass": 1,
            "activation_checkpointing": True,
        },
    ],
    ids=["all", "apart", "attached-draft", "attached-acceptance", "plain-recomputed", "draft-recomputed"],
)
def test_ten_steps_equal_the_torch_backends(options, checkpoint, start_rank):
    results = {}
    for backend in ("torch", "megatron"):
        rank = start_rank(make_config(checkpoint, backend=backend, **options))
        metrics = [rank.train(step, make_groups(seed=step)) for step in range(10)]
        results[backend] = (metrics, weights(rank))
    expect_alike(results["megatron"][0], results["torch"][0])
    assert results["megatron"][1].keys() == results["torch"][1].keys()
    assert distance(results["megatron"][1], results["torch"][1]) < 1e-4
    moved = distance(results["torch"][1], read_tensors(checkpoint))
    assert moved > 1e-2


def test_the_drafts_cross_entropy_is_the_same_without_megatron_cores_function(tmp_path, start_rank):
    """Two depths over packed sequences, in which the function rolls labels."""
    if process_mtp_loss() is None:
        pytest.skip("the installed megatron-core has no process_mtp_loss")
    checkpoint = make_checkpoint(tmp_path / "model", vocab_size=67, num_nextn_predict_layers=2)
    calls, results = [], []

    def counted(*given):
        calls.append(given)
        return through_core(*given)

    for process in (process_mtp_loss(), None):
        options = OPTIONS | {"detach_encoder": False, "num_speculative_tokens": 2}
        rank = start_rank(make_config(checkpoint, backend="megatron", **options))
        rank._backend._draft._process = process
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(draft, "through_core", counted)
            metrics = [rank.train(step, make_groups((4, 3, 1), seed=step)) for step in range(3)]
        results.append((len(calls), metrics, weights(rank)))
    (called, metrics, found), (then, expected_metrics, expected) = results
    assert called == then > 3  # the second run made no call
    expect_alike(metrics, expected_metrics, tolerance=1e-6)
    assert distance(found, expected) < 1e-6


@pytest.mark.parametrize(
    ("found", "used"),
    [
        (lambda hidden_states, labels, cp_group=None, packed_seq_params=None, later=None: hidden_states, True),
        (lambda hidden_states, labels, cp_group=None: hidden_states, False),
        (lambda hidden_states, new_and_needed, packed_seq_params=None: hidden_states, False),
    ],
    ids=["another-signature", "no-packed-sequences", "unknown-parameter"],
)
def test_megatron_cores_function_is_used_if_its_signature_is_supported(found, used, monkeypatch):
    monkeypatch.setattr(multi_token_prediction, "process_mtp_loss", found, raising=False)
    assert (process_mtp_loss() is found) is used


def test_bfloat16_steps_are_near_the_torch_backends_with_float32_master_weights(checkpoint, start_rank, tmp_path):
    options = {
        "mixed_precision": "bfloat16",
        "enable_train": True,
        "loss": "cross_entropy",
        "updates_per_pass": 1,
        "kl_coef": 0.05,
        "lr": 1e-4,
    }
    results = {}
    for backend in ("torch", "megatron"):
        rank = start_rank(make_config(checkpoint, backend=backend, **options))
        results[backend] = [rank.train(step, make_groups(seed=step)) for step in range(5)]
    for name in ("actor/grad_norm", "actor/entropy", "mtp/loss_1", "mtp/grad_norm"):
        for found, expected in zip(*(results[backend] for backend in ("megatron", "torch")), strict=True):
            assert found[name] == pytest.approx(expected[name], rel=0.02), name

    # a step of 1e-4 on weights of 0.1 is lost in bfloat16: exports have float32 weights, engines get bfloat16
    rank.export_hf(tmp_path / "hf")
    exact, before = read_tensors(tmp_path / "hf"), read_tensors(checkpoint)
    name = "model.layers.0.mlp.down_proj.weight"
    assert 0 < (exact[name] - before[name]).abs().median() < 1e-3
    assert not torch.equal(exact[name], exact[name].bfloat16().float())
    for name, tensor in weights(rank).items():
        assert torch.equal(tensor, exact[name].bfloat16().float()), name

    rank.save(tmp_path / "state")
    expected = rank.train(5, make_groups(seed=5)), weights(rank)
    rank = start_rank(make_config(checkpoint, backend="megatron", **options))
    rank.load(tmp_path / "state")
    assert rank.train(5, make_groups(seed=5)) == expected[0]
    found = weights(rank)
    assert all(torch.equal(found[name], expected[1][name]) for name in found)


def test_logprobs_and_entropies_equal_the_torch_backends(checkpoint, start_rank):
    batch = build_batch([Group.from_buffer(data) for data in make_groups()])
    found = {}
    for backend in ("torch", "megatron"):
        config = make_config(
            checkpoint,
            backend=backend,
            enable_train=True,
            loss="cross_entropy",
            updates_per_pass=1,
            max_tokens_per_micro_batch=50,
        )
        found[backend] = start_rank(config)._backend.outputs(batch, temperature=0.7)
    for name in ("logprobs", "entropy"):
        assert np.abs(found["megatron"][name] - found["torch"][name]).max() < 1e-5


def test_norms_and_biases_do_not_decay(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, backend="megatron", lr=0.1, weight_decay=0.5))
    before = weights(rank)
    rank.train(0, make_groups(rewards=1.0))  # without a gradient
    for name, tensor in rank.export():
        decays = tensor.ndim > 1 and not is_draft(name)
        torch.testing.assert_close(tensor, before[name] * (0.95 if decays else 1.0))


def test_logits_in_float32_are_not_rounded(checkpoint, start_rank):
    batch, found = build_batch([Group.from_buffer(data) for data in make_groups()]), {}
    for exact in (False, True):
        options = {"mixed_precision": "bfloat16", "float32_head": exact}
        rank = start_rank(make_config(checkpoint, backend="megatron", **options))
        found[exact] = rank._backend.outputs(batch, 0.7)["logprobs"]
        part, hidden = rank._backend._chunks[-1].vocabulary_part, torch.randn(40, 64).bfloat16()
        weight = torch.randn(part.end, 64).bfloat16()
        errors = part.logits(hidden, weight, 0.7) - hidden.double() @ weight.double().t() / 0.7
        assert (errors.abs().max() < 1e-4) == exact
    assert 1e-5 < np.abs(found[True] - found[False]).mean() < 0.02


@pytest.mark.parametrize(
    ("make", "recomputed"),
    [(make_experts, False), (partial(make_delta_net, family="qwen3_next"), True)],
    ids=["moe", "next-recomputed"],
)
def test_the_gradient_of_a_model_that_only_this_backend_trains_equals_transformers(
    make, recomputed, tmp_path, start_rank
):
    """Compared with the plain formula on transformers' model."""
    theirs = make(tmp_path)
    config = make_config(str(tmp_path), backend="megatron", grad_clip=0.0, anchor="proximal")
    config.trainer.activation_checkpointing = recomputed
    rank, groups = start_rank(config), make_groups()
    rank.train(0, groups)
    found = {name: 10 * moment for name, moment in rank._backend.state()["optimizer"]["exp_avg"].items()}

    total, trained = torch.zeros(()), 0
    for group in map(Group.from_buffer, groups):
        rewards = torch.tensor(group.rewards)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for s in range(len(group)):
            response = torch.tensor(group.tokens[group.response(s)]).long()
            tokens = torch.cat([torch.tensor(group.prompt_tokens).long(), response])
            drawn = torch.log_softmax(theirs(tokens[None]).logits[0], -1)[len(group.prompt_tokens) - 1 : -1]
            logprobs = drawn.gather(1, response[:, None]).squeeze(1)
            mask = torch.tensor(group.loss_mask[group.response(s)])
            total = total - (advantages[s] * logprobs * mask).sum()
            trained += int(mask.sum())
    (total / trained).backward()
    same = {name: p for name, p in theirs.named_parameters() if name in found}
    assert {"model.layers.0.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight"} < same.keys()
    for name, p in same.items():
        assert (found[name] - p.grad).norm() <= 1e-4 * p.grad.norm(), name
    experts = [moment for name, moment in found.items() if ".experts." in name]
    assert len(experts) == len(found) - len(same) == theirs.config.num_hidden_layers * theirs.config.num_experts * 3
    assert sum(moment.norm() > 0 for moment in experts) > len(experts) / 2


def test_a_bridges_router_losses_and_noise_are_not_trained(tmp_path, start_rank, monkeypatch):
    """Load-balancing terms, and input noise."""
    make_experts(tmp_path)

    def trained():
        rank = start_rank(make_config(str(tmp_path), backend="megatron"))
        return rank.train(0, make_groups()), weights(rank)

    def asking(source, package):
        bridge = bridge_of(source, package)
        bridge.provider.moe_router_load_balancing_type, bridge.provider.moe_aux_loss_coeff = "aux_loss", 1.0
        bridge.provider.moe_z_loss_coeff, bridge.provider.moe_input_jitter_eps = 1.0, 0.5
        return bridge

    expected, before = trained()
    monkeypatch.setattr("asyncrl.trainer.backends.megatron.backend.bridge_of", asking)
    metrics, found = trained()
    assert metrics == expected
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_linear_attention_in_bfloat16_is_near_float32(tmp_path, start_rank):
    """The state is computed in float32 in both."""
    make_delta_net(tmp_path, "qwen3_5", mtp=True)
    results = {}
    for precision in ("float32", "bfloat16"):
        options = {**ALL, "lr": 1e-4, "mixed_precision": precision}
        rank = start_rank(make_config(str(tmp_path), backend="megatron", **options))
        results[precision] = [rank.train(step, make_groups(seed=step)) for step in range(3)]
    # gradient norms differ by rounding alone, see `test_megatron_parallel.expect_like_one`
    for name, tolerance in {"actor/entropy": 5e-3, "mtp/loss_1": 5e-3, "actor/grad_norm": 0.1}.items():
        for found, expected in zip(*(results[precision] for precision in ("bfloat16", "float32")), strict=True):
            assert found[name] == pytest.approx(expected[name], rel=tolerance), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_vision_models_text_model_is_trained_and_the_rest_is_exported_with_it(tied, tmp_path, start_rank):
    theirs = make_delta_net(tmp_path / "model", "qwen3_5", mtp=True, sees=True, tie_word_embeddings=tied)
    rank = start_rank(make_config(str(tmp_path / "model"), backend="megatron", enable_train=True, loss="cross_entropy"))
    batch = build_batch([Group.from_buffer(data) for data in make_groups()])
    before, sent = read_tensors(tmp_path / "model"), dict(rank.export())
    seen = [name for name in before if name.startswith("model.visual.")]
    assert len(seen) > 10
    assert sent.keys() == before.keys()
    assert all(torch.equal(sent[name], before[name]) for name in before)
    assert [t.name for t in rank.manifest().sent()] == list(sent)
    if tied:
        assert rank.manifest().tensors[-1].tied_to == "model.language_model.embed_tokens.weight"
    scores = rank._backend.outputs(batch, 1.0)["logprobs"]
    with torch.no_grad():
        each = torch.from_numpy(batch.tokens).long().split(batch.lengths.tolist())
        drawn = torch.cat([theirs(tokens[None]).logits[0] for tokens in each])[batch.rows].log_softmax(-1)
    expected = drawn.gather(1, torch.from_numpy(batch.targets).long()[:, None]).squeeze(1)
    assert np.abs(scores - expected.numpy()).max() < 1e-5

    rank.train(0, make_groups())
    rank.export_hf(tmp_path / "hf")
    after = read_tensors(tmp_path / "hf")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in seen)
    assert not any(torch.equal(after[name], before[name]) for name in before if name not in seen)
    config = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "model")]
    assert config[0] == config[1]
    rank.save(tmp_path / "state")
    rank.load(tmp_path / "state")


def test_an_untrained_draft_stays_and_a_trained_one_does_not_affect_the_policy(checkpoint, start_rank):
    exported = {}
    for train in (False, True):
        rank = start_rank(make_config(checkpoint, backend="megatron", enable_train=train))
        metrics = [rank.train(step, make_groups(seed=step, rewards=(0.0, 1.0, 3.0, 7.0))) for step in range(3)]
        exported[train] = weights(rank)
        assert ("mtp/loss_1" in metrics[0]) == train
    before = read_tensors(checkpoint)
    for name, tensor in exported[True].items():
        if is_draft(name):
            assert torch.equal(exported[False][name], before[name])
            assert not torch.equal(tensor, before[name])
        else:
            assert torch.equal(tensor, exported[False][name]), name


def test_equal_input_gives_equal_bits(checkpoint, start_rank):
    runs = []
    for _ in range(2):
        rank = start_rank(make_config(checkpoint, backend="megatron", **ALL))
        runs.append(([rank.train(step, make_groups(seed=step)) for step in range(2)], weights(rank)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def test_manifest_and_export_have_the_checkpoints_tensors(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, backend="megatron"))
    manifest, before = rank.manifest(), read_tensors(checkpoint)
    exported = [(name, tensor.clone()) for name, tensor in rank.export()]
    assert [name for name, _ in exported] == [spec.name for spec in manifest.tensors]
    assert {name for name, _ in exported} == set(before)
    for spec, (name, tensor) in zip(manifest.tensors, exported, strict=True):
        assert (spec.dtype, spec.shape, spec.role) == ("float32", tuple(tensor.shape), role(name))
        assert torch.equal(tensor, before[name]), name


def role(name):
    return "draft" if is_draft(name) else "target"


def test_a_tied_head_is_listed_and_not_sent_and_weights_have_the_engines_dtype(tmp_path, start_rank):
    path = make_checkpoint(tmp_path, tie_word_embeddings=True, torch_dtype="bfloat16")
    rank = start_rank(make_config(path, backend="megatron"))
    tied = [spec for spec in rank.manifest().tensors if spec.tied_to]
    assert [(spec.name, spec.tied_to) for spec in tied] == [("lm_head.weight", "model.embed_tokens.weight")]
    before = read_tensors(path)
    for name, tensor in rank.export():
        assert name != "lm_head.weight"
        assert torch.equal(tensor, before[name].bfloat16()), name


def test_both_backends_load_an_exported_folder(checkpoint, start_rank, tmp_path):
    rank = start_rank(
        make_config(checkpoint, backend="megatron", enable_train=True, loss="cross_entropy", updates_per_pass=1)
    )
    rank.train(0, make_groups())
    trained = weights(rank)
    rank.export_hf(tmp_path / "hf")
    assert DecoderConfig.load(tmp_path / "hf").raw == DecoderConfig.load(checkpoint).raw
    assert all(torch.equal(p, trained[name]) for name, p in load_decoder(tmp_path / "hf").named_parameters())
    again = weights(start_rank(make_config(str(tmp_path / "hf"), backend="megatron")))
    assert all(torch.equal(again[name], trained[name]) for name in trained)


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_an_export_keeps_the_config_beside_its_text_part(backend, checkpoint, start_rank, tmp_path):
    flat = DecoderConfig.load(checkpoint).raw
    outer = ("architectures", "tie_word_embeddings")
    raw = {name: flat[name] for name in outer} | {"vision_config": {"depth": 3, "patch_size": 14}, "image_token_id": 5}
    raw["text_config"] = {name: value for name, value in flat.items() if name not in outer}
    save_checkpoint(tmp_path / "nested", read_tensors(checkpoint), DecoderConfig.from_dict(raw))
    options = {"backend": backend, "enable_train": True}
    rank = start_rank(make_config(str(tmp_path / "nested"), **options))
    metrics = rank.train(0, make_groups())
    rank.export_hf(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == raw
    assert metrics == start_rank(make_config(checkpoint, **options)).train(0, make_groups())


def test_a_draft_made_from_the_trunk_equals_the_torch_backends(tmp_path, start_rank):
    plain = {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    path = make_checkpoint(tmp_path, **plain)
    found = {
        backend: weights(
            start_rank(
                make_config(
                    path,
                    backend=backend,
                    init_from_trunk=True,
                    enable_train=True,
                    loss="cross_entropy",
                    updates_per_pass=1,
                )
            )
        )
        for backend in ("torch", "megatron")
    }
    assert found["megatron"].keys() == found["torch"].keys()
    assert all(torch.equal(found["megatron"][name], found["torch"][name]) for name in found["torch"])


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_training_continues_from_a_checkpoint_bit_for_bit(checkpoint, start_rank, tmp_path):
    config = make_config(checkpoint, backend="megatron", schedule="linear", **ALL)
    rank = start_rank(config)
    for step in range(2):
        rank.train(step, make_groups(seed=step))
    rank.save(tmp_path / "state")
    expected = [rank.train(step, make_groups(seed=step)) for step in (2, 3)], weights(rank)
    rank = start_rank(config)
    rank.load(tmp_path / "state")
    assert [rank.train(step, make_groups(seed=step)) for step in (2, 3)] == expected[0]
    found = weights(rank)
    assert all(torch.equal(found[name], expected[1][name]) for name in found)


@pytest.mark.parametrize(("saver", "loader"), [("torch", "megatron"), ("megatron", "torch")])
def test_one_backend_continues_from_the_others_checkpoint(saver, loader, checkpoint, start_rank, tmp_path):
    rank = start_rank(make_config(checkpoint, backend=saver, **ALL))
    for step in range(3):
        rank.train(step, make_groups(seed=step))
    rank.save(tmp_path / "state")
    expected = [rank.train(step, make_groups(seed=step)) for step in (3, 4)]
    rank = start_rank(make_config(checkpoint, backend=loader, **ALL))
    rank.load(tmp_path / "state")
    expect_alike([rank.train(step, make_groups(seed=step)) for step in (3, 4)], expected)


def test_incompatible_state_is_refused(checkpoint, start_rank, tmp_path):
    rank = start_rank(make_config(checkpoint, backend="megatron"))
    with pytest.raises(RuntimeError, match="call stage first"):
        rank.write(tmp_path / "nothing")
    rank.save(tmp_path / "state")
    with pytest.raises(CheckpointError, match="no complete training state"):
        rank.load(tmp_path / "absent")
    rank = start_rank(
        make_config(checkpoint, backend="megatron", enable_train=True, loss="cross_entropy", updates_per_pass=1)
    )
    with pytest.raises(CheckpointError, match=r"saved with mtp\.enable_train=false, found true"):
        rank.load(tmp_path / "state")


# -- memory --------------------------------------------------------------------------------------------------------


def test_a_train_step_that_runs_out_of_memory_names_what_it_held(checkpoint, start_rank, monkeypatch):
    rank = start_rank(make_config(checkpoint, backend="megatron", **OPTIONS))
    held, chunks = rank._backend._held_bytes(), rank._backend._chunks
    nbytes = sum(p.nbytes for chunk in chunks for p in chunk.parameters())
    for kind, share in {"parameters": 1, "reference": 1, "gradients": 1, "optimizer": 2}.items():
        assert held[kind] == pytest.approx(share * nbytes, rel=0.05), kind  # buffers are padded
    expect_memory_named(rank, monkeypatch, "parameters 0.00, reference 0.00, gradients 0.00, optimizer 0.00")


# -- offload -------------------------------------------------------------------------------------------------------

KINDS = ("parameters", "reference", "gradients", "optimizer")


@pytest.mark.parametrize("mixed_precision", ["no", "bfloat16"])
def test_offloaded_state_is_resident_when_needed_and_changes_no_bit(mixed_precision, checkpoint, start_rank, tmp_path):
    def run(offload):
        config = make_config(checkpoint, backend="megatron", **ALL | {"mixed_precision": mixed_precision})
        settings = config.trainer.megatron
        settings.param_offload = settings.grad_offload = settings.optimizer_offload = offload
        rank = start_rank(config)
        here = lambda: {kind for kind in KINDS if rank._backend._offload.held_bytes(kind)}
        plain, while_losses = rank._objective.loss, []

        def watched(outputs, batch):
            while_losses.append(here())
            return plain(outputs, batch)

        rank._objective.loss = watched if offload else plain
        metrics = [rank.train(step, make_groups(seed=step)) for step in range(2)]
        exported = [(name, tensor, tensor.clone()) for name, tensor in rank.export()]
        rank.save(tmp_path / f"{offload}")
        metrics.append(rank.train(2, make_groups(seed=2)))
        rank.load(tmp_path / f"{offload}")
        metrics.append(rank.train(2, make_groups(seed=2)))
        rank.export_hf(tmp_path / f"hf_{offload}")
        if offload:
            assert while_losses
            assert all(there == {"parameters", "gradients"} for there in while_losses)
            assert not here()
            assert all(torch.equal(held, copy) for _, held, copy in exported), "a held exported tensor changed"
        exact = {f"hf/{name}": tensor for name, tensor in read_tensors(tmp_path / f"hf_{offload}").items()}
        return metrics, {name: copy for name, _, copy in exported} | exact

    (metrics, tensors), (expected_metrics, expected) = run(True), run(False)
    assert metrics == expected_metrics
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_state_that_was_only_read_is_not_copied_back():
    state, others = torch.arange(6.0), torch.ones(2)
    part = state[2:4]
    away = Offload({"state": [state, part], "scratch": [others]}, discarded={"scratch"})
    assert away.held_bytes("state") == 24
    away.send_all()
    assert away.held_bytes("state") == away.held_bytes("scratch") == 0
    with away.here("state", "unknown"):
        assert part.tolist() == [2, 3]
        state.fill_(-1)
    with away.here("state"), away.here("scratch", "state", written=True):
        assert part.tolist() == [2, 3], "state that was only read was written back"
        part.fill_(7)
    with away.here("state"):
        assert state.tolist() == [0, 1, 7, 7, 4, 5]


@pytest.mark.gpu
def test_offloaded_state_leaves_the_devices_memory(tmp_path, device, start_rank):
    path = make_checkpoint(tmp_path, hidden_size=512, intermediate_size=2048)
    held = {}
    for offload in (False, True):
        config = make_config(path, backend="megatron", device=device)
        settings = config.trainer.megatron
        settings.param_offload = settings.grad_offload = settings.optimizer_offload = offload
        rank = start_rank(config)
        rank.train(0, make_groups())
        held[offload] = torch.cuda.memory_allocated()
    parameters = sum(tensor.numel() for tensor in read_tensors(path).values())
    assert held[False] - held[True] > 12 * parameters, "float32 weights, gradients and two moments"


# -- refusals ------------------------------------------------------------------------------------------------------


def test_a_non_finite_loss_changes_nothing(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, backend="megatron"))
    before = weights(rank)
    with pytest.raises(NonFiniteError, match=r"train step 5, .* expected a finite number"):
        rank.train(5, make_groups(rewards=float("nan")))
    after = weights(rank)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert np.isfinite(rank.train(6, make_groups())["actor/grad_norm"])


def test_options_that_do_not_fit_the_model_are_refused_before_anything_is_built(checkpoint, tmp_path, start_rank):
    config = make_config(
        checkpoint,
        backend="megatron",
        enable_train=True,
        loss="cross_entropy",
        updates_per_pass=1,
        num_speculative_tokens=2,
    )
    config.trainer.megatron.tensor_model_parallel_size = 3
    config.trainer.megatron.pipeline_model_parallel_size = 4
    config.trainer.megatron.expert_model_parallel_size = 2
    with pytest.raises(CheckpointError) as e:
        start_rank(config)
    for expected in (
        "tensor_model_parallel_size: expected a divisor of the model's num_attention_heads 2, found 3",
        "expert_model_parallel_size: expected 1, as the model has no experts, found 2",
        "pipeline_model_parallel_size: 4 stages of 1 model chunks cannot share the model's 2 layers evenly",
        "mtp.num_speculative_tokens: the Megatron backend trains each MTP layer for one depth; expected at most 1",
    ):
        assert expected in str(e.value)
    assert not dist.is_initialized()


def test_tensor_parallel_ranks_with_experts_need_sequence_parallelism(tmp_path, start_rank):
    make_experts(tmp_path)
    config = make_config(str(tmp_path), backend="megatron")
    config.trainer.megatron.tensor_model_parallel_size = 2
    with pytest.raises(CheckpointError, match=r"tensor_model_parallel_size: 2 with a mixture of experts needs trainer"):
        start_rank(config)


# -- vocabulary-parallel head --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 5])
def test_a_single_vocabulary_part_scores_like_a_whole_vocabulary(padding):
    """Padding rows never count as tokens, whatever their values. Several parts: tests/test_megatron_parallel.py."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(20, 16), torch.randn(33, 16), torch.randint(0, 33, (20,))
    others = torch.randn(20, 16)
    g, e = torch.randn(20), torch.randn(20)
    padded = torch.cat([weight, 9 * torch.ones(padding, 16)])

    def run(function, rows, *options):
        leaves = [x.clone().requires_grad_() for x in (hidden, rows)]
        of_target = [others] if function in (ChunkedAcceptance, VocabParallelAcceptance) else []
        one, other = function.apply(*leaves, *of_target, targets, *options, 0.7, 6)
        (one @ g + other @ e if function in (ChunkedScores, VocabParallelScores) else one).backward()
        return [one, other, leaves[0].grad, leaves[1].grad[:33]]

    part = VocabularyPart.of(33, len(padded), dist.group.WORLD)
    pairs = (
        (ChunkedScores, VocabParallelScores),
        (ChunkedCrossEntropy, VocabParallelCrossEntropy),
        (ChunkedAcceptance, VocabParallelAcceptance),
    )
    for whole, in_parts in pairs:
        for expected, found in zip(run(whole, weight), run(in_parts, padded, part), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    dist.destroy_process_group()
