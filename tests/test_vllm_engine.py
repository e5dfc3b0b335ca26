"""The vLLM engine with real vLLM on the CPU: generation, pauses, aborts and syncs.

All tests share two replicas, one with speculation and one without. They run in order, and each syncs the weights that
it needs; the last ones kill the replicas.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm", reason="needs the vLLM environment: make test-vllm")


from asyncrl.config.schema import MTPConfig
from asyncrl.cpu.vllm import spread
from asyncrl.observability.telemetry.recorder import Recorder
from asyncrl.param_sync.errors import SyncError
from asyncrl.rollouter.engines.base import EngineDied, EngineError, Grammar
from asyncrl.rollouter.engines.vllm.engine import VLLMEngine
from asyncrl.rollouter.engines.vllm.receiver import WorkerReceiver
from asyncrl.rollouter.engines.vllm.spec import ENGINE
from asyncrl.types.samples import FinishReason
from tests.support.engine_contract import *  # noqa: F403
from tests.support.engine_contract import (
    LONG,
    PROMPT,
    changed,
    error_of,
    matching,
    one_after_the_other,
    perfect_draft,
    rounding,
    until,
)
from tests.support.engine_replica import request
from tests.support.processes import gone
from tests.support.vllm_replica import Replica, replica_config

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

ROOT = Path(__file__).parent.parent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(checkpoint):
    replica = await Replica.start(replica_config(checkpoint))
    yield replica
    await replica.close()


@pytest.mark.slow
async def test_logits_in_float32_are_not_rounded(checkpoint, initial):
    found = await rounding(Replica, replica_config(checkpoint), initial)
    assert found[True] < found[False] / 10, found


async def test_a_sync_succeeds_after_an_abandoned_update(replica, reference, initial):
    await replica.sync(initial)
    await replica.engine._llm.start_weight_update()  # as by a cancelled session
    weights = changed(initial, 65)
    await replica.sync(weights)
    answer = (await replica.generate([request("again", PROMPT, 12)]))["again"]
    assert error_of(reference, weights, PROMPT, answer) < 1e-4


async def test_a_request_stops_at_its_own_stop_tokens_and_not_at_the_checkpoint_s(replica, tokenizer, initial):
    """Neither at the tokenizer's end token, nor at those of the generation config."""
    ends = tokenizer.eos_token_id
    await replica.sync(one_after_the_other(initial, [PROMPT[-1], 20, ends, 21, 22]))
    named = {"none": (), "another": (22,), "both": (22, ends)}
    answers = await replica.generate(
        [request(id, PROMPT, 8, temperature=0.0, stop_token_ids=stops) for id, stops in named.items()]
    )
    assert answers["none"].tokens == [20, ends, 21, 22, PROMPT[-1], 20, ends, 21]
    assert answers["another"].tokens == [20, ends, 21, 22]
    assert answers["both"].tokens == [20, ends]


async def test_a_pause_that_times_out_leaves_a_paused_engine_paused(replica, initial):
    await replica.sync(initial)
    await replica.engine.submit([request("kept", PROMPT, LONG)])
    answers = {}
    await until(replica, answers, lambda: bool(answers))
    await replica.engine.pause("keep", 60)
    with pytest.raises(TimeoutError):
        await replica.engine.pause("wait", 0.2)
    assert replica.engine.paused
    assert await replica.engine._llm.is_paused()
    await replica.engine.resume(replica.version)
    answer = (await replica.collect({"kept"}, answers))["kept"]
    assert (answer.finish, len(answer.tokens)) == (FinishReason.LENGTH, LONG)


async def test_its_processes_listen_on_loopback_and_in_a_private_folder(replica):
    core = psutil.Process(replica.core_pid)
    sockets = [s for process in (core, *core.children(recursive=True)) for s in process.net_connections("all")]
    named = {Path(s.laddr).parent for s in sockets if s.family == socket.AF_UNIX and s.laddr}
    assert named == {replica.engine._sockets.path}
    assert {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN} <= {"127.0.0.1"}


