"""Draft training: loss, gradient, isolation from the policy, and checkpoints."""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
import torch.nn.functional as F

from asyncrl.models.checkpoint import is_draft, load_decoder, read_tensors
from asyncrl.models.config import CheckpointError, DecoderConfig
from asyncrl.models.layout import PackedLayout
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.trainer.batches import build_batch, deal, partition
from asyncrl.trainer.draft_loss import draft_targets
from asyncrl.trainer.rank import TrainerRank
from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan
from tests.support.trainer import make_checkpoint, make_config, make_groups, train_in_parts, weights


def gradients(rank, groups):
    """(metrics of one step, gradient by name). AdamW's first moment is then (1 − beta1) times the gradient."""
    metrics = rank.train(0, groups)
    moments = rank._backend.state()["optimizer"]["exp_avg"]
    return metrics, {name: m.full_tensor() * 10 for name, m in moments.items()}


def flat(gradient, of_draft):
    return torch.cat([g.flatten() for name, g in gradient.items() if is_draft(name) == of_draft])


def test_each_depth_learns_the_trained_tokens_that_it_can_predict():
    groups = [Group.from_buffer(data) for data in make_groups()]
    batch = build_batch(groups)
    for depth in (1, 2, 3):
        positions, tokens = draft_targets(batch, depth)
        expected, start = [], 0
        for group in groups:
            for s in range(len(group)):
                rows, prompt = group.response(s), len(group.prompt_tokens)
                trained = np.flatnonzero(group.loss_mask[rows])
                # the first two tokens of a sequence cannot be drafted at depth 1, the first three at depth 2 …
                drafted = [prompt + r for r in trained if prompt + r > depth]
                expected += [(start + position - 2, group.tokens[rows][position - prompt]) for position in drafted]
                start += prompt + rows.stop - rows.start
        assert list(zip(positions.tolist(), tokens.tolist(), strict=True)) == expected
        assert (batch.tokens[positions + 2] == tokens).all()


@pytest.mark.parametrize("loss", ["acceptance", "cross_entropy"])
@pytest.mark.parametrize("detach", [True, False])
def test_loss_and_gradient_equal_the_formula(checkpoint, start_rank, detach, loss):
    """Equal rewards give no advantage, so the whole gradient is the draft's. One layer, repeated for depth 2."""
    config = make_config(
        checkpoint,
        grad_clip=0.0,
        temperature=0.7,
        loss_aggregation="sequence_mean",
        max_tokens_per_micro_batch=50,
        enable_train=True,
        num_speculative_tokens=2,
        loss_scaling_factor=0.4,
        detach_encoder=detach,
        updates_per_pass=1,
    )
    config.mtp.loss = loss
    groups = make_groups(rewards=1.0)
    metrics, found = gradients(start_rank(config), groups)

    model = load_decoder(checkpoint)
    losses, hits, counts = [torch.zeros(()), torch.zeros(())], [0, 0], [0, 0]
    for group in map(Group.from_buffer, groups):
        for s in range(len(group)):
            prompt = torch.tensor(group.prompt_tokens).long()
            tokens = torch.cat([prompt, torch.tensor(group.tokens[group.response(s)]).long()])
            trained = torch.cat([torch.zeros(len(prompt)).bool(), torch.tensor(group.loss_mask[group.response(s)])])
            layout = PackedLayout.from_lengths(np.array([len(tokens)]))
            hidden = model.hidden_states(tokens, layout)
            states = model.draft_states(hidden, tokens, layout, 2, detach)
            policy = torch.softmax(hidden.detach() @ model.lm_head.weight.detach().T / 0.7, -1)
            head = model.lm_head.weight.detach() if detach else model.lm_head.weight
            for depth, state in enumerate(states, 1):
                drafted = depth + 1 + trained[depth + 1 :].nonzero().squeeze(1)
                logits, targets = state[drafted - 2] @ head.T / 0.7, tokens[drafted]
                if loss == "cross_entropy":
                    added = F.cross_entropy(logits, targets, reduction="sum")
                else:
                    added = -torch.minimum(policy[drafted - 1], torch.softmax(logits, -1)).sum(-1).log().sum()
                losses[depth - 1] = losses[depth - 1] + added
                hits[depth - 1] += int((logits.argmax(1) == targets).sum())
                counts[depth - 1] += len(targets)
    for depth, (total, hit, count) in enumerate(zip(losses, hits, counts, strict=True), 1):
        assert metrics[f"mtp/loss_{depth}"] == pytest.approx(total.item() / count, rel=1e-5)
        assert metrics[f"mtp/accuracy_{depth}"] == pytest.approx(hit / count)
    (0.4 / 2 * (losses[0] / counts[0] + losses[1] / counts[1])).backward()
    expected = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    for of_draft in (True, False):
        a, b = flat(found, of_draft), flat(expected, of_draft)
        assert (a - b).norm() <= 1e-5 * b.norm()
        assert bool(b.any()) == (of_draft or not detach)
    assert metrics["mtp/grad_norm"] == pytest.approx(flat(expected, True).norm().item(), rel=1e-4)


