"""Groups: columns, one buffer, no copies."""

import numpy as np
import pytest

from asyncrl.types.groups import Group
from asyncrl.types.samples import FinishReason, Sample
from asyncrl.types.versions import PolicyVersion, VersionSpan


def sample(index=0, length=5, versions=((0, 0),), **kw) -> Sample:
    return Sample.single(
        index=index,
        tokens=np.arange(length, dtype=np.int32),
        logprobs=-np.ones(length, dtype=np.float32),
        loss_mask=kw.pop("loss_mask", np.ones(length, dtype=bool)),
        spans=[VersionSpan(start, PolicyVersion(0, v)) for start, v in versions],
        finish=FinishReason.STOP,
        reward=kw.pop("reward", 0.0),
        **kw,
    )


def group(*samples) -> Group:
    return Group.from_samples(
        "e0-1", "row 1", 0, np.array([7, 8, 9]), samples or [sample(0), sample(1, 2)], {"issued_s": 1}
    )


def test_a_group_round_trips_through_its_buffer_without_a_copy():
    extras = {"experts": np.arange(6, dtype=np.int16).reshape(3, 2)}
    before = group(
        sample(0, 4, ((0, 3), (2, 4)), reward=1.0, metrics={"ok": 1.0}, extras=extras), sample(2, 1, extras=extras)
    )
    data = before.to_bytes()
    after = Group.from_buffer(data)
    for name in Group._COLUMNS:
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert (after.uid, after.prompt_id, after.times) == ("e0-1", "row 1", {"issued_s": 1})
    assert after.spans(0) == [VersionSpan(0, PolicyVersion(0, 3)), VersionSpan(2, PolicyVersion(0, 4))]
    np.testing.assert_array_equal(after.extras["experts"][0][3:], extras["experts"])
    assert np.isnan(after.metrics["ok"][1])
    assert np.shares_memory(after.tokens, np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("cut", [3, 20, 200])
def test_a_damaged_buffer_is_refused(cut):
    data = group().to_bytes()
    with pytest.raises(ValueError, match="group"):
        Group.from_buffer(data[:cut] if cut != 200 else data[:-64])
    with pytest.raises(ValueError, match="not a group"):
        Group.from_buffer(b"nope" + data[4:])


def test_staleness_counts_from_the_oldest_trained_token():
    assert group(sample(0, 4, ((0, 3), (2, 5)))).trained_versions() == ((0, 3), (0, 5))
    masked = np.array([False, False, True, True])
    assert group(sample(0, 4, ((0, 3), (2, 5)), loss_mask=masked)).trained_versions() == ((0, 5), (0, 5))
    assert group(sample(0, 2, loss_mask=np.zeros(2, bool))).trained_versions() is None


def test_after_a_restore_the_oldest_version_is_the_one_with_the_lowest_number():
    # lineage 1 restarted at number 2, after lineage 0 had reached number 5
    spans = [VersionSpan(0, PolicyVersion(0, 5)), VersionSpan(2, PolicyVersion(1, 2))]
    restored = sample(0, 4)
    restored.sequences[0].spans = spans
    assert group(restored).trained_versions() == (PolicyVersion(1, 2), PolicyVersion(0, 5))


def test_columns_of_unequal_length_are_refused():
    bad = sample()
    bad.sequences[0].logprobs = bad.sequences[0].logprobs[:-1]
    with pytest.raises(ValueError, match="5 tokens, 4 logprobs"):
        group(bad)
    with pytest.raises(ValueError, match="at least one sample"):
        Group.from_samples("u", "p", 0, np.zeros(1), [])


@pytest.mark.parametrize("starts", [(1,), (0, 3, 2), (0, 6), ()])
def test_version_spans_out_of_place_are_refused(starts):
    with pytest.raises(ValueError, match=r"sample 0: expected version spans that start at token 0 .* at most 5"):
        group(sample(0, 5, [(start, 0) for start in starts]))


def test_a_value_of_each_span_is_repeated_for_its_tokens():
    whole = group(sample(0, 3, ((0, 4), (2, 5))), sample(1, 0, ()), sample(2, 2, ((0, 6), (2, 7))), sample(3, 0))
    assert whole.per_token(whole.span_number).tolist() == [4, 4, 5, 6, 6]


def test_versions_order_by_lineage_then_number():
    assert PolicyVersion(1, 0) > PolicyVersion(0, 99)
    assert str(PolicyVersion(2, 7)) == "2.7"