async def test_an_unchanged_model_fails_the_sync_unless_another_worker_has_the_changes():
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=2))
    receiver = WorkerReceiver(SimpleNamespace(vllm_config=config), "replica/0", "gloo")
    digests = {"target": "a", "draft": "b"}

    async def say(*verdicts):
        async def ask(command):
            return [(digests, verdict) for verdict in verdicts]

        receiver.ask = ask
        await receiver.verify()

    await say({"target": False, "draft": None}, {"target": True})
    await say({"target": None}, {"target": None})
    for stale in ("target", "draft"):
        with pytest.raises(SyncError, match=f"new weights were sent for the {stale}, but vLLM's did not change"):
            await say({"target": False, "draft": False} | {stale: True}, {stale: True})


async def test_an_abandoned_update_that_does_not_end_raises_in_time(monkeypatch):
    config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))
    receiver = WorkerReceiver(SimpleNamespace(vllm_config=config), "replica/0", "gloo")
    receiver._attached = True

    async def ask(command):
        assert command == "abandon"
        await asyncio.Event().wait()

    receiver.ask = ask
    monkeypatch.setattr("asyncrl.rollouter.engines.remote_receiver._ENDING_S", 0.1)
    with pytest.raises(EngineDied, match=r"vLLM did not end an abandoned update within 0\.1 s; restart the replica"):
        await receiver.abort()


@pytest.mark.parametrize(
    "name",
    ["enable_eplb", "eplb_config", "generation_config", "override_generation_config", "logits_processors"]
    + ["watermark_config", "spec_method", "stream_interval"],
)
async def test_unsupported_arguments_are_refused(checkpoint, name):
    (problem,) = ENGINE.problems(replica_config(checkpoint, args={name: {}}))
    assert problem.startswith("rollout.engine.args: ")
    assert name in problem


@pytest.mark.parametrize(
    ("refused", "expected"),
    [
        ({"kv_transfer_config": {"pasword": "${secret:KEY}"}}, "kv_transfer_config.pasword: Unexpected keyword"),
        ({"attention_backend": "${secret:KEY}"}, r"Unknown attention backend: '\${secret:KEY}'"),
    ],
)
async def test_a_secret_that_vllm_refuses_is_not_repeated(checkpoint, monkeypatch, refused, expected):
    monkeypatch.setenv("KEY", "BEGINS" + "X" * 200)  # so long that pydantic abridges it
    with pytest.raises(EngineError, match=f"^vLLM did not start with .*: {expected}") as raised:
        await VLLMEngine.start(replica_config(checkpoint, args=refused), recorder=Recorder("replica/0"))
    assert "BEGINS" not in "".join(traceback.format_exception(raised.value))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def speculating(checkpoint):
    mtp = MTPConfig(enable_rollout=True, num_speculative_tokens=1)
    replica = await Replica.start(replica_config(checkpoint, mtp=mtp), transport="gloo")
    yield replica
    await replica.close()