@pytest.mark.parametrize("detach", [True, False])
def test_neither_micro_batches_nor_chunks_nor_checkpointing_change_the_drafts_gradient(checkpoint, start_rank, detach):
    options = {"grad_clip": 0.0, "enable_train": True, "num_speculative_tokens": 2, "detach_encoder": detach}
    options["updates_per_pass"] = 1
    _, whole = gradients(start_rank(make_config(checkpoint, **options)), make_groups())
    for other in ({"max_tokens_per_micro_batch": 1}, {"logprob_chunk_tokens": 7}, {"activation_checkpointing": True}):
        _, found = gradients(start_rank(make_config(checkpoint, **options, **other)), make_groups())
        for of_draft in (True, False):
            a, b = flat(found, of_draft), flat(whole, of_draft)
            assert (a - b).norm() <= 1e-6 * b.norm(), other


def test_a_detached_draft_leaves_the_policys_update_bit_identical(checkpoint, start_rank):
    """With several optimizer steps per batch, a reference and clipped gradients: all that the draft could disturb."""
    runs = []
    options = {"grad_clip": 0.05, "kl_coef": 0.1, "mini_batch_groups": 2, "weight_decay": 0.1}
    for mtp in (False, True):
        config = make_config(checkpoint, **options, enable_train=mtp, num_speculative_tokens=2)
        rank = start_rank(config)
        before = weights(rank)
        metrics = [rank.train(step, make_groups(seed=step)) for step in range(3)]
        runs.append((metrics, before, weights(rank)))
    (plain, _, without), (drafted, before, trained) = runs
    assert all(torch.equal(tensor, trained[name]) for name, tensor in without.items() if not is_draft(name))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in trained.items())
    for mine, theirs in zip(plain, drafted, strict=True):
        more = {f"mtp/{name}" for name in ("loss_1", "loss_2", "accuracy_1", "accuracy_2", "grad_norm")}
        assert theirs == mine | {name: theirs[name] for name in more}
        assert theirs["actor/grad_norm"] > 0.05
        assert theirs["mtp/grad_norm"] > 0.05


