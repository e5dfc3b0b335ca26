"""The torch backend in a trainer rank: real gradients, process groups and checkpoints."""

import dataclasses
import importlib.util
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from asyncrl.config.schema import CheckpointConfig
from asyncrl.models.checkpoint import is_draft, load_decoder, read_tensors
from asyncrl.models.chunked import ChunkedScores, head_logits
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.decoder import Decoder
from asyncrl.models.layout import PackedLayout
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.buckets import Bucket, TensorPart
from asyncrl.param_sync.digest import combine_hashes, digest_tensors, flat_bytes, hash_tensor
from asyncrl.param_sync.live_weights import LiveWeights
from asyncrl.rollouter.engines.native.model import NativeModel
from asyncrl.trainer.backends import state as staged_state
from asyncrl.trainer.backends.base import NonFiniteError
from asyncrl.trainer.backends.torch import backend, prompts
from asyncrl.trainer.batches import build_batch
from asyncrl.trainer.checkpoints import PARTIAL, CheckpointMetadata, CheckpointStore
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.versions import PolicyVersion
from tests.support.trainer import (
    VOCAB,
    expect_memory_named,
    first_gradient,
    make_checkpoint,
    make_config,
    make_groups,
    plain_loss,
    relative,
    train_in_parts,
    weights,
)
from tests.support.trees import make_trees


def test_the_gradient_equals_the_plain_formula(checkpoint, start_rank):
    config = make_config(checkpoint, grad_clip=0.0, anchor="proximal", temperature=0.7)
    groups = make_groups()
    found = first_gradient(start_rank(config), groups)

    model = load_decoder(checkpoint)

    def logprobs_of(prompt, response):
        tokens = torch.cat([prompt, response])
        logits = model.logits(tokens, PackedLayout.from_lengths(np.array([len(tokens)]))) / 0.7
        drawn = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return drawn.gather(1, response[:, None]).squeeze(1)

    plain_loss(groups, logprobs_of).backward()
    trunk = [p for name, p in model.named_parameters() if not is_draft(name)]
    assert relative(found, torch.cat([p.grad.flatten() for p in trunk if p.grad is not None])) < 1e-5


def test_a_train_step_that_runs_out_of_memory_names_weights_and_optimizer(checkpoint, start_rank, monkeypatch):
    rank = start_rank(make_config(checkpoint))
    tensors, held = weights(rank), rank._backend._held_bytes()
    trained = sum(tensor.nbytes for name, tensor in tensors.items() if not is_draft(name))
    assert held["weights"] == sum(tensor.nbytes for tensor in tensors.values())
    assert 2 * trained <= held["optimizer"] < 2.01 * trained  # two moments, and steps
    expect_memory_named(rank, monkeypatch, "weights 0.00, optimizer 0.00")


def test_neither_micro_batches_nor_chunks_nor_checkpointing_change_the_gradient(checkpoint, start_rank):
    options = {"grad_clip": 0.0, "kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "sequence_mean"}
    whole = first_gradient(start_rank(make_config(checkpoint, **options)), make_groups())
    for other in (
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 50},
        {"logprob_chunk_tokens": 7},
        {"activation_checkpointing": True},
    ):
        found = first_gradient(start_rank(make_config(checkpoint, **options, **other)), make_groups())
        assert relative(found, whole) < 1e-6, other


@pytest.mark.parametrize("block_cost", [0.0, 1e9])
def test_prompts_held_once_do_not_change_the_gradient(checkpoint, start_rank, monkeypatch, block_cost):
    """Of samples of one and of several sequences, some of which begin with only a part of their group's prompt, in a
    block for each length and in one block."""
    monkeypatch.setitem(prompts.BLOCK_COST, "cpu", block_cost)
    options = {"grad_clip": 0.0, "kl_coef": 0.1, "enable_train": True, "max_tokens_per_micro_batch": 60}
    seen: list[int] = []
    blocks: set[int] = set()
    forward = Decoder.forward

    def counting(self, tokens, layout, *arguments):
        seen.append(len(tokens))
        blocks.add(len(layout.blocks))
        return forward(self, tokens, layout, *arguments)

    monkeypatch.setattr(Decoder, "forward", counting)
    for groups in (make_groups((4, 3, 4)), make_trees()):
        found = []
        for together in (True, False):
            seen.clear()
            rank = start_rank(make_config(checkpoint, **options))
            if not together:
                rank._backend._attention_cost = None
            found.append((first_gradient(rank, groups), sum(seen)))
        (once, fewer), (apart, tokens) = found
        assert relative(once, apart) < 1e-6
        assert fewer < tokens
        assert (max(blocks) > 1) == (block_cost == 0)


