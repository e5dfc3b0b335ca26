"""A run over several machines: network namespaces with slow cables, and a Ray node in each."""

import json
import signal
import subprocess
import sys
from contextlib import closing

import pytest

import asyncrl.cli.ledger
from tests.support.faults import FaultyRun, trained_steps
from tests.support.tiny import make_inputs
from tests.test_scaling import asyncrl_scale, served
from tests.torture.machines import ADDRESSES, HEAD, Machines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Machines.possible(), reason="needs root, and a kernel with network namespaces"),
]
MBIT = 400


class SpreadRun(FaultyRun):
    """Each machine has room for one replica, and for the rank."""

    def __init__(self, machines, inputs, folder, *more):
        self.machines = machines
        placed = (f"ray.address={machines.address}", "ray.rollout_strategy=spread")
        super().__init__(
            inputs,
            folder,
            "param_sync.transport=gloo",
            "ray.placement_timeout_s=60",
            "ray.cpus_per_rank=0.5",
            "ray.cpus_per_replica=1.5",  # of two
            *placed,
            *more,
            within=machines.command(),
            environment=machines.environment,
        )

    def below(self):
        return self.machines.processes()

    def replicas_at(self, address):
        there = {process.pid for process in self.machines.processes(address)}
        return [replica for replica in self.actors("replica") if replica.pid in there]


def test_a_machine_dies_and_another_joins_late(tmp_path):
    inputs, folder, count = make_inputs(tmp_path / "inputs"), tmp_path / "run", 4  # tests/torture has storms of two
    (_, dying, *_), late = ADDRESSES[:count], ADDRESSES[count]
    with closing(Machines(count, spare=1, mbit=MBIT)) as machines:
        run = SpreadRun(machines, inputs, folder, "trainer.total_steps=4000", f"rollout.replicas={count}")
        try:
            run.until_trained(2, 300)
            assert [len(run.replicas_at(address)) for address in ADDRESSES[:count]] == [1] * count
            [queue] = run.actors("queue")  # beside the journal
            assert queue.pid in {process.pid for process in machines.processes(HEAD)}

            machines.start_ray(late)
            assert asyncrl_scale(run, count + 1)[0] == 0
            assert run.replicas_at(late)
            run.until(lambda: f"replica/{count}" in served(folder), "was served by the late machine", 200)

            trained = trained_steps(folder)
            machines.kill(dying)
            run.until_trained(trained + 3, 300)  # the others go on
            machines.start_ray(dying)
            run.until(lambda: run.replicas_at(dying), "had its replica back", 300)
            run.until_trained(trained_steps(folder) + 3, 200)
            run.process.send_signal(signal.SIGINT)
            assert run.wait() == 130, run.text
        finally:
            run.close()
    assert asyncrl.cli.ledger.main([str(folder)]) == 0  # all groups add up


def test_weights_come_in_over_each_cable_once_for_all_replicas_of_a_machine():
    mib = 48
    replicas = {f"replica/{i}": ADDRESSES[1 + i % 2] for i in range(6)}  # neighbours by name are on two machines
    program = [sys.executable, "-m", "tests.support.over_cables"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with closing(Machines(0, spare=3, mbit=MBIT)) as machines:
        sender = subprocess.Popen(machines.command(*program, "send", HEAD, str(mib), *replicas), **pipes)
        address = sender.stdout.readline()
        assert json.loads(address)["host"] == HEAD
        readers = [
            subprocess.Popen(machines.command(*program, "read", name, address, address=there), **pipes)
            for name, there in replicas.items()
        ]
        assert [reader.stdout.readline() for reader in readers] == ["connected\n"] * 6
        before = {there: machines.received(there) for there in ADDRESSES[1:3]}
        sender.communicate("go\n", timeout=120)
        assert [int(reader.communicate(timeout=120)[0]) for reader in readers] == [mib << 20] * 6
        assert sender.returncode == 0
        for there, earlier in before.items():
            assert (machines.received(there) - earlier) / (mib << 20) == pytest.approx(1, abs=0.1)
