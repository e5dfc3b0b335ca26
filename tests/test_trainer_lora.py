"""LoRA in the torch backend: adapters train on a frozen base, are saved, and are exported in every form."""

import json

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from asyncrl.config.schema import LoraConfig
from asyncrl.models.checkpoint import is_draft, load_decoder, read_tensors, save_checkpoint
from asyncrl.models.config import CheckpointError
from asyncrl.models.lora import linear_shapes
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.digest import dtype_name
from asyncrl.param_sync.lora.adapters import check_adapter, target_pairs
from asyncrl.param_sync.lora.merge import merge
from asyncrl.param_sync.manifest import is_adapter
from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from tests.support.trainer import (
    first_gradient,
    make_config,
    make_groups,
    relative,
    weights,
)

TARGETS = ["q_proj", "o_proj", "up_proj"]


def lora_config(checkpoint, targets=TARGETS, **options):
    config = make_config(checkpoint, **{"lr": 1e-2, **options})
    config.model.lora = LoraConfig(rank=4, alpha=8.0, target_modules=list(targets))
    return config


def logprobs(rank, reference=False):
    batch = build_batch([Group.from_buffer(data) for data in make_groups(seed=1)])
    return rank._backend.outputs(batch, 0.7, "reference" if reference else "policy")["logprobs"]


def train(rank, steps=3, sizes=(4, 3, 1), rewards=None):
    return [rank.train(step, make_groups(sizes, seed=step, rewards=rewards)) for step in range(steps)]


def test_the_policy_starts_as_its_base_which_remains_the_reference(checkpoint, start_rank):
    full = start_rank(make_config(checkpoint, kl_coef=0.1))
    base, before = logprobs(full), weights(full)
    rank = start_rank(lora_config(checkpoint, kl_coef=0.1))
    assert np.array_equal(logprobs(rank), base)
    metrics = train(rank)
    assert np.array_equal(logprobs(rank, reference=True), base)
    assert np.abs(logprobs(rank) - base).max() > 0.05
    assert metrics[-1]["actor/kl_reference"] > 0

    trained = weights(rank)
    assert all(torch.equal(trained[name], tensor) for name, tensor in before.items())
    pairs = {name: t for name, t in trained.items() if is_adapter(name)}
    assert len(pairs) == 2 * 2 * len(TARGETS)
    assert all(t.abs().max() > 0 for t in pairs.values())


def test_memory_and_length_options_change_no_gradient(checkpoint, start_rank):
    whole = first_gradient(start_rank(lora_config(checkpoint, grad_clip=0.0)), make_groups())
    for other in ({"max_tokens_per_micro_batch": 50}, {"activation_checkpointing": True}):
        assert (
            relative(first_gradient(start_rank(lora_config(checkpoint, grad_clip=0.0, **other)), make_groups()), whole)
            < 1e-6
        )


def test_bfloat16_trains_near_float32(checkpoint, start_rank):
    exact = first_gradient(start_rank(lora_config(checkpoint, grad_clip=0.0)), make_groups())
    rank = start_rank(lora_config(checkpoint, grad_clip=0.0, mixed_precision="bfloat16"))
    rough = first_gradient(rank, make_groups())
    assert 0 < relative(rough, exact) < 0.05
    assert all(t.dtype == torch.float32 for _, t in rank.export())  # master weights


@pytest.mark.parametrize("targets", [TARGETS, ["all-linear"], ["layers.1.mlp.down_proj"]])
def test_merged_weights_equal_the_policy(checkpoint, start_rank, tmp_path, targets):
    """Compared with a full model loaded from the merged weights."""
    config = lora_config(checkpoint, targets)
    config.param_sync.adapters = config.checkpoint.export_lora = "merged"
    rank = start_rank(config)
    train(rank)
    scores, sent, manifest = logprobs(rank), weights(rank), rank.manifest()
    rank.export_hf(tmp_path / "hf")
    assert manifest.adapter is None
    assert {t.name: t.shape for t in manifest.sent()} == {name: tuple(t.shape) for name, t in sent.items()}
    written = read_tensors(tmp_path / "hf")
    assert all(torch.equal(written[name], tensor) for name, tensor in sent.items())
    np.testing.assert_allclose(logprobs(start_rank(make_config(tmp_path / "hf"))), scores, rtol=0, atol=2e-5)
    changed = {name for name, t in read_tensors(checkpoint).items() if not torch.equal(t, written[name])}
    assert len(changed) == {"all-linear": 14, "layers.1.mlp.down_proj": 1}.get(targets[0], 6)


