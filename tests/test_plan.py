"""Placement of actors on machines, and the dry run that prints it."""

import asyncio
import socket
import tempfile
import time
from dataclasses import replace

import pytest

from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.schema import Config
from asyncrl.fully_async_main import main
from asyncrl.run.checks import check
from asyncrl.run.placement_plan import Machine, PlacementError, assign_machines, with_devices
from tests.support.tiny import make_inputs, overrides

FOUR = [Machine(f"node-{i}", cpus=32, gpus=8) for i in range(4)]


def assigned(
    machines, ranks=4, replicas=4, tensor_parallel=1, trainer="strict_pack", rollout="auto", transport="auto"
) -> dict[str, str]:
    config = Config()
    engine = replace(config.rollout.engine, tensor_parallel_size=tensor_parallel, device="cuda")
    config = replace(
        config,
        trainer=replace(config.trainer, ranks=ranks, device="cuda"),
        rollout=replace(config.rollout, replicas=replicas, engine=engine),
        param_sync=replace(config.param_sync, transport=transport),
        ray=replace(config.ray, trainer_strategy=trainer, rollout_strategy=rollout),
    )
    return assign_machines(config, machines)


def used(machines: dict[str, str], pool: str) -> list[int]:
    """Number of a pool's actors on each machine, largest first."""
    theirs = [machine for actor, machine in machines.items() if actor.startswith(pool)]
    return sorted((theirs.count(machine) for machine in set(theirs)), reverse=True)


def test_a_pool_is_packed_or_spread_as_its_strategy_says():
    assert used(assigned(FOUR, ranks=4), "trainer") == [4]
    assert used(assigned(FOUR, ranks=12, trainer="pack"), "trainer") == [8, 4]
    assert used(assigned(FOUR, ranks=12, trainer="spread"), "trainer") == [3, 3, 3, 3]
    assert used(assigned(FOUR, ranks=4, trainer="strict_spread"), "trainer") == [1, 1, 1, 1]
    assert used(assigned(FOUR, ranks=4, replicas=8, rollout="spread"), "replica") == [2, 2, 2, 2]


def test_replicas_go_beside_the_trainers_if_they_all_fit_there_and_share_no_gpu_with_them():
    beside = assigned(FOUR, ranks=4, replicas=4)
    assert set(beside.values()) == {beside["trainer/0"]}
    apart = assigned(FOUR, ranks=8, replicas=8, tensor_parallel=2)
    assert used(apart, "replica") == [4, 4]
    assert apart["trainer/0"] not in {machine for actor, machine in apart.items() if actor.startswith("replica")}


def test_a_transport_within_a_machine_is_not_planned_across_machines():
    for transport in ("auto", "gloo", "nccl"):
        assert used(assigned(FOUR, ranks=8, transport=transport), "replica") == [4]
    for transport in ("shared_memory", "cuda_ipc"):
        beside = assigned(FOUR, ranks=4, transport=transport)
        assert set(beside.values()) == {beside["trainer/0"]}
        with pytest.raises(PlacementError, match=rf"transport={transport} needs it beside the trainers"):
            assigned(FOUR, ranks=8, transport=transport)


def test_fractions_of_a_cpu_are_enough_on_a_small_machine():
    config = load_config(None, overrides_of_halves())
    assert assign_machines(with_devices(config, 0), [Machine("small", cpus=2)]).keys() == {
        *(f"trainer/{i}" for i in range(2)),
        *(f"replica/{i}" for i in range(2)),
    }


def overrides_of_halves() -> list[str]:
    files = ["model.path=x", "data.train_files=[y]", "reward.function=a:b"]
    return [*files, "trainer.ranks=2", "rollout.replicas=2", "ray.cpus_per_rank=0.5", "ray.cpus_per_replica=0.5"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"ranks": 9},
            "the trainer pool (9 × 1 CPU + 1 GPU, strict_pack) does not fit; it needs 9 CPU and 9 GPU on one",
        ),
        ({"ranks": 5, "trainer": "strict_spread"}, "on as many machines as there are actors, the cluster has node-0"),
        ({"ranks": 8, "replicas": 7, "tensor_parallel": 4}, "the rollout pool (7 × 1 CPU + 4 GPU, auto) does not fit"),
    ],
)
def test_a_pool_that_does_not_fit_is_refused_with_the_cluster_s_resources(options, expected):
    with pytest.raises(PlacementError) as e:
        assigned(FOUR, **options)
    assert expected in str(e.value)


