"""Kernels of the trainer, in Triton's interpreter, compute what the eager code computes.

The interpreter cuts bfloat16 off where a GPU rounds it, so bfloat16 is near the eager code's here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm  # an environment that has Triton

SETUP = """
import math, torch
from asyncrl.models import chunked, head_kernels
torch.manual_seed(0)
V = 2 * head_kernels._BLOCK + 301

def close(found, expected, tolerance):
    error = (found.double() - expected.double()).abs().max().item() / max(expected.abs().max().item(), 1.0)
    assert error < tolerance, error
"""

FORMULA = """
KINDS = {"flat": (0.1, 0.0), "usual": (3.0, 0.0), "sure": (1000.0, 0.0), "large": (3.0, 1e4), "small": (3.0, -1e4)}
for temperature in (1.0, 0.7):
    for kind, (width, shift) in KINDS.items():
        logits = torch.randn(4, V) * width + shift
        targets = torch.tensor([0, V - 1, 5000, int(logits[3].argmax())])
        g, e = torch.randn(4), torch.randn(4)
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
            exact = logits.to(dtype).double().requires_grad_()
            logp = torch.log_softmax(exact / temperature, -1)
            logprobs, entropy = logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
            (logprobs @ g.double() + entropy @ e.double()).backward()
            of, into = logits.to(dtype), torch.empty(4, 4).unbind()
            head_kernels.scores(of, targets, temperature, into)
            close(into[0], logprobs, 1e-6)
            close(into[1], entropy, 1e-6)
            out = head_kernels.gradient(of, targets, into[1:], g, e, temperature, of)  # in place
            assert out is of
            close(out, exact.grad, tolerance)
"""

FUNCTIONS = """
def run(function, dtype, *options):
    h, w = (x.to(dtype, copy=True).requires_grad_() for x in (hidden, weight))
    one, other = function.apply(h, w, targets, *options)
    (one @ g + other @ e if function is chunked.ChunkedScores else 3 * one).backward()
    return one, other, h.grad, w.grad

def run_target(dtype):
    logits = (hidden @ weight.t()).to(dtype, copy=True).requires_grad_()
    given = logits if chunked.fuses(logits) else logits.float()
    one, other = chunked.TargetScores.apply(given, targets, 0.7)
    (one @ g).backward()
    return one, other, logits.grad

R, M = 9, 16
hidden, weight, targets = torch.randn(R, M), torch.randn(V, M), torch.randint(0, V, (R,))
targets[:2] = (hidden @ weight.t()).argmax(1)[:2]
g, e = torch.randn(R), torch.randn(R)
eager, fused = chunked.fuses, lambda x: True
for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
    for temperature in (1.0, 0.7):
        for function in (chunked.ChunkedScores, chunked.ChunkedCrossEntropy):
            for float32 in (False, True):
                results = []
                for chunked.fuses in (eager, fused):
                    results.append(run(function, dtype, temperature, 1, float32))
                for expected, found in zip(*results):
                    assert found.dtype is expected.dtype
                    close(found, expected, tolerance)
    results = []
    for chunked.fuses in (eager, fused):
        results.append(run_target(dtype))
    for expected, found in zip(*results):
        assert found.dtype is expected.dtype
        close(found, expected, tolerance)
"""

LAYERS = """
from asyncrl.models import decoder, kernels

kernels._check(torch.device("cpu"))  # raises nothing

def run(function, inputs, gradient):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(gradient.to(out.dtype))
    return [out, *(x.grad for x in leaves)]

eager, fused = decoder.fuses, lambda x: True
T = 7
for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
    for heads, kv_heads, dim in ((3, 1, 24), (4, 2, 64)):
        rope = torch.randn(T, 1, dim), torch.randn(T, 1, dim)
        qkv = [torch.randn(T, n, dim).to(dtype) for n in (heads, kv_heads, kv_heads)]
        gate_up = [4 * torch.randn(T, 601).to(dtype) for _ in range(2)]
        gate_up[0][0, :2] = torch.tensor([-200.0, 200.0])
        for inputs, function in ((qkv, lambda *x: decoder.rotated_heads(*x, rope)), (gate_up, decoder.gated)):
            gradient, results = torch.randn(function(*inputs).shape), []
            for decoder.fuses in (eager, fused):
                results.append(run(function, inputs, gradient))
            for expected, found in zip(*results):
                assert found.dtype is expected.dtype and found.shape == expected.shape
                close(found, expected, tolerance)
