"""Figures of validations that several rollouters share."""

import numpy as np
import pytest

from asyncrl.config.schema import RolloutConfig
from asyncrl.rollouter.validated import ROUNDS, Validated
from asyncrl.run.rollouters import Rollouters
from asyncrl.types.samples import FinishReason, Sample, TokenSequence
from asyncrl.types.versions import PolicyVersion, VersionSpan


def sample(reward, number=3, lineage=0, **metrics):
    spans = [VersionSpan(0, PolicyVersion(lineage, number), False, "replica/0")]
    tokens = TokenSequence(np.ones(2, np.int32), -np.ones(2, np.float32), np.ones(2, np.bool_), spans)
    return Sample(0, [tokens], FinishReason.STOP, reward, metrics)


ANSWERED = [
    ("sums", [sample(1.0, accuracy=1.0), sample(-2.0)]),
    ("words", [sample(None, accuracy=0.5), "failed"]),
    ("sums", [sample(-1.0, number=2)]),
]


def test_figures_are_means_over_what_was_answered():
    values = Validated.of(ANSWERED).values()
    assert values["validation/reward"] == pytest.approx(-2 / 3)
    assert values["validation/accuracy"] == pytest.approx(1.5 / 4)  # one without it has 0
    assert (values["validation/samples"], values["validation/failed"]) == (4, 1)
    figures = ("lineage", "version", "oldest_version")
    assert [values[f"validation/{name}"] for name in figures] == [0, 3, 2]
    assert values["validation/source/sums/success"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_have_together_the_figures_of_the_whole(parts):
    together = Validated.together([Validated.of(ANSWERED[i::parts]) for i in range(parts)])
    assert together.values() == pytest.approx(Validated.of(ANSWERED).values())


def test_nothing_answered_has_no_mean():
    assert Validated.of([("sums", ["failed"])]).values() == {"validation/samples": 0, "validation/failed": 1}


class Shard:
    """Its answers are of the next of ``lineages``; the last stays."""

    def __init__(self, *lineages) -> None:
        self.lineages, self.asked = list(lineages), 0

    async def validate(self):
        lineage = self.lineages[min(self.asked, len(self.lineages) - 1)]
        self.asked += 1
        return Validated.of([] if lineage is None else [("sums", [sample(1.0, lineage=lineage)])])


def rollouters(*shards):
    return Rollouters(shards, RolloutConfig(replicas=len(shards), shards=len(shards)))


async def test_a_shard_whose_answers_are_of_an_older_lineage_answers_again():
    shards = Shard(0, 1), Shard(1), Shard(None), Shard(0, 1)
    values = await rollouters(*shards).validate()
    assert (values["validation/samples"], values["validation/lineage"]) == (3, 1)
    assert "validation/oldest_version" not in values
    assert [shard.asked for shard in shards] == [2, 1, 1, 2]


async def test_a_validation_whose_lineages_stay_mixed_is_an_error():
    old = Shard(0)
    with pytest.raises(RuntimeError, match=f"after {ROUNDS} rounds shards have answers of different lineages"):
        await rollouters(old, Shard(1)).validate()