def test_weights_are_merged_for_engines_of_another_dtype(checkpoint, start_rank, tmp_path):
    config = lora_config(checkpoint)
    config.param_sync.adapters = config.checkpoint.export_lora = "merged"
    config.rollout.engine.dtype = "bfloat16"
    rank = start_rank(config)
    train(rank, 1)
    rank.export_hf(tmp_path / "hf")
    written, sent = read_tensors(tmp_path / "hf"), weights(rank)
    assert {t.name: getattr(torch, t.dtype) for t in rank.manifest().sent()} == {n: t.dtype for n, t in sent.items()}
    assert all(tensor.dtype == torch.bfloat16 for tensor in sent.values())
    assert all(written[name].dtype == torch.float32 for name in sent)  # as the checkpoint's config.json says
    assert all(torch.equal(written[name].bfloat16(), tensor) for name, tensor in sent.items())


def test_the_manifest_lists_everything_and_can_omit_its_base(checkpoint, start_rank):
    config = lora_config(checkpoint)
    config.rollout.engine.dtype = "bfloat16"
    rank = start_rank(config)
    train(rank, 1)
    manifest, modules = rank.manifest(), linear_shapes(load_decoder(checkpoint).config)
    check_adapter(manifest, modules)
    assert manifest.sends_base
    alone = manifest.without_base()
    check_adapter(alone, modules)
    assert not alone.sends_base
    for listed, base in ((manifest, True), (alone, False)):
        exported = [(name, dtype_name(t), tuple(t.shape)) for name, t in rank.export(base)]
        assert exported == [(t.name, t.dtype, t.shape) for t in listed.sent()]
    assert all(is_adapter(t.name) for t in alone)
    assert len(alone) == len(manifest) - len(read_tensors(checkpoint))


