"""Live parameters are compared with the sent tensors by fingerprints."""

from __future__ import annotations

import pytest
import torch

from asyncrl.param_sync.fingerprints import FingerprintCheck, fingerprint

FEEDS = {
    "qkv.weight": ["q.weight", "k.weight"],
    "qkv.bias": ["q.bias", "k.bias"],
    "embed.weight": ["embed.weight"],
    "quantised.weight": ["quantised.weight"],
    "elsewhere.weight": ["elsewhere.weight"],
    "emptied.weight": ["emptied.weight"],
}


def tensors(seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q.weight": (6, 8), "k.weight": (2, 8), "q.bias": (6,), "k.bias": (2,), "embed.weight": (5, 7)}
    shapes |= {"quantised.weight": (4, 8), "emptied.weight": (3, 8)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def loaded(sent):
    """Parameters as an engine keeps them: packed, padded, quantised, or in another form."""
    return {
        "qkv.weight": torch.cat([sent["q.weight"], sent["k.weight"]]),
        "qkv.bias": torch.cat([sent["q.bias"], sent["k.bias"]]),
        "embed.weight": torch.cat([sent["embed.weight"], torch.zeros_like(sent["embed.weight"][:3])]),
        "quantised.weight": (16 * sent["quantised.weight"]).to(torch.int8),
        "emptied.weight": torch.empty(0),
    }


def prints(sent):
    return {name: fingerprint(tensor) for name, tensor in sent.items()}


def test_fingerprints_of_long_rows_cover_both_ends():
    long = torch.randn(3, 4000, generator=torch.Generator().manual_seed(3))
    for column in (0, -1):
        other = long.clone()
        other[1, column] += 1
        assert not torch.equal(fingerprint(other), fingerprint(long))
    parts = fingerprint(long[:1]) + fingerprint(long[1:])
    assert torch.equal(parts, fingerprint(long))


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def checked(request):
    """A check that has seen one update, and the tensors of this update and of the next."""
    check, first, second = FingerprintCheck(), tensors(1, request.param), tensors(2, request.param)
    assert check.verdict(FEEDS, prints(first), loaded(first)) == ([], None)
    return check, first, second


def test_updates_that_arrive_are_right(checked):
    check, first, second = checked
    for sent in (second, second, first):
        assert not check.verdict(FEEDS, prints(sent), loaded(sent)).wrong
        assert not check.verdict(FEEDS, prints(sent), loaded(sent)).stale


@pytest.mark.parametrize("part", ["q.weight", "k.weight", "k.bias", "embed.weight"])
def test_a_tensor_that_was_not_loaded_is_detected(checked, part):
    check, first, second = checked
    live = loaded(second | {part: first[part]})
    assert check.verdict(FEEDS, prints(second), live).wrong == [next(o for o, names in FEEDS.items() if part in names)]


def test_swapped_columns_are_detected(checked):
    check, _, second = checked
    live = loaded(second)
    live["embed.weight"] = live["embed.weight"].roll(1, dims=1)
    assert check.verdict(FEEDS, prints(second), live).wrong == ["embed.weight"]


def test_a_transformed_parameter_must_change_when_its_tensors_do(checked):
    check, first, second = checked
    live = loaded(second) | {"quantised.weight": loaded(first)["quantised.weight"]}
    assert check.verdict(FEEDS, prints(second), live) == ([], True)
    again = second | {"quantised.weight": second["quantised.weight"].clone()}
    assert check.verdict(FEEDS, prints(again), live) == ([], None)  # the same tensors were sent again


def test_parameters_that_were_not_sent_are_not_compared(checked):
    check, first, second = checked
    sent = {name: print_ for name, print_ in prints(second).items() if "embed" not in name}
    live = loaded(second) | {"embed.weight": loaded(first)["embed.weight"]}
    assert not check.verdict(FEEDS, sent, live).wrong


def test_zeros_prove_nothing(checked):
    check = FingerprintCheck()
    zeros = {"a": torch.zeros(4, 4)}
    feeds = {"negated": ["a"]}
    assert check.verdict(feeds, prints(zeros), {"negated": torch.zeros(4, 4)}) == ([], None)
    ones = {"a": torch.ones(4, 4)}
    assert check.verdict(feeds, prints(ones), {"negated": -torch.ones(4, 4)}) == ([], False)


def test_a_fingerprint_does_not_depend_on_the_tensor_s_layout():
    tensor = torch.randn(3, 8)
    storage = torch.zeros(25)
    storage[1:] = tensor.reshape(-1)
    for same in (storage[1:].view(3, 8), tensor.t().contiguous().t()):
        assert torch.equal(fingerprint(same), fingerprint(tensor))
    assert not torch.equal(fingerprint(tensor.flip(1)), fingerprint(tensor))