def test_equal_input_gives_equal_bits(checkpoint, start_rank):
    runs = []
    for _ in range(2):
        rank = start_rank(make_config(checkpoint, epochs=2, mini_batch_groups=2, max_tokens_per_micro_batch=60))
        runs.append(([rank.train(step, make_groups(seed=step)) for step in range(2)], weights(rank)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


def results_in_parts(rank, *sizes):
    """Metrics and samplers' KLs of two steps, and the weights after them."""
    found = [(train_in_parts(rank, k, make_groups((4, 3, 2, 4), seed=k), *sizes), rank.sampler_kl) for k in range(2)]
    return [metrics for metrics, _ in found], [kl for _, kl in found], weights(rank)


@pytest.mark.parametrize(
    "options",
    [
        {"entropy_coef": 0.01, "kl_coef": 0.1, "max_tokens_per_micro_batch": 50},
        {"enable_train": True, "loss_aggregation": "sequence_mean", "grad_clip": 0.01},
        {"enable_train": True, "detach_encoder": False},
        {"advantage": "reinforce_pp"},
        {"epochs": 2},
    ],
    ids=["scored", "draft", "attached-draft", "of-the-batch", "several-steps"],
)
def test_a_step_in_parts_is_that_of_its_whole_batch(checkpoint, start_rank, monkeypatch, options):
    """Where a part needs the others, all wait for the last one: then the bits are equal."""
    config = make_config(checkpoint, **options)
    metrics, kls, trained = results_in_parts(start_rank(config), 4)
    rank, calls = start_rank(config), []
    accumulate = rank._backend.accumulate
    monkeypatch.setattr(rank._backend, "accumulate", lambda *a: (calls.append(a), accumulate(*a)))
    found, found_kls, found_trained = results_in_parts(rank, 1, 2, 1)
    waits = not {"kl_coef", "grad_clip"} & set(options)
    assert len(calls) == 2 * (1 if waits else 3) * config.algorithm.epochs
    if waits:
        assert (found, found_kls) == (metrics, kls)
    for ours, whole in zip(found, metrics, strict=True):
        assert ours == pytest.approx(whole, rel=1e-4, abs=1e-6)
    for ours, whole in zip(itertools.chain(*found_kls), itertools.chain(*kls), strict=True):
        assert (ours.sampler, ours.tokens) == (whole.sampler, whole.tokens)
        assert (ours.kl, ours.ratio) == pytest.approx((whole.kl, whole.ratio), rel=1e-4)
    for name, tensor in trained.items():
        torch.testing.assert_close(found_trained[name], tensor, rtol=0, atol=0 if waits else 2e-5)


def test_several_mini_batches_take_a_step_each(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, mini_batch_groups=2))
    assert rank.train(0, make_groups((4, 3, 2)))["trainer/optimizer_steps"] == 2


def test_a_step_that_ended_early_leaves_nothing_in_the_next(checkpoint, start_rank):
    groups, runs = make_groups((4, 3, 2)), []
    for early in (False, True):
        rank = start_rank(make_config(checkpoint, enable_train=True))
        if early:
            rank.train(0, make_groups((2,), seed=5), part=0, parts=3)
        runs.append((train_in_parts(rank, 0, groups, 1, 2), weights(rank)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], tensor) for name, tensor in runs[1][1].items())


def test_parts_without_a_trained_token_change_nothing(checkpoint, start_rank):
    """Nor does a step of only such parts, as the optimizer's momentum would."""
    untrained = [make_untrained(data) for data in make_groups((4, 3), seed=3)]
    groups = make_groups((4, 3))
    rank = start_rank(make_config(checkpoint))
    whole = train_in_parts(rank, 0, groups, 2)
    after = weights(rank)
    assert train_in_parts(rank, 1, untrained, 1, 1)["trainer/optimizer_steps"] == 0
    assert all(torch.equal(after[name], tensor) for name, tensor in weights(rank).items())
    rank = start_rank(make_config(checkpoint))
    found = train_in_parts(rank, 0, [untrained[0], *groups, untrained[1]], 1, 2, 1)
    assert found["actor/loss"] == pytest.approx(whole["actor/loss"], abs=1e-6)
    for name, tensor in weights(rank).items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=2e-5)


def make_untrained(data):
    group = Group.from_buffer(data)
    return dataclasses.replace(group, loss_mask=np.zeros_like(group.loss_mask)).to_bytes()


def run_two_ranks(rank, config, folder, results):
    """Train five steps on two ranks, one of them in parts; write that state during a sixth step, and once with one
    rank's write refused; then train a sixth step from the checkpoint of a single rank."""
    torch.set_num_threads(1)
    trainer = TrainerRank(config, rank, 2, f"file://{folder}/rendezvous", Recorder(f"trainer/{rank}"))
    metrics = [trainer.train(step, make_groups((4, 3, 1), seed=step)) for step in range(4)]
    metrics.append(train_in_parts(trainer, 4, make_groups((4, 3, 1), seed=4), 1, 1, 1))  # the last leaves one rank none
    exported = {name: tensor.clone() for name, tensor in trainer.export()}
    trainer.export_hf(folder / "hf_of_two")
    torch.manual_seed(rank)
    trainer.stage()
    drawn = torch.rand(3)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(trainer.write, folder / "of_two")
        trainer.train(5, make_groups((4, 3, 1), seed=5))
        writing.result()
    with pytest.raises(CheckpointError, match=r"refused cannot be written: trainer/1: \w+: .*rank_1.bin"):
        trainer.write(folder / "refused")
    trainer.load(folder / "of_two")
    assert torch.equal(torch.rand(3), drawn)  # this rank's random state, not rank 0's
    trainer.load(folder / "of_one")
    metrics.append(trainer.train(5, make_groups((4, 3, 1), seed=5)))
    trainer.close()
    torch.save({"metrics": metrics, "exported": exported}, results / f"rank{rank}.pt")