def test_peft_reads_the_exported_adapter(checkpoint, start_rank, tmp_path):
    rank = start_rank(lora_config(checkpoint))
    train(rank)
    scores, sent = logprobs(rank), weights(rank)
    rank.export_hf(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert (config["target_modules"], config["base_model_name_or_path"]) == (TARGETS, checkpoint)
    pairs = load_file(tmp_path / "hf" / "adapter_model.safetensors")
    assert all(torch.equal(pairs[name], t) for name, t in sent.items() if is_adapter(name))

    model, merged = load_decoder(checkpoint), read_tensors(checkpoint)
    found = target_pairs(rank.manifest(), linear_shapes(model.config))
    assert pairs.keys() == {name for pair in found.values() for name in pair}
    for module, (a, b) in found.items():
        weight = f"{module}.weight"
        merged[weight] = merge(merged[weight], pairs[a], pairs[b], config["lora_alpha"], config["r"])
    save_checkpoint(tmp_path / "merged", merged, model.config)
    np.testing.assert_allclose(logprobs(start_rank(make_config(tmp_path / "merged"))), scores, rtol=0, atol=2e-5)


def test_the_draft_learns_without_changing_the_adapters(checkpoint, start_rank):
    teaching = {"sizes": (4, 3), "rewards": (0.0, 1.0, 3.0, 7.0)}  # all, so both ranks compute the same
    rank = start_rank(lora_config(checkpoint, enable_train=True))
    before = weights(rank)
    train(rank, 2, **teaching)
    after = weights(rank)
    moved = {name for name in before if not torch.equal(after[name], before[name])}
    assert moved == {name for name in before if is_draft(name) or is_adapter(name)}
    assert moved == {t.name for t in rank.manifest().without_base()} == {name for name, _ in rank.export(base=False)}
    alone = start_rank(lora_config(checkpoint))
    train(alone, 2, **teaching)
    assert all(torch.equal(tensor, after[name]) for name, tensor in alone.export() if is_adapter(name))


def test_a_restored_run_continues_bit_for_bit_and_saves_only_adapters(checkpoint, start_rank, tmp_path):
    config = lora_config(checkpoint, schedule="cosine", warmup_steps=1, total_steps=6, enable_train=True)
    rank = start_rank(config)
    rank.train(0, make_groups(seed=0))
    rank.save(tmp_path / "state")
    straight = [rank.train(step, make_groups(seed=step)) for step in (1, 2)], weights(rank)
    kept = rank._backend.state()["model"]
    assert kept
    assert all(is_adapter(name) or is_draft(name) for name in kept)

    rank = start_rank(config)
    rank.load(tmp_path / "state")
    resumed = [rank.train(step, make_groups(seed=step)) for step in (1, 2)], weights(rank)
    assert straight[0] == resumed[0]
    assert all(torch.equal(straight[1][name], resumed[1][name]) for name in straight[1])


def test_the_state_of_another_base_or_kind_of_training_is_refused(checkpoint, start_rank, tmp_path):
    start_rank(lora_config(checkpoint)).save(tmp_path / "lora")
    start_rank(make_config(checkpoint)).save(tmp_path / "full")
    tensors = read_tensors(checkpoint)
    tensors["model.norm.weight"] += 1e-3
    save_checkpoint(tmp_path / "other", tensors, load_decoder(checkpoint).config)
    with pytest.raises(CheckpointError, match="holds adapters of another base model than"):
        start_rank(lora_config(str(tmp_path / "other"))).load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="holds LoRA adapters, the run to load it into trains all weights"):
        start_rank(make_config(checkpoint)).load(tmp_path / "lora")
    with pytest.raises(CheckpointError, match="holds all weights, the run to load it into trains adapters"):
        start_rank(lora_config(checkpoint)).load(tmp_path / "full")


def run_two_ranks(rank, config, folder):
    torch.set_num_threads(1)
    trainer = TrainerRank(config, rank, 2, f"file://{folder}/rendezvous", Recorder(f"trainer/{rank}"))
    metrics = train(trainer, 5)
    exported = {name: t.clone() for name, t in trainer.export(base=False)}
    trainer.save(folder / "of_two")
    trainer.export_hf(folder / "hf_of_two")
    trainer.load(folder / "of_one")
    metrics.append(trainer.train(5, make_groups(seed=5)))
    trainer.close()
    torch.save({"metrics": metrics, "exported": exported}, folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_two_ranks_train_like_one_and_load_each_others_state(checkpoint, start_rank, tmp_path):
    config = lora_config(
        checkpoint, lr=1e-3, epochs=2, mini_batch_groups=2, max_tokens_per_micro_batch=40, kl_coef=0.05
    )
    config.trainer.ranks = 2
    one = start_rank(config)
    expected = train(one, 5)
    one.save(tmp_path / "of_one")
    alone = {name: t.clone() for name, t in one.export(base=False)}
    expected.append(one.train(5, make_groups(seed=5)))

    mp.spawn(run_two_ranks, args=(config, tmp_path), nprocs=2)
    two = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert two[0]["metrics"] == two[1]["metrics"]
    for mine, theirs in zip(expected, two[0]["metrics"], strict=True):
        assert theirs["actor/loss"] == pytest.approx(mine["actor/loss"], abs=1e-5)
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-5)
    assert not two[1]["exported"]
    assert list(two[0]["exported"]) == list(alone)
    for name, tensor in alone.items():
        torch.testing.assert_close(two[0]["exported"][name], tensor, rtol=0, atol=1e-4)
    written = load_file(tmp_path / "hf_of_two" / "adapter_model.safetensors")
    assert all(torch.equal(written[name], t) for name, t in two[0]["exported"].items() if is_adapter(name))

    again = start_rank(config)
    again.load(tmp_path / "of_two")
    assert all(torch.equal(t, two[0]["exported"][name]) for name, t in again.export(base=False))