def test_a_dry_run_prints_placement_and_figures_and_writes_nothing(tmp_path, capsys):
    inputs = make_inputs(tmp_path / "inputs")
    options = overrides(inputs, tmp_path / "run", "async_training.staleness_threshold=0.5", "rollout.engine.slots=7")
    assert main(["--dry-run", *options, "param_sync.transport=gloo"]) == 0
    printed = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    printed = {name.strip(): value.strip() for name, value in printed.items()}
    assert printed["trainer/0"].startswith("this machine  0.5")
    assert printed["staleness bound"] == "1 versions (threshold 0.5)"
    assert printed["groups started ahead"].startswith("at most 3 ")  # (1 + 0.5) · 2
    assert printed["buckets"] == "2 per side, each 32.0 MiB"
    assert printed["samples at once"] == "7 in 7 slots per replica, plus some waiting for one"
    assert not (tmp_path / "run").exists()


def test_a_dry_run_that_cannot_be_placed_fails_with_what_is_missing(tmp_path, capsys):
    inputs = make_inputs(tmp_path / "inputs")
    assert main(["--dry-run", *overrides(inputs, tmp_path / "run", "trainer.device=cuda")]) == 1
    assert "GPU on one machine, the cluster has this machine with" in capsys.readouterr().err

    with socket.socket() as unused:
        unused.bind(("", 0))
        closed = f"127.0.0.1:{unused.getsockname()[1]}"
        for address, why in ((closed, "Connection refused"), ("nowhere", "Invalid address format: nowhere")):
            assert main(["--dry-run", *overrides(inputs, tmp_path / "run", f"ray.address={address}")]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"config: ray.address: expected a Ray cluster at {address}, found none (")
            assert why in line