# without a KL, samples without an advantage are not computed
@pytest.mark.parametrize("kl_coef", [pytest.param(0.05, marks=pytest.mark.slow), 0.0])
def test_two_ranks_train_like_one_and_load_each_others_state(checkpoint, start_rank, tmp_path, kl_coef):
    # mini batches of two groups: the second one is a single sequence, so one of two ranks has none
    config = make_config(
        checkpoint, epochs=2, mini_batch_groups=2, max_tokens_per_micro_batch=40, kl_coef=kl_coef, grad_clip=0.5
    )
    config.trainer.ranks = 2
    config.trainer.optimizer.eps = 1e-5  # else gradients near zero, which differ by rounding, take whole steps
    one = start_rank(config)
    expected = [one.train(step, make_groups((4, 3, 1), seed=step)) for step in range(5)]
    one.save(tmp_path / "of_one")
    alone = weights(one)
    expected.append(one.train(5, make_groups((4, 3, 1), seed=5)))

    (tmp_path / "refused" / "rank_1.bin").mkdir(parents=True)  # in the place of rank 1's file
    mp.spawn(run_two_ranks, args=(config, tmp_path, tmp_path), nprocs=2)
    two = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]

    assert two[0]["metrics"] == two[1]["metrics"]  # every rank reports the whole batch
    for mine, theirs in zip(expected, two[0]["metrics"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-5)
        assert theirs["actor/loss"] == pytest.approx(mine["actor/loss"], abs=1e-5)
    assert not two[1]["exported"]  # rank 0 is the sender
    assert two[0]["exported"].keys() == alone.keys()
    for name, tensor in two[0]["exported"].items():
        torch.testing.assert_close(tensor, alone[name], rtol=0, atol=2e-5)
    written = read_tensors(tmp_path / "hf_of_two")
    assert all(torch.equal(written[name], tensor) for name, tensor in two[0]["exported"].items())

    again = start_rank(config)
    again.load(tmp_path / "of_two")
    assert all(torch.equal(tensor, two[0]["exported"][name]) for name, tensor in again.export())
    sixth = again.train(5, make_groups((4, 3, 1), seed=5))
    assert sixth == pytest.approx(expected[-1], rel=1e-4, abs=1e-5)


def test_a_restored_run_continues_bit_for_bit(checkpoint, start_rank, tmp_path):
    config = make_config(checkpoint, schedule="cosine", warmup_steps=1, total_steps=6)
    rank = start_rank(config)
    rank.train(0, make_groups(seed=0))
    rank.save(tmp_path / "state")
    torch.rand(3)
    straight = [rank.train(step, make_groups(seed=step)) for step in (1, 2)], weights(rank), torch.rand(3)

    rank = start_rank(config)
    rank.load(tmp_path / "state")
    torch.rand(3)
    resumed = [rank.train(step, make_groups(seed=step)) for step in (1, 2)], weights(rank), torch.rand(3)
    assert straight[0] == resumed[0]
    assert all(torch.equal(straight[1][name], resumed[1][name]) for name in straight[1])
    assert torch.equal(straight[2], resumed[2])
    assert len({m["actor/lr"] for m in straight[0]}) == 2


@pytest.mark.parametrize("epochs", [1, 4])
def test_the_rate_goes_on_from_its_step_if_a_resume_changes_the_optimizer_steps_of_a_step(
    checkpoint, start_rank, tmp_path, epochs
):
    schedule = {"schedule": "linear", "total_steps": 8, "min_lr_ratio": 0.0}
    rank = start_rank(make_config(checkpoint, epochs=2, **schedule))
    for step in range(4):
        rank.train(step, make_groups(seed=step))
    rank.save(tmp_path / "state")
    rank = start_rank(make_config(checkpoint, epochs=epochs, **schedule))
    rank.load(tmp_path / "state")
    rates = [rank.train(step, make_groups(seed=step))["actor/lr"] for step in (4, 5)]
    # of a step's last optimizer step
    assert rates == pytest.approx([1e-3 * (1 - (step + 1 - 1 / epochs) / 8) for step in (4, 5)])
    rank.save(tmp_path / "again")
    assert int(rank._backend.state()["optimizer_steps"]) == 8 + 2 * epochs  # Adam's own count goes on


def test_the_decay_goes_on_after_a_warmup_if_a_resume_changes_the_optimizer_steps_of_a_step(
    checkpoint, start_rank, tmp_path
):
    """The warm-up's number of optimizer steps stays as it is; 8 of the 14 after it are done, or 3 of 6."""
    schedule = {"schedule": "linear", "total_steps": 8, "min_lr_ratio": 0.0, "warmup_steps": 2}
    rank = start_rank(make_config(checkpoint, epochs=2, **schedule))
    for step in range(5):
        rank.train(step, make_groups(seed=step))
    rank.save(tmp_path / "state")
    rank = start_rank(make_config(checkpoint, **schedule))
    rank.load(tmp_path / "state")
    rates = [rank.train(step, make_groups(seed=step))["actor/lr"] for step in (5, 6)]
    assert rates == pytest.approx([1e-3 * (1 - done / 6) for done in (3, 4)])


def test_figures_are_means_over_trained_tokens_whatever_the_aggregation(checkpoint, start_rank):
    found = []
    for how in ("token_mean", "sequence_mean", "sample_mean", "constant"):
        metrics = start_rank(make_config(checkpoint, loss_aggregation=how)).train(0, make_groups())
        found.append([metrics[f"actor/{name}"] for name in ("entropy", "ratio_mean", "kl_behaviour")])
    assert found[1:] == [pytest.approx(found[0])] * 3


def test_the_effective_sample_size_is_that_of_the_weights(checkpoint, start_rank):
    """Kish 1965, over the trained tokens of all sequences."""
    rank = start_rank(make_config(checkpoint, anchor="proximal", corrections=["tis"], tis_cap=1.5))
    groups = make_groups(rewards=(0.0, 1.0, 3.0, 7.0))  # without an advantage of 0
    batch = build_batch([Group.from_buffer(data) for data in groups])
    log_ratio = rank._backend.outputs(batch, 1.0)["logprobs"] - batch.columns["behaviour_logprobs"]
    weight = np.minimum(np.exp(log_ratio[batch.loss_mask].astype(float)), 1.5)
    metrics = rank.train(0, groups)
    assert metrics["actor/effective_sample_size"] == pytest.approx(weight.mean() ** 2 / (weight**2).mean(), rel=1e-4)
    assert metrics["actor/tis_truncated"] == pytest.approx((weight == 1.5).mean())


def test_a_restored_run_continues_with_its_entropy_coefficient(checkpoint, start_rank, tmp_path):
    config = make_config(checkpoint, entropy_target=10.0, entropy_coef=0.01, entropy_step=0.003)
    rank = start_rank(config)
    coefficients = [rank.train(step, make_groups(seed=step))["actor/entropy_coef"] for step in (0, 1)]
    rank.save(tmp_path / "state")
    straight = rank.train(2, make_groups(seed=2))
    assert [*coefficients, straight["actor/entropy_coef"]] == pytest.approx([0.01, 0.013, 0.016])

    rank = start_rank(config)
    rank.load(tmp_path / "state")
    assert rank.train(2, make_groups(seed=2)) == straight
    rank = start_rank(make_config(checkpoint, entropy_coef=0.02))  # a resumed run may change its options
    rank.load(tmp_path / "state")
    rank.save(tmp_path / "without_target")
    assert rank.train(2, make_groups(seed=2))["actor/entropy_coef"] == 0.02
    rank = start_rank(make_config(checkpoint, entropy_target=10.0, entropy_coef=0.05))
    rank.load(tmp_path / "without_target")
    assert rank.train(2, make_groups(seed=2))["actor/entropy_coef"] == 0.05


def run_two_steps_more(_, config, folder):
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    rank.load(folder / "state")
    metrics = [rank.train(step, make_groups(seed=step)) for step in (2, 3)]
    torch.save({"metrics": metrics, "weights": weights(rank), "drawn": torch.rand(3)}, folder / "resumed.pt")
    rank.close()


def test_a_new_process_continues_from_a_staged_state_bit_for_bit(checkpoint, start_rank, tmp_path):
    """The state is written after two further steps, which change every weight and moment and must not show in it."""
    config = make_config(checkpoint, schedule="cosine", warmup_steps=1, total_steps=4)
    rank = start_rank(config)
    for step in range(2):
        rank.train(step, make_groups(seed=step))
    rank.stage()
    straight = [rank.train(step, make_groups(seed=step)) for step in (2, 3)], weights(rank), torch.rand(3)
    rank.write(tmp_path / "state")

    mp.spawn(run_two_steps_more, args=(config, tmp_path))
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=False)
    assert resumed["metrics"] == straight[0]
    assert all(torch.equal(resumed["weights"][name], straight[1][name]) for name in straight[1])
    assert torch.equal(resumed["drawn"], straight[2])