class TestSpeculation:
    """With MiMo's draft, and weights that arrive over gloo."""

    async def acceptance(self, replica, temperature=0.0):
        replica.recorder.drain()
        requests = [request(f"{replica.version}/{i}", [*PROMPT, i], 60, temperature=temperature) for i in range(8)]
        answers = await replica.generate(requests)
        counters = replica.recorder.drain().counters
        accepted, drafted = counters["rollout/spec/accepted/1"], counters["rollout/spec/drafted/1"]
        assert counters["rollout/spec/tokens"] >= counters["rollout/spec/verifications"]
        return accepted / drafted, answers

    async def test_the_draft_is_synced_with_the_target(self, speculating, initial, reference):
        """A draft that equals its target is accepted; a stale one is not."""
        perfect = perfect_draft(initial)
        await speculating.sync(perfect)
        rate, answers = await self.acceptance(speculating)
        assert rate > 0.95
        for id, answer in answers.items():
            prompt = [*PROMPT, int(id.split("/")[1])]
            assert error_of(reference, perfect, prompt, answer) < 1e-4
        stale = {name: t if "mtp" in name else 4 * t for name, t in changed(perfect, 5, scale=0.5).items()}
        await speculating.sync(stale)
        low, _ = await self.acceptance(speculating)
        assert low < 0.5
        await speculating.sync(perfect)
        assert (await self.acceptance(speculating))[0] > 0.95

    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    async def test_sampling_follows_the_target(self, speculating, initial, reference, temperature):
        """The mean logprob of answers is the negative entropy, as for samples of the target itself."""
        weights = perfect_draft(initial, sharpness=2.0)
        await speculating.sync(weights)
        _, answers = await self.acceptance(speculating, temperature)
        behaviour, entropies = [], []
        for id, answer in answers.items():
            prompt = [*PROMPT, int(id.split("/")[1])]
            assert error_of(reference, weights, prompt, answer, temperature) < 1e-4
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + answer.tokens])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits / temperature, -1)
            behaviour += answer.logprobs
            entropies += (-(logprobs.exp() * logprobs).sum(-1)).tolist()
        behaviour, entropies = torch.tensor(behaviour), torch.tensor(entropies)
        error = (behaviour + entropies).std() / len(behaviour) ** 0.5
        assert abs((behaviour + entropies).mean()) < 4 * error

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    async def test_an_answer_matches_its_grammar(self, speculating, initial, tokenizer, temperature):
        stops = (tokenizer.eos_token_id, 0)
        await speculating.sync(perfect_draft(initial))
        requests = [
            request(
                f"{i}",
                [*PROMPT, i + 1],
                60,
                temperature=temperature,
                stop_token_ids=stops,
                grammar=Grammar("regex", "[0-9]{20}"),
            )
            for i in range(6)
        ]
        for answer in (await speculating.generate(requests)).values():
            assert re.fullmatch("[0-9]{20}", matching(speculating, answer, stops))

    async def test_a_bias_is_refused_with_the_reason(self, speculating, initial):
        await speculating.sync(initial)
        answer = (await speculating.generate([request("biased", PROMPT, 4, logit_bias=((1, 1.0),))]))["biased"]
        assert answer.finish is FinishReason.ERROR
        assert "logit_bias" in answer.error


@pytest.mark.slow
async def test_no_process_outlives_a_killed_replica(checkpoint, tmp_path):
    """vLLM's processes end with the one that started them, even if they are stopped."""
    script = tmp_path / "replica.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.support.vllm_replica import Replica, core_pids, replica_config\n"
        "async def main():\n"
        "    replica = await Replica.start(replica_config(Path(sys.argv[1])))\n"
        "    print('started', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script), str(checkpoint)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    for line in process.stdout:
        if "started" in line:
            break
    below = [p for p in psutil.Process(process.pid).children(recursive=True) if "VLLM" in p.name()]
    assert len(below) == 2  # the core and a worker
    for child in below:
        child.suspend()
    process.kill()
    await gone(below, within_s=20)


async def test_the_cpu_builds_temperatures_still_need_their_correction(replica, speculating):
    """If this fails, vLLM has fixed it, and the correction in `asyncrl.cpu.vllm` can be deleted."""
    assert await replica.corrections() == []
    assert await speculating.corrections() == ["temperatures under speculation"]
    values, ends = torch.tensor([0.0, 2.0]), torch.tensor([2, 3], dtype=torch.int32)
    assert spread(values, ends, 3, replace_from=0, replace_to=1).tolist() == [1.0, 1.0, 2.0]


async def test_a_killed_core_is_reported_and_does_not_end_the_replica_s_process(replica, initial):
    """The replica cannot continue; its supervisor starts another."""
    await replica.sync(initial)
    await replica.engine.submit([request("lost", PROMPT, 200)])
    answers = {}
    await until(replica, answers, lambda: bool(answers))
    os.kill(replica.core_pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await until(replica, answers, lambda: False)
    with pytest.raises(EngineDied):
        await replica.engine.submit([request("more", PROMPT, 4)])


async def test_the_death_of_an_idle_core_is_reported_too(speculating, initial):
    """Otherwise this and every later sync would wait for its answer until the deadline."""
    await speculating.sync(initial)
    listening = asyncio.create_task(speculating.engine.events())
    await asyncio.sleep(0)
    os.kill(speculating.core_pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(listening, 60)
