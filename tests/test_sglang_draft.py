"""The draft of an SGLang server: that it is delivered, and that it fails the sync where it is not.

SGLang's speculation has no kernels for a CPU like this one, so nothing is generated here; the draft model is loaded all
the same, and the server tells its checksums.
"""

from __future__ import annotations

import importlib.util

import pytest
import pytest_asyncio

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from asyncrl.config.schema import MTPConfig
from asyncrl.models.checkpoint import is_draft, read_tensors
from asyncrl.models.make_checkpoint import make_checkpoint
from asyncrl.param_sync.errors import SyncError
from tests.support.engine_contract import changed
from tests.support.engine_replica import Replica
from tests.support.sglang_replica import replica_config

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("mimo"), seed=0, warm_start_steps=0)


@pytest.fixture(scope="module")
def initial(checkpoint):
    return read_tensors(checkpoint)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    """Its weights come over gloo."""
    mtp = MTPConfig(enable_rollout=True, num_speculative_tokens=1)
    args = {"speculative_draft_attention_backend": "intel_amx"}  # the one on CPUs that goes with a draft
    replica = await Replica.start(replica_config(checkpoint, mtp=mtp, args=args), transport="gloo")
    yield replica
    await replica.close()


async def checksums(replica):
    return {role: await replica.intake.live_checksums(role) for role in ("target", "draft")}


def differing(before, after):
    return {name for name in before if before[name] != after[name]}


async def test_each_model_changes_with_its_own_tensors_alone(replica, initial):
    report = await replica.sync(initial)
    assert not report.evicted
    before = await checksums(replica)
    drafts = {name: t for name, t in initial.items() if is_draft(name)}
    await replica.sync(dict(initial) | changed(drafts, 1))
    after = await checksums(replica)
    assert after["target"] == before["target"]
    own = differing(before["draft"], after["draft"])
    assert len(own) == len(before["draft"]) - 2  # all but the embedding and the head, which are the target's
    layer = {name: t for name, t in initial.items() if "layers.0.mlp.down_proj" in name and not is_draft(name)}
    await replica.sync(dict(initial) | changed(drafts, 1) | changed(layer, 2))
    last = await checksums(replica)
    assert last["draft"] == after["draft"]
    assert differing(after["target"], last["target"]) == layer.keys()


async def test_target_and_draft_share_what_they_share(replica, initial):
    before = await checksums(replica)
    await replica.sync(
        {name: t + 1 if "embed_tokens" in name or "lm_head" in name else t for name, t in initial.items()}
    )
    after = await checksums(replica)
    assert len(differing(before["draft"], after["draft"]) & {"model.embed_tokens.weight", "lm_head.weight"}) == 2
    for shared in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after["draft"][shared] == after["target"][shared]


async def test_a_draft_that_is_not_delivered_fails_the_sync(replica, initial, monkeypatch):
    await replica.sync(initial)
    deliver = replica.intake._deliver

    async def lose(parcel):
        if parcel.role == "target":
            await deliver(parcel)

    monkeypatch.setattr(replica.intake, "_deliver", lose)
    with pytest.raises(SyncError, match=r"phase verify, replica/0.*mtp_layers.*no live parameter is it"):
        await replica.sync(changed(initial, 3))
    assert not replica.fleet.routable
    monkeypatch.undo()
    assert not (await replica.sync(changed(initial, 4))).evicted