def test_staging_during_a_write_is_refused(checkpoint, start_rank, tmp_path, monkeypatch):
    """The write blocks at its start until the test releases it."""
    rank = start_rank(make_config(checkpoint))
    with pytest.raises(RuntimeError, match="call stage first"):
        rank.write(tmp_path / "state")
    rank.stage()
    rank.stage()  # a copy that is never written
    begun, proceed, save = threading.Event(), threading.Event(), staged_state.dcp.save

    def held(*args, **options):
        begun.set()
        assert proceed.wait(60)
        return save(*args, **options)

    monkeypatch.setattr(staged_state.dcp, "save", held)
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(rank.write, tmp_path / "state")
        assert begun.wait(60)
        for work in (rank.stage, lambda: rank.write(tmp_path / "second")):
            with pytest.raises(RuntimeError, match="during a write of the staged state"):
                work()
        assert rank.train(0, make_groups())["trainer/optimizer_steps"] == 1
        proceed.set()
        writing.result()
    rank.stage()
    start_rank(make_config(checkpoint)).load(tmp_path / "state")


def test_a_failed_write_keeps_the_copy(checkpoint, start_rank, tmp_path):
    rank = start_rank(make_config(checkpoint))
    rank.stage()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/state cannot be written: trainer/0"):
        rank.write(tmp_path / "file" / "state")
    rank.write(tmp_path / "state")
    start_rank(make_config(checkpoint)).load(tmp_path / "state")