def test_the_draft_takes_the_configured_updates_each_on_its_share_and_the_checkpoint_counts_them(
    checkpoint, start_rank, tmp_path
):
    """Compared with the same updates as separate batches: without advantages the policy does not change in between."""
    groups = make_groups((4, 4, 4), rewards=1.0)
    options = {"enable_train": True, "grad_clip": 0.01, "weight_decay": 0.0, "max_tokens_per_micro_batch": 60}
    rank = start_rank(make_config(checkpoint, **options, updates_per_pass=3))
    before = weights(rank)
    metrics = rank.train(0, groups)
    shared = weights(rank)
    assert not any(torch.equal(shared[name], before[name]) for name in before if is_draft(name))
    assert all(torch.equal(shared[name], before[name]) for name in before if not is_draft(name))
    rank.save(tmp_path / "state")
    straight = rank.train(1, groups), weights(rank)
    again = start_rank(make_config(checkpoint, **options, updates_per_pass=3))
    again.load(tmp_path / "state")
    assert again.train(1, groups) == straight[0]
    assert all(torch.equal(tensor, straight[1][name]) for name, tensor in weights(again).items())

    batch = build_batch([Group.from_buffer(data) for data in groups])
    samples = [(group, s) for group in map(Group.from_buffer, groups) for s in range(len(group))]
    one = start_rank(make_config(checkpoint, **options, updates_per_pass=1))
    norms = []
    for number, share in enumerate(partition(batch.lengths, 3)):
        norms.append(one.train(number, [alone(*samples[b]) for b in share])["mtp/grad_norm"])
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, shared[name], atol=2e-5, rtol=0)
    assert metrics["mtp/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)


def test_a_second_pass_repeats_the_updates_and_does_not_affect_the_metrics(checkpoint, start_rank):
    groups, options = make_groups(rewards=1.0), {"enable_train": True, "weight_decay": 0.0, "updates_per_pass": 4}
    rank = start_rank(make_config(checkpoint, **options))
    first, _ = rank.train(0, groups), rank.train(1, groups)
    twice = weights(rank)
    rank = start_rank(make_config(checkpoint, **options, passes=2))
    metrics = rank.train(0, groups)
    assert all(torch.equal(tensor, twice[name]) for name, tensor in weights(rank).items())
    assert {name: metrics[name] for name in ("mtp/loss_1", "mtp/accuracy_1")} == {
        name: first[name] for name in ("mtp/loss_1", "mtp/accuracy_1")
    }


def test_updates_without_a_token_are_skipped(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, enable_train=True, updates_per_pass=7))
    metrics = rank.train(0, make_groups((2, 1)))
    taught = sum(
        bool(len(draft_targets(build_batch([Group.from_buffer(alone(group, s))]), 1)[0]))
        for group in map(Group.from_buffer, make_groups((2, 1)))
        for s in range(len(group))
    )
    assert int(rank._backend.state()["draft_steps"]) == taught
    assert 0 < taught <= 3
    assert metrics["trainer/optimizer_steps"] == 1


def test_the_draft_has_its_own_learning_rate_on_the_policy_s_schedule(checkpoint, start_rank):
    moved = []
    for rate in (0.0, 1e-3, 1e-2):
        options = {"schedule": "linear", "min_lr_ratio": 0.0, "total_steps": 2, "weight_decay": 0.0}
        config = make_config(checkpoint, enable_train=True, learning_rate=rate, updates_per_pass=1, **options)
        rank = start_rank(config)
        before = weights(rank)
        rank.train(0, make_groups())
        after = weights(rank)
        rank.train(1, make_groups())
        moved.append([step(a, b) for a, b in ((before, after), (after, weights(rank)))])
    # AdamW's first step changes every weight that has a gradient by the learning rate
    assert moved[0] == moved[1]
    assert moved[2][0] == pytest.approx([1e-3, 1e-2], rel=1e-2)
    assert moved[2][1] < [5.1e-4, 5.1e-3]


def step(before, after):
    """(largest change of a policy weight, of a draft weight)"""
    return [max(float((after[n] - before[n]).abs().max()) for n in before if is_draft(n) == d) for d in (False, True)]


def alone(group, s):
    rows = group.response(s)
    sample = Sample.single(
        index=0,
        tokens=group.tokens[rows],
        logprobs=group.logprobs[rows],
        loss_mask=group.loss_mask[rows],
        spans=[VersionSpan(0, PolicyVersion(0, 0))],
        finish=FinishReason.LENGTH,
        reward=1.0,
    )
    return Group.from_samples(group.uid, group.prompt_id, 0, group.prompt_tokens, [sample]).to_bytes()