@pytest.mark.slow
async def test_pools_on_a_real_cluster_share_no_gpu(tmp_path):
    """On a machine that has eight GPUs according to Ray."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from asyncrl.processes.actor_client import start_ray
    from asyncrl.run.placement import Placement
    from asyncrl.run.placement_plan import pools

    devices = ("trainer.device=cuda", "trainer.ranks=4", "rollout.engine.device=cuda", "rollout.replicas=2")
    config = load_config(
        None,
        overrides(
            make_inputs(tmp_path),
            tmp_path / "run",
            *devices,
            "rollout.engine.name=vllm",
            "rollout.engine.tensor_parallel_size=2",
            "ray.cpus_per_rank=0.1",
            "ray.cpus_per_replica=0.1",
        ),
    )
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:
        start_ray(num_cpus=1, num_gpus=8, _temp_dir=ray_dir)
        try:
            placement = Placement(config)
            taken = []
            trainer, rollout = pools(config)
            first = placement._reserve(trainer, trainer.strategy)
            machines = await placement._placed(first, trainer, time.monotonic() + 60)
            second = await placement._reserve_rollouts(rollout, first, "auto")
            machines |= await placement._placed(second, rollout, time.monotonic() + 60)
            for group, pool in ((first, trainer), (second, rollout)):
                for i in range(len(pool.actors)):
                    bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
                    ask = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus, scheduling_strategy=bundle)(gpus_here)
                    taken.append(ask)
            found = ray.get([ask.remote() for ask in taken])
        finally:
            ray.shutdown()
    assert [len(gpus) for gpus in found] == [1, 1, 1, 1, 2, 2]
    assert sorted(gpu for gpus in found for gpu in gpus) == list(range(8))
    assert machines.keys() == {*trainer.actors, *rollout.actors}
    assert len(set(machines.values())) == 1


ON_GPUS = ("trainer.device=cuda", "trainer.ranks=2", "rollout.engine.device=cuda", "rollout.replicas=2")
SHARED = ("ray.share_gpus=true", *ON_GPUS)


@pytest.mark.slow
async def test_a_rank_and_a_replica_share_each_gpu_on_a_real_cluster(tmp_path):
    """On a machine that has two GPUs according to Ray."""
    import ray

    from asyncrl.processes.actor_client import start_ray
    from asyncrl.run.placement import Placement

    config = load_config(None, overrides(make_inputs(tmp_path), tmp_path / "run", *SHARED))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:
        start_ray(num_cpus=2, num_gpus=2, _temp_dir=ray_dir)
        try:
            placement = Placement(config)
            await placement._reserve_pools(config)
            options = [
                *map(placement.rank_options, range(2)),
                *map(placement.replica_options, ("replica/0", "replica/1")),
            ]
            found = ray.get([ray.remote(**o)(gpus_here).remote() for o in options])
        finally:
            ray.shutdown()
    ranks, replicas = found[:2], found[2:]
    assert sorted(ranks) == [[0], [1]]
    assert replicas == ranks
    assert placement.machines.keys() == {"trainer/0", "trainer/1", "replica/0", "replica/1"}


def test_shared_gpus_are_counted_once_and_what_does_not_fit_them_is_refused(tmp_path):
    config = load_config(None, [*SHARED, "model.path=m", "data.train_files=[f]", "reward.function=a:b"])
    assert assign_machines(config, [Machine("one", cpus=4, gpus=2)]).keys() == {
        "trainer/0",
        "trainer/1",
        "replica/0",
        "replica/1",
    }
    with pytest.raises(PlacementError, match="4 CPU and 2 GPU on one machine"):
        assign_machines(config, [Machine("one", cpus=4, gpus=1)])

    def problems(*more):
        config = load_config(None, [*SHARED, "model.path=m", "data.train_files=[f]", "reward.function=a:b", *more])
        with pytest.raises(ConfigError) as error:
            check(config)
        return "\n".join(error.value.problems)

    assert "found 2 ranks and 3 replicas of 1" in problems("rollout.replicas=3")
    assert "expected both pools on GPUs, found trainer.device=cpu" in problems("trainer.device=cpu")
    assert "rollout.engine.args.gpu_memory_utilization: expected the engine's part" in problems(
        "rollout.engine.name=vllm"
    )


@pytest.mark.slow
async def test_added_replicas_get_what_is_free_and_give_it_back_on_a_real_cluster(tmp_path):
    """On a machine that has four GPUs according to Ray."""
    import ray

    from asyncrl.processes.actor_client import start_ray
    from asyncrl.run.placement import Placement

    one_of_each = ("rollout.engine.device=cuda", "trainer.device=cuda", "trainer.ranks=1", "rollout.replicas=1")
    cpus = ("ray.cpus_per_rank=0.1", "ray.cpus_per_replica=0.1", "ray.placement_timeout_s=2")
    config = load_config(None, overrides(make_inputs(tmp_path), tmp_path / "run", *one_of_each, *cpus))
    free = lambda: ray.available_resources().get("GPU", 0)

    async def until_free(gpus: int) -> None:
        async with asyncio.timeout(20):  # Ray's view is late
            while free() != gpus:
                await asyncio.sleep(0.1)

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_dir:
        start_ray(num_cpus=1, num_gpus=4, _temp_dir=ray_dir)
        try:
            placement = Placement(config)
            await placement._reserve_pools(config)
            await placement.add_replicas(["replica/1", "replica/2"])
            await until_free(0)
            assert len(set(placement.machines.values())) == 1
            placement.remove_replica("replica/1")  # the other one of its group stays
            with pytest.raises(PlacementError, match=r"the rollout pool was not placed within 2 s: it needs .*1 GPU"):
                await placement.add_replicas(["replica/1", "replica/3"])
            await placement.add_replicas(["replica/1"])
            bundles = {placement.replica_options(f"replica/{i}")["scheduling_strategy"] for i in range(3)}
            assert len({(b.placement_group.id, b.placement_group_bundle_index) for b in bundles}) == 3
            for name in ("replica/2", "replica/1"):
                placement.remove_replica(name)
            await until_free(2)
        finally:
            ray.shutdown()


def gpus_here() -> list[int]:
    import ray

    time.sleep(3)  # all at once, so that each keeps its GPUs
    return ray.get_gpu_ids()