def test_ranks_wait_for_the_one_that_writes_as_long_as_a_checkpoint_may_take(checkpoint, start_rank, monkeypatch):
    waits, new_group = [], dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *a, **k: waits.append(k.get("timeout")) or new_group(*a, **k))
    config = make_config(checkpoint)
    start_rank(config)
    assert timedelta(seconds=config.checkpoint.timeout_s) in waits


def start_slowly(rank, config, folder):
    torch.set_num_threads(1)
    built = backend.load(config, config.model.path, False)
    slow = dataclasses.replace(built, read=lambda: time.sleep(20) or built.read())
    backend.load = lambda *_: slow
    meeting, recorder = f"file://{folder}/rendezvous", Recorder(f"trainer/{rank}")
    started = backend.TorchFSDPBackend(config, rank, 2, meeting, recorder, timeout_s=12)
    (folder / f"started{rank}").touch()
    started.close()


@pytest.mark.slow
def test_ranks_wait_for_the_one_that_reads_the_model_as_long_as_an_actor_may_take_to_start(checkpoint, tmp_path):
    config = make_config(checkpoint)
    config.trainer.ranks = 2
    mp.spawn(start_slowly, args=(config, tmp_path), nprocs=2)
    assert {path.name for path in tmp_path.glob("started*")} == {"started0", "started1"}


def save_then_hang(_, config, folder):
    """Never finishes its second checkpoint."""
    store = CheckpointStore(folder, CheckpointConfig(keep_last=1))
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    for step in (1, 2):
        rank.train(step, make_groups(seed=step))
        partial = store.begin(step)
        if step == 2:
            (partial / "state").mkdir()
            os.mkfifo(partial / "state" / "rank_0.bin")
            (folder / "held").touch()
        rank.save(partial / "state")
        store.complete(partial, CheckpointMetadata(step, PolicyVersion(0, step), step, step))


def test_a_rank_killed_during_a_write_leaves_the_preceding_checkpoint(checkpoint, start_rank, tmp_path):
    config = make_config(checkpoint)
    process = mp.spawn(save_then_hang, args=(config, tmp_path), join=False).processes[0]
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.05)
    reader = os.open(tmp_path / f"step_000002.0{PARTIAL}" / "state" / "rank_0.bin", os.O_RDONLY)  # a writer is here
    process.kill()
    process.join()
    os.close(reader)

    store = CheckpointStore(tmp_path, CheckpointConfig())
    assert [c.metadata.step for c in store.all()] == [1]
    newest = store.open(store.newest().path)
    rank = start_rank(config)
    rank.train(1, make_groups(seed=1))
    trained = weights(rank)
    rank = start_rank(config)
    rank.load(newest.path / "state")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rank.export())


def test_the_state_of_another_model_is_refused(checkpoint, start_rank, tmp_path):
    start_rank(make_config(checkpoint)).save(tmp_path / "state")
    other = make_config(make_checkpoint(tmp_path / "other", hidden_size=96))
    with pytest.raises(CheckpointError, match=r"state cannot be read: trainer/0: ValueError: Size mismatch") as error:
        start_rank(other).load(tmp_path / "state")
    assert isinstance(error.value, Exception)