def test_the_draft_learns(checkpoint, start_rank):
    rank = start_rank(make_config(checkpoint, enable_train=True, lr=0.0, learning_rate=3e-3))
    losses = [rank.train(step, make_groups())["mtp/loss_1"] for step in range(8)]
    assert losses[-1] < losses[0] - 0.3


def train_on_two_ranks(rank, config, folder):
    torch.set_num_threads(1)
    trainer = TrainerRank(config, rank, 2, f"file://{folder}/rendezvous", Recorder(f"trainer/{rank}"))
    found = gradients(trainer, make_groups((4, 3, 1)))
    trainer.save(folder / "of_two")
    trainer.load(folder / "of_one")
    again = train_in_parts(trainer, 1, make_groups((4, 3, 1), seed=1), 1, 1, 1)  # the last leaves one rank none
    trainer.close()
    config.mtp.updates_per_pass = 3 if config.mtp.detach_encoder else 1
    trainer = TrainerRank(config, rank, 2, f"file://{folder}/rendezvous2", Recorder(f"trainer/{rank}"))
    trainer.train(0, make_groups((4, 3, 1), rewards=1.0))
    updated = weights(trainer)
    trainer.close()
    torch.save((found, again, updated), folder / f"rank{rank}.pt")


@pytest.mark.parametrize("detach", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_ranks_train_the_draft_like_one_and_load_each_others_state(checkpoint, start_rank, tmp_path, detach):
    """Micro-batches of one sequence each, in unequal numbers on the ranks; one layer serves two depths."""
    config = make_config(
        checkpoint,
        grad_clip=0.0,
        max_tokens_per_micro_batch=40,
        activation_checkpointing=True,
        enable_train=True,
        num_speculative_tokens=2,
        detach_encoder=detach,
        updates_per_pass=1,
        weight_decay=0.0,
    )
    config.trainer.ranks = 2
    one = start_rank(config)
    metrics, gradient = gradients(one, make_groups((4, 3, 1)))
    one.save(tmp_path / "of_one")
    second = one.train(1, make_groups((4, 3, 1), seed=1))

    mp.spawn(train_on_two_ranks, args=(config, tmp_path), nprocs=2)
    two = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)]
    assert two[0][0][0] == two[1][0][0]
    assert two[0][0][0] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    for name, expected in gradient.items():
        torch.testing.assert_close(two[0][0][1][name], expected, rtol=0, atol=1e-5)
    assert two[0][1] == pytest.approx(second, rel=1e-4, abs=1e-5)  # continued from one rank's checkpoint

    again = start_rank(config)
    again.load(tmp_path / "of_two")
    assert again.train(1, make_groups((4, 3, 1), seed=1)) == pytest.approx(second, rel=1e-4, abs=1e-5)

    # each update of the two ranks equals one of a single rank over both ranks' shares
    groups = make_groups((4, 3, 1), rewards=1.0)
    batch = build_batch([Group.from_buffer(data) for data in groups])
    lengths, halves = batch.lengths, deal(batch, np.arange(len(batch)), 2, prompts_once=detach)
    if detach:
        shares = [[half[part] for part in partition(lengths[half], 3)] for half in halves]
        updates = [np.concatenate(parts) for parts in zip(*shares, strict=True)]
    else:
        updates = [np.concatenate(halves)]
    samples = [(group, s) for group in map(Group.from_buffer, groups) for s in range(len(group))]
    one = start_rank(config)
    for number, update in enumerate(updates):
        one.train(number, [alone(*samples[b]) for b in update])
    for name, expected in weights(one).items():
        torch.testing.assert_close(two[0][2][name], expected, rtol=0, atol=2e-5)


