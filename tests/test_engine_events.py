"""The log of request events between two reports."""

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.rollouter.engines.events import Event, EventLog
from asyncrl.types.samples import FinishReason
from asyncrl.types.versions import PolicyVersion

VERSIONS = [PolicyVersion(0, number) for number in range(2)]


def rows_of(batch):
    bounds = zip(batch.offsets, batch.offsets[1:])
    tokens = [batch.tokens[low:high].tolist() for low, high in bounds]
    assert len(batch.logprobs) == len(batch.tokens)
    return list(zip(batch.ids, tokens, batch.versions, batch.finish, strict=True))


def test_tokens_of_a_request_under_one_version_are_one_row():
    log = EventLog()
    for token, version in ((1, 0), (2, 0), (3, 1)):
        log.add(Event("a", [token], [-0.5], VERSIONS[version]))
        log.add(Event("b", [9], [-1.0], VERSIONS[0], mixed_kv=token == 2))
    batch = log.take()
    assert batch.progress
    assert rows_of(batch) == [
        ("a", [1, 2], VERSIONS[0], None),
        ("a", [3], VERSIONS[1], None),
        ("b", [9], VERSIONS[0], None),
        ("b", [9], VERSIONS[0], None),
        ("b", [9], VERSIONS[0], None),
    ]
    assert batch.mixed_kv == [False, False, False, True, False]


def test_without_progress_only_requests_that_ended_are_reported():
    log = EventLog()
    log.add(Event("a", [1], [-0.5], VERSIONS[0]))
    log.add(Event("b", [2], [-0.5], VERSIONS[0]))
    log.add(Event("a", [3], [-0.5], VERSIONS[0], FinishReason.ERROR, error="why"))
    assert log.has_finished
    batch = log.take(progress=False)
    assert (rows_of(batch), batch.errors) == ([("a", [1, 3], VERSIONS[0], FinishReason.ERROR)], {"a": "why"})
    assert not batch.progress
    assert (len(log), log.has_finished) == (1, False)
    assert rows_of(log.take()) == [("b", [2], VERSIONS[0], None)]


EVENTS = st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 1), st.booleans())


@settings(deadline=None)
@given(st.lists(st.one_of(EVENTS, st.booleans()), max_size=40))
def test_every_token_is_reported_once_and_in_its_order_whenever_the_log_is_read(actions):
    log, added, seen = EventLog(), {}, {}
    for action in [*actions, True]:
        if isinstance(action, bool):
            for id, tokens, version, _ in rows_of(log.take(progress=action)):
                seen.setdefault(id, []).extend((token, version) for token in tokens)
            continue
        id, tokens, version, ends = action
        finish = FinishReason.STOP if ends else None
        log.add(Event(id, tokens, [-0.5] * len(tokens), VERSIONS[version], finish))
        added.setdefault(id, []).extend((token, VERSIONS[version]) for token in tokens)
    assert {id: of for id, of in seen.items() if of} == {id: of for id, of in added.items() if of}