def test_an_unfinished_checkpoint_is_refused(checkpoint, start_rank, tmp_path):
    with pytest.raises(CheckpointError, match="did not finish"):
        start_rank(make_config(checkpoint)).load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_gives_transformers_logits(tmp_path, start_rank, tied):
    from transformers import Qwen2ForCausalLM

    source = make_checkpoint(tmp_path / "start", tie_word_embeddings=tied)
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    rank = start_rank(make_config(source))
    for step in range(2):
        rank.train(step, make_groups(seed=step))
    rank.export_hf(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").is_file()

    ours = load_decoder(tmp_path / "out")
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokens = torch.arange(20) * 7 % VOCAB
    with torch.no_grad():
        logits = ours.logits(tokens, PackedLayout.from_lengths(np.array([20])))
        torch.testing.assert_close(logits, theirs(tokens[None]).logits[0], rtol=0, atol=1e-5)
        start_logits = load_decoder(source).logits(tokens, PackedLayout.from_lengths(np.array([20])))
    assert (logits - start_logits).abs().max() > 1e-3  # the trained model was written, not the initial one


def test_the_manifest_lists_what_is_exported_and_marks_draft_and_tied(tmp_path, start_rank):
    rank = start_rank(make_config(make_checkpoint(tmp_path / "tied", tie_word_embeddings=True, torch_dtype="bfloat16")))
    manifest, tensors = rank.manifest(), weights(rank)
    assert [(t.name, t.dtype, t.shape) for t in manifest.sent()] == [
        (name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()
    ]
    assert {t.dtype for t in manifest} == {"bfloat16"}
    assert [(t.name, t.tied_to) for t in manifest if t.tied_to] == [("lm_head.weight", "model.embed_tokens.weight")]
    assert {t.name for t in manifest if t.role == "draft"} == {
        n for n in tensors if n.startswith("model.mtp_layers.0.")
    }


@pytest.mark.parametrize(
    ("written", "option", "sent"),
    [
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "auto", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("float16", "auto", "bfloat16"),
    ],
)
def test_weights_are_sent_in_the_engine_dtype_and_exported_in_the_checkpoint_dtype(
    tmp_path, start_rank, written, option, sent
):
    """Trained weights are float32: the digests of both sides agree on the cast values."""
    config = make_config(make_checkpoint(tmp_path / "start", torch_dtype=written))
    config.rollout.engine.dtype = option
    rank = start_rank(config)
    rank.train(0, make_groups())
    manifest = rank.manifest()
    assert {t.dtype for t in manifest} == {sent}

    model = NativeModel(DecoderConfig.load(tmp_path / "start"), 128, getattr(torch, sent))
    receiver = LiveWeights(model.named_views(), model.tied(), on_commit=lambda version: None)
    receiver.open("s", manifest)
    specs, hashes = {t.name: t for t in manifest}, {}
    for sequence, (name, tensor) in enumerate(rank.export()):
        data = flat_bytes(tensor).numpy()
        hashes[name] = hash_tensor(specs[name], tensor)
        part = TensorPart(name, 0, tensor.nbytes, 0)
        receiver.take(Bucket("s", 0, sequence, (part,), memoryview(data), None))
    receiver.verify()
    receiver.commit(PolicyVersion(0, 1))
    assert digest_tensors(model.named_views().items()) == combine_hashes(hashes)

    rank.export_hf(tmp_path / "hf")
    assert {str(t.dtype) for t in read_tensors(tmp_path / "hf").values()} == {f"torch.{written}"}


def test_training_changes_the_target_and_not_the_draft(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint))
    before = weights(rank)
    rank.train(0, make_groups())
    moved = {name for name, tensor in rank.export() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if not is_draft(name)}


def test_metrics_are_means_over_trained_tokens_whatever_the_loss_divides_by(checkpoint, start_rank):
    found = []
    for options in ({}, {"denominators": "trained"}, {"loss_aggregation": "constant"}):
        metrics = start_rank(make_config(checkpoint, overlong="mask", **options)).train(0, make_groups())
        found.append([metrics[f"actor/{name}"] for name in ("entropy", "kl_behaviour", "ratio_mean")])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
    assert 0.8 * np.log(VOCAB) < found[0][0] < np.log(VOCAB)  # in nats per token


def test_bfloat16_trains_near_float32(checkpoint, start_rank):
    exact = start_rank(make_config(checkpoint)).train(0, make_groups())
    rank = start_rank(make_config(checkpoint, mixed_precision="bfloat16"))
    rough = [rank.train(step, make_groups()) for step in range(3)]
    assert rough[0]["actor/entropy"] == pytest.approx(exact["actor/entropy"], rel=2e-2)
    assert rough[0]["actor/entropy"] != exact["actor/entropy"]
    assert all(t.dtype == torch.float32 for _, t in rank.export())  # master weights


def test_scoring_leaves_no_gathered_weights(checkpoint, start_rank, tmp_path):
    """FSDP2 keeps a gathered copy after a forward pass without a backward one; it must not be exported or reused."""
    rank = start_rank(make_config(checkpoint))
    rank.save(tmp_path / "old")
    rank.train(0, make_groups())
    trained = weights(rank)
    batch = build_batch([Group.from_buffer(data) for data in make_groups(seed=1)])
    of_trained = rank._backend.outputs(batch, 1.0)["logprobs"]
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rank.export())
    rank.load(tmp_path / "old")
    of_old = rank._backend.outputs(batch, 1.0)["logprobs"]
    assert np.array_equal(of_old, start_rank(make_config(checkpoint))._backend.outputs(batch, 1.0)["logprobs"])
    assert not np.array_equal(of_old, of_trained)


def test_a_non_finite_loss_raises_before_the_weights_change(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint))
    before = weights(rank)
    with np.errstate(invalid="ignore"), pytest.raises(NonFiniteError, match=r"train step 7.*loss is nan"):
        rank.train(7, make_groups(rewards=float("inf")))
    assert all(torch.equal(tensor, before[name]) for name, tensor in rank.export())
    assert np.isfinite(rank.train(8, make_groups())["actor/loss"])  # the gradient of the refused step is gone


