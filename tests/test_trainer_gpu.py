"""The torch trainer on a GPU: a train step equals that on a CPU."""

import pytest
import torch

from asyncrl.models.checkpoint import read_tensors
from tests.support.trainer import (
    first_gradient,
    make_checkpoint,
    make_config,
    make_groups,
    relative,
    weights,
)

pytestmark = pytest.mark.gpu

OPTIONS = {
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "max_tokens_per_micro_batch": 60,
    "logprob_chunk_tokens": 16,
    "enable_train": True,  # of the draft
    "num_speculative_tokens": 2,
}


def _trained(rank, steps=2):
    """Metrics of the steps; the second's depend on the first's update."""
    return [rank.train(step, make_groups(seed=step)) for step in range(steps)]


def _gradient(start_rank, checkpoint, device, **options):
    """The unclipped gradient in float32, on the host."""
    config = make_config(checkpoint, grad_clip=0.0, device=device, **OPTIONS | options)
    return first_gradient(start_rank(config), make_groups()).cpu()


def test_a_train_step_equals_that_on_the_cpu(checkpoint, start_rank, device):
    on_device, on_cpu = (_gradient(start_rank, checkpoint, where) for where in (device, "cpu"))
    assert relative(on_device, on_cpu) < 1e-5
    config = {"epochs": 2, "mini_batch_groups": 2, "grad_clip": 0.5, **OPTIONS}
    results = [_trained(start_rank(make_config(checkpoint, device=where, **config))) for where in (device, "cpu")]
    for on_device, on_cpu in zip(*results, strict=True):
        assert on_device == pytest.approx(on_cpu, rel=1e-3, abs=1e-4)
        assert on_device["actor/loss"] == pytest.approx(on_cpu["actor/loss"], abs=1e-5)


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_a_large_vocabulary_has_the_gradient_of_the_cpu(start_rank, device, tmp_path, implementation):
    """A row of logits takes several blocks of a kernel, the last of them in part, and the rows several passes."""
    options = {"implementation": implementation, "entropy_coef": 0.1, "temperature": 0.7, "logprob_chunk_tokens": 2}
    kind = {"architectures": ["Qwen2ForCausalLM"], "num_nextn_predict_layers": 0}
    if implementation == "native":  # the head also learns from a draft's cross-entropy
        options |= {"enable_train": True, "loss": "cross_entropy", "detach_encoder": False}
        kind = {}
    checkpoint = make_checkpoint(tmp_path, vocab_size=9001, **kind)
    gradients = [
        first_gradient(start_rank(make_config(checkpoint, grad_clip=0.0, device=where, **options)), make_groups()).cpu()
        for where in (device, "cpu")
    ]
    assert relative(*gradients) < 1e-5


def test_cpu_offload_changes_only_the_location_of_the_state(checkpoint, start_rank, device, tmp_path):
    runs = {}
    for offload in (False, True):
        rank = start_rank(make_config(checkpoint, device=device, cpu_offload=offload, **OPTIONS))
        held = {tensor.device.type for tensor in rank._backend.state()["model"].values()}
        assert held == {"cpu" if offload else device}
        runs[offload] = _trained(rank), {name: t.cpu() for name, t in weights(rank).items()}
    rank.save(tmp_path / "offloaded")
    for plain, offloaded in zip(runs[False][0], runs[True][0], strict=True):
        assert offloaded == pytest.approx(plain, rel=1e-4, abs=1e-5)
    for name, tensor in runs[False][1].items():
        torch.testing.assert_close(runs[True][1][name], tensor, rtol=0, atol=1e-4)
    onto_the_device = start_rank(make_config(checkpoint, device=device, **OPTIONS))
    onto_the_device.load(tmp_path / "offloaded")
    assert all(torch.equal(runs[True][1][name], t.cpu()) for name, t in weights(onto_the_device).items())


def test_activation_checkpointing_changes_no_gradient(checkpoint, start_rank, device):
    plain = _gradient(start_rank, checkpoint, device)
    assert relative(_gradient(start_rank, checkpoint, device, activation_checkpointing=True), plain) < 1e-6


def test_bfloat16_is_near_float32(checkpoint, start_rank, device):
    exact, rounded = (
        start_rank(make_config(checkpoint, device=device, mixed_precision=precision, **OPTIONS)).train(0, make_groups())
        for precision in ("no", "bfloat16")
    )
    assert rounded["actor/loss"] == pytest.approx(exact["actor/loss"], abs=0.005)
    assert rounded["actor/grad_norm"] == pytest.approx(exact["actor/grad_norm"], rel=0.05)
    assert rounded["mtp/loss_1"] == pytest.approx(exact["mtp/loss_1"], rel=0.01)
    assert rounded["actor/entropy"] != exact["actor/entropy"]  # the precision really differs
    gradients = [
        _gradient(start_rank, checkpoint, device, mixed_precision=precision) for precision in ("no", "bfloat16")
    ]
    assert relative(gradients[1], gradients[0]) < 0.05


def test_a_restored_run_continues_as_if_uninterrupted(checkpoint, start_rank, device, tmp_path):
    config = make_config(checkpoint, device=device, schedule="cosine", total_steps=6, **OPTIONS)
    rank = start_rank(config)
    rank.train(0, make_groups(seed=0))
    rank.save(tmp_path / "state")
    saved = {name: tensor.cpu() for name, tensor in weights(rank).items()}
    drawn, straight = torch.rand(3, device=device).tolist(), rank.train(1, make_groups(seed=1))

    rank = start_rank(config)
    rank.load(tmp_path / "state")
    assert all(torch.equal(saved[name], tensor.cpu()) for name, tensor in weights(rank).items())
    assert torch.rand(3, device=device).tolist() == drawn
    assert rank.train(1, make_groups(seed=1)) == pytest.approx(straight, rel=1e-5, abs=1e-6)


def test_scores_return_to_the_host_and_the_export_is_a_checkpoint(checkpoint, start_rank, device, tmp_path):
    rank = start_rank(make_config(checkpoint, device=device))
    rank.export_hf(tmp_path)
    assert all(torch.equal(tensor, read_tensors(checkpoint)[name]) for name, tensor in read_tensors(tmp_path).items())
    assert {tensor.device.type for _, tensor in rank.export()} == {device}
