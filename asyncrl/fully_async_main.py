"""The run on one page: config → pools → train loop and rollout loop, side by side → shutdown.

    prompts ──► rollout loop ──groups──► sample queue ──batches──► train loop ──► checkpoints
                     ▲                                                 │
                     └───────────── parameter sync: versions ──────────┘

python -m asyncrl.fully_async_main --config configs/quickstart.yaml rollout.n=8
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.schema import Config
from asyncrl.processes.garbage import collect_rarely
from asyncrl.processes.tasks import together
from asyncrl.run.machine import local_cpus
from asyncrl.run.shutdown import Shutdown, on_signals

EXIT_CONFIG = 2


async def run(config: Config, resume: str | None = None, skip: Sequence[str] = ()) -> int:
    """Start a run, or resume one (see `RunFolder.open`), without the groups ``skip``; returns the exit status. Raises
    ConfigError before any actor starts."""
    shutdown = Shutdown()
    with on_signals(shutdown.interrupt):
        # heavy imports, after the handlers, so that a signal during them ends the run in order
        from asyncrl.observability.sinks.open import open_hub
        from asyncrl.observability.telemetry.log import configure_logging
        from asyncrl.observability.telemetry.recorder import Recorder
        from asyncrl.param_sync.coordinator import ParameterSyncCoordinator
        from asyncrl.run.cluster import Cluster
        from asyncrl.run.monitor import Monitor
        from asyncrl.run.placement import joins_a_cluster
        from asyncrl.run.preflight import preflight, with_overridden_model
        from asyncrl.run.restartable import RestartableRanks, RestartableRollouters
        from asyncrl.run.run_folder import RunFolder
        from asyncrl.run.scaling import Scaling
        from asyncrl.run.supervision import RestartPolicy, Supervisor
        from asyncrl.trainer.loop import TrainLoop
        from asyncrl.trainer.progress import Progress
        from asyncrl.trainer.validation import ValidationSchedule

        cpus = None if joins_a_cluster(config) else local_cpus()
        with TemporaryDirectory() as scratch:
            found = preflight(with_overridden_model(config, Path(scratch)), cpus)
        folder = await asyncio.to_thread(RunFolder.open, config, resume, found, skip)
        if folder is None:
            return 0
        config = with_overridden_model(config, folder.path)
        configure_logging("driver", folder.logs)
        hub, recorder = open_hub(config, folder.path), Recorder("driver")
        hub.begin(folder.checkpoint.metadata.step if folder.checkpoint is not None else 0)
        cluster = Cluster(config, found, folder)
        monitor = Monitor(config, hub, recorder, cluster, found.tokenizer.hf.decode, cluster.end)
        try:
            # placing the pools may take long, and a driver that is silent counts as dead
            await shutdown.unless_interrupted(together(cluster.open(), beside=[folder.epoch.run()]))

            sync = ParameterSyncCoordinator(
                replace(config.param_sync, pause=found.derived.pause),
                cluster.senders,
                {},  # replicas join as they start
                cluster.rollouters.set_routable,
                recorder,
                cluster.end,
                cluster.rollouters.strands,
            )
            supervisor = Supervisor(config.supervision, RestartPolicy(config.supervision), cluster, sync, recorder)
            scaling = Scaling(config, folder.path, cluster, supervisor, lambda: monitor.efficiency)
            ranks = RestartableRanks(cluster, supervisor)
            rollouters = RestartableRollouters(cluster, supervisor, sync.routable)
            validation = ValidationSchedule(
                config, cluster.rollouters, folder.checkpoints, recorder, monitor.on_validation
            )
            trainer = TrainLoop(
                config,
                found.derived,
                cluster.queue,
                ranks,
                sync,
                rollouters,
                validation,
                monitor,
                recorder,
                folder.checkpoints,
                folder.journal_copy,
            )

            async def start_actors() -> None:
                async with asyncio.TaskGroup() as starting:
                    starting.create_task(supervisor.started())
                    starting.create_task(rollouters.started())
                    starting.create_task(ranks.start())

            async def train() -> Progress:
                await shutdown.unless_interrupted(start_actors())
                collect_rarely()
                # ranks and queue are at the checkpoint then: groups may start
                await shutdown.unless_interrupted(trainer.begin(folder.checkpoint, skip))
                shutdown.on_interrupt(trainer.stop)
                rollouters.start_groups()
                return await trainer.run()

            progress = await shutdown.unless_abandoned(
                together(
                    train(),  # lease → train → sync → save → validate; the run ends with it
                    beside=[
                        rollouters.run(),  # prompts → samples → rewards → queue
                        supervisor.run(),  # restarts queue and replicas
                        scaling.run(),  # adds and removes replicas
                        validation.run(),  # validations beside training
                        monitor.run(),  # metrics and spans
                        shutdown.at_the_latest(config.trainer.max_time_s, trainer.stop),
                        folder.epoch.run(),  # ends the run if another driver takes it over
                        cluster.watch(),  # ends the run if its Ray node dies
                    ],
                )
            )
            shutdown.stopped = progress.stopped or shutdown.stopped
        except Exception as e:
            shutdown.failed(e)
        with shutdown.recorded():
            await cluster.close()
        with shutdown.recorded():
            folder.summarize(shutdown, monitor.summary(), monitor.profile())
        with shutdown.recorded():
            hub.close(shutdown.failure, shutdown.stopped)
        with shutdown.recorded():
            folder.finish(config.reporting.report)
    return shutdown.exit_status


def dry_run(config: Config) -> int:
    """Print the plan of a run on the cluster that it would join, or on this machine; starts and writes nothing. Returns
    1 if the pools do not fit. Raises ConfigError."""
    from asyncrl.run.placement import cluster_machines, joins_a_cluster
    from asyncrl.run.placement_plan import PlacementError, assign_machines, make_plan, this_machine, with_devices
    from asyncrl.run.preflight import preflight, with_overridden_model

    with TemporaryDirectory() as scratch:
        config = with_overridden_model(config, Path(scratch))
        joins = joins_a_cluster(config)
        found = preflight(config, cpus=None if joins else local_cpus())
        machines = cluster_machines(config) if joins else [this_machine()]
        config = with_devices(config, sum(machine.gpus for machine in machines))
        try:
            print("\n".join(make_plan(config, found, assign_machines(config, machines)).lines()))
        except PlacementError as e:
            print(str(e), file=sys.stderr)
            return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 trained to the end, 1 failed, 2 refused config, 128 + n after signal n."""
    parser = argparse.ArgumentParser(
        prog="asyncrl train", description="Asynchronous RL post-training of a language model."
    )
    parser.add_argument("--config", help="YAML file of options, see configs/")
    parser.add_argument("--resume", metavar="auto|CHECKPOINT", help="resume the run in run_dir, or from a checkpoint")
    parser.add_argument("--skip", metavar="UID", action="append", default=[], help="with --resume: drop this group")
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="print the placement plan and exit")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="such as rollout.n=8")
    args = parser.parse_intermixed_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            print(to_yaml(config), end="")
            return 0
        if args.dry_run:
            return dry_run(config)
        return asyncio.run(run(config, args.resume, args.skip))
    except ConfigError as e:
        for problem in e.problems:
            print(f"config: {problem}", file=sys.stderr)
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
