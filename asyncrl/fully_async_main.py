"""The run on one page: config → pools → both loops → supervise → close.

python -m asyncrl.fully_async_main --config configs/quickstart.yaml rollout.n=8
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace

from asyncrl.config.checks import local_cpus
from asyncrl.config.load import ConfigError, load_config, to_yaml
from asyncrl.config.schema import Config
from asyncrl.ending import Ending, on_signals, together

EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 trained to the end, 1 failed, 2 refused by its config, 128 + n after signal n."""
    parser = argparse.ArgumentParser(prog="asyncrl", description="Asynchronous RL post-training of a language model.")
    parser.add_argument("--config", help="YAML file of options, see configs/")
    parser.add_argument(
        "--resume", metavar="auto|CHECKPOINT", help="go on with the run in run_dir, or from a checkpoint"
    )
    parser.add_argument("--print-config", action="store_true", help="print the whole configuration and exit")
    parser.add_argument("--dry-run", action="store_true", help="print where everything would go, and exit")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="such as rollout.n=8")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config, args.overrides)
        if args.print_config:
            print(to_yaml(config), end="")
            return 0
        if args.dry_run:
            return dry_run(config)
        return asyncio.run(run(config, args.resume))
    except ConfigError as e:
        for problem in e.problems:
            print(f"config: {problem}", file=sys.stderr)
        return EXIT_CONFIG


def dry_run(config: Config) -> int:
    """Print the plan of a run on the cluster that it would join, or on this machine; nothing is started or written.
    Returns 1 if the pools do not fit there. Raises ConfigError."""
    from tempfile import TemporaryDirectory

    from asyncrl.cluster import joins_a_cluster, machines_of
    from asyncrl.plan import PlacementError, make_plan, seats_on, this_machine, with_devices
    from asyncrl.preflight import preflight, with_overridden_model

    with TemporaryDirectory() as scratch:
        config = with_overridden_model(replace(config, run_dir=scratch))
        joins = joins_a_cluster(config)
        found = preflight(config, cpus=None if joins else local_cpus())
        machines = machines_of(config) if joins else [this_machine()]
        config = with_devices(config, sum(machine.gpus for machine in machines))
        try:
            print("\n".join(make_plan(config, found, seats_on(config, machines)).lines()))
        except PlacementError as e:
            print(str(e), file=sys.stderr)
            return 1
    return 0


async def run(config: Config, resume: str | None = None) -> int:
    """The whole run, or what is left of one (see `RunFolder.open`); returns the exit status. Raises ConfigError before
    any actor is started."""
    ending = Ending()
    with on_signals(ending.interrupt):
        from asyncrl.cluster import Cluster, joins_a_cluster
        from asyncrl.monitor import Monitor
        from asyncrl.param_sync.group import ParameterSyncGroup
        from asyncrl.preflight import preflight, with_overridden_model
        from asyncrl.reporting.sinks import open_hub
        from asyncrl.run_folder import RunFolder
        from asyncrl.supervision import RestartableRanks, RestartPolicy, Supervisor
        from asyncrl.telemetry.log import start_log
        from asyncrl.telemetry.recorder import Recorder
        from asyncrl.trainer.loop import TrainLoop

        config = with_overridden_model(config)
        found = preflight(config, cpus=None if joins_a_cluster(config) else local_cpus())
        folder = await asyncio.to_thread(RunFolder.open, config, resume, found)
        start_log("driver", folder.logs)
        hub = open_hub(config, folder.path)
        recorder, cluster = Recorder("driver"), Cluster(config, found, folder)
        monitor = Monitor(config, hub, recorder, cluster, found.tokenizer.hf.decode)
        try:
            await ending.unless_interrupted(cluster.start())
            sync = ParameterSyncGroup(
                replace(config.param_sync, pause=found.derived.pause),
                cluster.senders,
                cluster.receivers,
                cluster.rollouter.set_routable,
                recorder,
                cluster.end,
            )
            supervisor = Supervisor(config.supervision, RestartPolicy(config.supervision), cluster, sync, recorder)
            ranks = RestartableRanks(cluster, supervisor)
            trainer = TrainLoop(
                config,
                found.derived,
                cluster.queue,
                ranks,
                sync,
                monitor,
                recorder,
                folder.checkpoints,
                folder.journal_copy,
            )
            ending.on_interrupt(trainer.stop)
            await trainer.begin(folder.checkpoint)
            training = together(trainer.run(), beside=[supervisor.run(), monitor.run()])
            progress = await ending.unless_abandoned(training)
            ending.stopped = progress.stopped or ending.stopped
        except Exception as e:
            ending.failed(e)
        with ending.recorded():
            await cluster.close()
        with ending.recorded():
            hub.close(ending.failure, ending.stopped)
        with ending.recorded():
            folder.finish(ending, monitor.summary(), config.reporting.report)
    return ending.exit_status


if __name__ == "__main__":
    sys.exit(main())