"""

BAD = """
logits = torch.randn(3, V)
logits[0, 7] = float("nan")
into = torch.empty(4, 3).unbind()
head_kernels.scores(logits, torch.tensor([3, V, -1]), 1.0, into)
assert into[0].isnan().all() and into[1].isnan().tolist() == [True, False, False]
"""

LOW = """
low = torch.randn(4, V)
low[0, : head_kernels._BLOCK] = -math.inf  # a whole block
low[1, [0, 7, V - 1]] = -math.inf
low[2, : head_kernels._BLOCK + 9] = torch.finfo(torch.float32).min
low[3] = torch.finfo(torch.float32).min
targets, g, e = torch.tensor([V - 1, 7, V - 2, 5]), torch.randn(4), torch.randn(4)
for temperature in (1.0, 0.7):
    exact = low.double() / temperature
    logp = torch.log_softmax(exact, -1)
    p, finite = logp.exp(), logp.clamp(min=-1e6)
    entropy = -(p * finite).sum(-1)
    expected = -p * (g[:, None] + e[:, None] * (finite + entropy[:, None]))
    expected[torch.arange(4), targets] += g
    into = torch.empty(4, 4).unbind()
    head_kernels.scores(low, targets, temperature, into)
    eager = torch.log_softmax(low / temperature if temperature != 1 else low, -1)[torch.arange(3), targets[:3]]
    assert into[0].tolist()[1] == eager[1] == -math.inf
    for row in (0, 2, 3):
        close(into[0][row], logp[row, targets[row]], 1e-6)
    for row in (0, 2):
        close(into[0][row], eager[row], 1e-6)
    close(into[1], entropy, 1e-6)
    found = head_kernels.gradient(low, targets, into[1:], g, e, temperature, torch.empty_like(low))
    close(found, expected / temperature, 1e-6)

head_kernels.scores(torch.full((1, V), -math.inf), targets[:1], 1.0, [x[:1] for x in into])
assert into[0][0].isnan()
"""

STRIDED = """
logits, into = torch.randn(3, V), torch.empty(4, 3).unbind()
try:
    head_kernels.scores(logits, torch.tensor([[1, 2], [3, 4], [5, 6]])[:, 0], 1.0, into)
except AssertionError:
    pass
else:
    raise SystemExit("targets with a stride are read as if they had none")
hidden, weight = torch.randn(3, 8), torch.randn(V, 8)
targets = torch.tensor([[1, 2], [3, 4], [5, 6]])[:, 0]
chunked.fuses = lambda x: True
for function, inputs in (
    (chunked.ChunkedScores, (hidden, weight, targets, 1.0, 1)),
    (chunked.ChunkedCrossEntropy, (hidden, weight, targets, 1.0, 1)),
    (chunked.TargetScores, (logits, targets, 1.0)),
):
    dense = [x.contiguous() if x is targets else x for x in inputs]
    assert torch.equal(function.apply(*inputs)[0], function.apply(*dense)[0])
"""


def interpret(program):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", SETUP + program], env=environment, cwd=root, check=True)


def test_scores_and_gradients_are_those_of_the_formula():
    interpret(FORMULA)


def test_chunked_functions_give_the_same_on_either_path():
    interpret(FUNCTIONS)


def test_layers_have_the_same_outputs_and_gradients_on_either_path():
    interpret(LAYERS)


def test_logits_without_probability_leave_scores_and_gradients_finite():
    interpret(LOW)


def test_targets_may_have_a_stride_in_the_functions_but_not_in_the_kernels():
    interpret(STRIDED)


def test_a_nan_and_a_target_outside_the_vocabulary_give_a_nan():
    interpret(BAD)