def test_a_restored_run_continues_bit_for_bit_and_refuses_other_draft_options(checkpoint, start_rank, tmp_path):
    config = make_config(checkpoint, enable_train=True, schedule="cosine", total_steps=3)
    rank = start_rank(config)
    rank.train(0, make_groups())
    rank.save(tmp_path / "trained")
    straight = rank.train(1, make_groups(seed=1)), weights(rank)
    rank = start_rank(config)
    rank.load(tmp_path / "trained")
    resumed = rank.train(1, make_groups(seed=1)), weights(rank)
    assert straight[0] == resumed[0]
    assert all(torch.equal(tensor, resumed[1][name]) for name, tensor in straight[1].items())

    frozen = start_rank(make_config(checkpoint))
    with pytest.raises(CheckpointError, match=r"was saved with mtp\.enable_train=true, found false.*resume with") as e:
        frozen.load(tmp_path / "trained")
    assert "\n" not in str(e.value)
    frozen.save(tmp_path / "frozen")
    with pytest.raises(CheckpointError, match=r"was saved with mtp\.enable_train=false, found true.*is missing"):
        start_rank(config).load(tmp_path / "frozen")
    plain = start_rank(make_config(make_checkpoint(tmp_path / "plain", num_nextn_predict_layers=0)))
    with pytest.raises(CheckpointError, match="was saved with MTP layers, the model to load it into has none"):
        plain.load(tmp_path / "frozen")


@pytest.mark.parametrize("precision", ["no", "bfloat16"])
def test_the_trained_draft_is_sent_and_exported(checkpoint, start_rank, tmp_path, precision):
    rank = start_rank(make_config(checkpoint, enable_train=True, mixed_precision=precision))
    before = weights(rank)
    rank.train(0, make_groups())
    sent = weights(rank)
    assert list(sent) == [t.name for t in rank.manifest().sent()]
    state = rank._backend.state()["model"]
    for name in filter(is_draft, sent):
        assert torch.equal(sent[name], state[name].full_tensor())
        assert not torch.equal(sent[name], before[name])
    rank.export_hf(tmp_path / "hf")
    assert all(torch.equal(tensor, sent[name]) for name, tensor in read_tensors(tmp_path / "hf").items())


def test_without_reload_the_initial_draft_is_sent(checkpoint, start_rank):
    config = make_config(checkpoint, enable_train=True)
    config.param_sync.reload_draft = False
    rank = start_rank(config)
    before = {name: tensor.clone() for name, tensor in rank.export()}
    rank.train(0, make_groups())
    after = dict(rank.export())
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved
    assert not any(is_draft(name) for name in moved)
    trained = {name: p.full_tensor() for name, p in rank._backend.state()["model"].items() if is_draft(name)}
    assert any(not torch.equal(tensor, after[name]) for name, tensor in trained.items())


def test_a_draft_made_from_the_trunk_is_trained_saved_and_exported(start_rank, tmp_path):
    plain = make_checkpoint(tmp_path / "plain", architectures=["Qwen2ForCausalLM"], num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"plain has no MTP layers.*mtp\.init_from_trunk=true"):
        TrainerRank(make_config(plain, enable_train=True), 0, 1, None, Recorder("trainer/0"))
    config = make_config(plain, enable_train=True, init_from_trunk=True)
    rank = start_rank(config)
    assert {t.role for t in rank.manifest()} == {"target", "draft"}
    rank.train(0, make_groups())
    rank.save(tmp_path / "state")
    rank.export_hf(tmp_path / "hf")
    trained = weights(rank)
    written = DecoderConfig.load(tmp_path / "hf")
    assert (written.architecture, written.num_mtp_layers) == ("MiMoForCausalLM", 1)
    assert all(torch.equal(p, trained[name]) for name, p in load_decoder(tmp_path / "hf").named_parameters())
    rank = start_rank(config)
    rank.load(tmp_path / "state")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in rank.export())