def test_gradients_are_clipped_by_their_global_norm(checkpoint, start_rank):
    free = first_gradient(start_rank(make_config(checkpoint, grad_clip=0.0)), make_groups())
    clipped = first_gradient(start_rank(make_config(checkpoint, grad_clip=0.01)), make_groups())
    assert free.norm() > 0.01
    assert relative(clipped, free * 0.01 / free.norm()) < 1e-4


@pytest.mark.parametrize(("engine", "same"), [("auto", "bfloat16"), ("float32", "no")])
def test_by_default_the_trainer_computes_as_the_engine_samples(engine, same, start_rank, tmp_path):
    checkpoint = make_checkpoint(tmp_path, torch_dtype="bfloat16")
    batch, found = build_batch([Group.from_buffer(data) for data in make_groups()]), []
    for precision in ("auto", same):
        config = make_config(checkpoint, mixed_precision=precision)
        config.rollout.engine.dtype = engine
        found.append(start_rank(config)._backend.outputs(batch, 1.0)["logprobs"])
    assert np.array_equal(*found)


def test_norms_and_biases_do_not_decay(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, lr=0.1, weight_decay=0.5))
    before = weights(rank)
    rank.train(0, make_groups(rewards=1.0))  # without a gradient
    for name, tensor in rank.export():
        decays = tensor.ndim > 1 and not is_draft(name)
        torch.testing.assert_close(tensor, before[name] * (0.95 if decays else 1.0))


def test_logits_in_float32_bring_a_bfloat16_trainer_nearer_to_exact_ones(checkpoint, start_rank):
    """Nearer to the same rounded weights and hidden states with an exact head."""
    batch, found = build_batch([Group.from_buffer(data) for data in make_groups()]), {}
    for exact in (False, True):
        rank = start_rank(make_config(checkpoint, mixed_precision="bfloat16", float32_head=exact))
        found[exact] = rank._backend.outputs(batch, 1.0)
    hidden, weight = torch.randn(40, 64).bfloat16(), torch.randn(600, 64).bfloat16()
    exact = hidden.double() @ weight.double().t()
    assert (head_logits(hidden, weight, True) - exact).abs().max() < 1e-4
    assert (head_logits(hidden, weight, False) - exact).abs().max() > 1e-2
    differences = np.abs(found[True]["logprobs"] - found[False]["logprobs"])
    assert 1e-5 < differences.mean() < 0.02


def test_float32_logits_have_the_gradient_of_exact_ones():
    hidden, weight = torch.randn(9, 16).bfloat16(), torch.randn(11, 16).bfloat16()
    targets, g, e = torch.randint(0, 11, (9,)), torch.randn(9), torch.randn(9)
    found = []
    for exact in (True, False):
        h, w = ((t.float() if exact else t).clone().requires_grad_() for t in (hidden, weight))
        logprobs, entropy = ChunkedScores.apply(h, w, targets, 0.7, 4, True)
        (logprobs @ g + entropy @ e).backward()
        found.append((logprobs, entropy, h.grad.float(), w.grad.float()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=1e-5)


def test_a_batch_without_a_trained_token_takes_no_step(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint))
    before = weights(rank)
    groups = [
        dataclasses.replace(group, loss_mask=np.zeros_like(group.loss_mask)).to_bytes()
        for group in map(Group.from_buffer, make_groups())
    ]
    metrics = rank.train(0, groups)
    assert metrics["trainer/optimizer_steps"] == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in rank.export())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("epochs", [1, 2])
