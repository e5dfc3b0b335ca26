"""Whole runs on Ray with SGLang replicas: driver and trainer in the default environment, replicas in SGLang's."""

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("needs the SGLang environment: make test-sglang", allow_module_level=True)

from tests.support.faults import audit
from tests.support.processes import gone
from tests.support.sglang_replica import server_processes

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1200)]
OPTIONS = (
    "rollout.engine.name=sglang",
    f"rollout.engine.python={sys.executable}",
    "ray.placement_timeout_s=120",
    "supervision.answer_s=300",
)
ROOT = Path(__file__).parent.parent


def test_a_run_trains_to_the_end_and_a_killed_server_loses_no_sample(start):
    """The trainer's logprobs of fresh samples equal SGLang's; a replica whose server dies during a step is restarted
    and continues."""
    run = start("async_training.staleness_threshold=0", "trainer.total_steps=12")
    run.until_trained(3, timeout_s=600)
    noticed = run.text.count("supervision: replica/")
    server_processes(run.process.pid)[0].kill()
    run.until(lambda: run.text.count("supervision: replica/") > noticed, "noticed the death")
    assert run.wait(900) == 0, run.text
    logged = [json.loads(line) for line in (run.folder / "logs/replica-0.jsonl").read_text().splitlines()]
    assert any(line["level"] == "error" and "SGLang's server" in line["message"] for line in logged)
    audit(run.folder, [2] * 12, staleness_bound=0)
    ratios = run.column("actor/ratio_max")
    assert len(ratios) == 12
    assert max(abs(ratio - 1) for ratio in ratios) < 1e-3


def test_no_process_outlives_a_killed_replica(inputs, tmp_path):
    """Neither the server and its descendants, nor torch's managers of shared memory."""
    script = tmp_path / "replica.py"
    script.write_text(
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from asyncrl.models.checkpoint import read_tensors\n"
        "from tests.support.engine_replica import Replica\n"
        "from tests.support.sglang_replica import replica_config\n"
        "async def main():\n"
        "    replica = await Replica.start(replica_config(Path(sys.argv[1])))\n"
        "    await replica.sync(read_tensors(sys.argv[1]))\n"
        "    print('synced', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    before = helpers()
    process = subprocess.Popen(
        [sys.executable, str(script), str(inputs / "checkpoint")],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert any("synced" in line for line in process.stdout)
    below = [*server_processes(process.pid), *(helpers() - before)]
    assert len(below) >= 4  # server, scheduler, detokenizer, torch's
    process.kill()
    asyncio.run(gone(below))


def helpers() -> set[psutil.Process]:
    """torch's managers of named shared memory; they are not children of the processes that use them."""
    return {p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("torch_shm")}