def test_samples_without_an_advantage_are_not_computed(checkpoint, start_rank, parts, epochs):
    """The step is that of a loss which computes them all: one with a KL of the smallest coefficient."""
    mixed, equal = make_groups(sizes=(4, 4), seed=1), make_groups(sizes=(4, 4), seed=2, rewards=1.0)
    groups = [mixed[0], equal[0], equal[1], mixed[1]]
    found = []
    for options in ({}, {"kl_coef": 1e-30}):
        recorder = Recorder("trainer/0")
        rank = start_rank(make_config(checkpoint, epochs=epochs, **options), recorder)
        for part in range(parts):
            half = len(groups) // parts
            metrics = rank.train(0, groups[part * half : (part + 1) * half], part=part, parts=parts)
        spans = [span for span in recorder.drain().spans if span.name == "trainer/forward_backward"]
        found.append((metrics, weights(rank), sum(span.args["tokens"] for span in spans)))
    (metrics, skipped, computed), (full, every, all_tokens) = found
    assert computed < 0.8 * all_tokens
    assert metrics["actor/grad_norm"] == pytest.approx(full["actor/grad_norm"], rel=1e-5)
    assert metrics["trainer/trained_tokens"] == full["trainer/trained_tokens"]
    for name, tensor in skipped.items():
        torch.testing.assert_close(tensor, every[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rewards", [None, 1.0])
def test_each_sampler_is_measured_whatever_its_samples_teach(checkpoint, start_rank, rewards):
    """One replica gives groups without a difference, or both do."""
    groups = [*make_groups(rewards=rewards), *map(of_replica_1, make_groups(seed=1, rewards=1.0))]
    recorder = Recorder("trainer/0")
    rank = start_rank(make_config(checkpoint), recorder)
    metrics = rank.train(0, groups)
    spans = [span for span in recorder.drain().spans if span.name == "trainer/forward_backward"]
    assert sum(span.args["tokens"] for span in spans) < 0.8 * metrics["trainer/tokens"]
    assert metrics["trainer/optimizer_steps"] == 1
    assert len({found.sampler.replica for found in rank.sampler_kl}) == 2


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_weights_do_not_depend_on_who_sampled_what(checkpoint, start_rank, sizes):
    """A group of equal rewards is computed only where nothing else measures its replica."""
    mixed, equal = make_groups(sizes=(4, 4), seed=1), make_groups(sizes=(4, 4), seed=2, rewards=1.0)
    found = []
    for others in (equal, list(map(of_replica_1, equal))):
        rank = start_rank(make_config(checkpoint, max_tokens_per_micro_batch=50))
        metrics = train_in_parts(rank, 0, [mixed[0], others[0], mixed[1], others[1]], *sizes)
        found.append((len(rank.sampler_kl), metrics["actor/grad_norm"], weights(rank)))
    (one, norm, before), (two, again, after) = found
    assert (one, two) == (1, 2)
    assert norm == again > 0
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def of_replica_1(data):
    return dataclasses.replace(Group.from_buffer(data), replicas=["replica/1"]).to_bytes()


def test_the_kl_to_the_reference_is_taken_from_the_rewards(checkpoint, start_rank, tmp_path):
    make_checkpoint(tmp_path / "other", tie_word_embeddings=True)
    groups, equal = make_groups(rewards=1.0), []
    for options in ({}, {"kl_reward_coef": 0.1}, {"kl_reward_coef": 0.1, "reference_path": str(tmp_path / "other")}):
        metrics = start_rank(make_config(checkpoint, **options)).train(0, groups)
        equal.append(metrics["actor/grad_norm"])
        assert ("actor/kl_reference" in metrics) == bool(options)
    assert equal[0] == 0 < equal[1]  # all samples have the same reward, but not the same KL
    assert equal[2] != pytest.approx(equal[1], rel=1e-3)


def test_metrics_and_spans_describe_the_batch(checkpoint, start_rank):
    recorder = Recorder("trainer/0")
    rank = start_rank(make_config(checkpoint, mini_batch_groups=2, epochs=2), recorder)
    groups = make_groups()
    metrics = rank.train(3, groups)
    rewards = np.concatenate([g.rewards for g in map(Group.from_buffer, groups)])
    lengths = np.concatenate([g.response_lengths for g in map(Group.from_buffer, groups)])
    assert metrics["critic/rewards/mean"] == pytest.approx(rewards.mean())
    assert metrics["critic/rewards/std"] == pytest.approx(rewards.std())
    assert metrics["response_length/mean"] == pytest.approx(lengths.mean())
    assert metrics["response_length/clip_ratio"] == pytest.approx((lengths > 20).mean())
    assert metrics["trainer/groups"] == len(groups)
    assert metrics["trainer/tokens"] == sum(len(g.tokens) + g.prefix.sum() for g in map(Group.from_buffer, groups))
    assert metrics["trainer/optimizer_steps"] == 4
    assert 0 < metrics["actor/ratio_min"] < metrics["actor/ratio_mean"] < metrics["actor/ratio_max"]
    names = [span.name for span in recorder.drain().spans]
    assert {name: names.count(name) for name in names} == {
        "trainer/batch": 2,
        "trainer/logprobs": 1,
        "trainer/forward_backward": 4,
        "trainer/optimizer": 4,
        "trainer/step": 1,
    }


@pytest.mark.skipif(importlib.util.find_spec("megatron") is not None, reason="has the packages")
def test_a_backend_reports_its_missing_packages(checkpoint):
    with pytest.raises(RuntimeError, match=r"megatron-core >=0\.16\.1,<0\.20 is needed, none is installed"):
        TrainerRank(make_config(checkpoint, backend="megatron"), 0, 1, None, Recorder("trainer/0"))


def test_invalid_parts_and_devices_are_reported(checkpoint):
    for config, match in (
        (make_config(checkpoint, advantage="gae"), "algorithm.advantage: expected one of grpo, pass_at_k, rei"),
        (make_config(checkpoint, backend="jax"), "trainer.backend: expected one of megatron, torch, or"),
        (make_config(checkpoint, device="tpu"), "auto, cpu or cuda"),
    ):
        with pytest.raises(ValueError, match=match):
            TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    with pytest.raises(ValueError, match="2 ranks need an init_method"):
        TrainerRank(make_config(checkpoint), 0, 2, None, Recorder("trainer/0"))
