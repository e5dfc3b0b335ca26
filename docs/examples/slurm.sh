#!/usr/bin/env bash
# A run on the machines of a SLURM job: Ray's head on the first, a worker on each other one, the driver beside the head.
#
#   sbatch docs/examples/slurm.sh configs/vllm_multi_node.yaml trainer.total_steps=1000
#
# Submitted from the project's folder, on a disk that all machines share. A job that SLURM ends in time, or starts again,
# goes on from its last checkpoint.
#SBATCH --job-name=asyncrl
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
set -euo pipefail
config=${1:?expected a config, such as configs/vllm_multi_node.yaml}
shift
port=${RAY_PORT:-6379}
export PATH="$PWD/.venv/bin:$PATH" ASYNCRL_SHARED="${ASYNCRL_SHARED:-$PWD}"
export ASYNCRL_RUNS="${ASYNCRL_RUNS:-$ASYNCRL_SHARED/runs}" ASYNCRL_JOURNAL="${ASYNCRL_JOURNAL:-${TMPDIR:-/tmp}/asyncrl-$USER}"
export RAY_AUTH_MODE=token RAY_worker_niceness=0
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN # srun hands it to the other machines

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on() { # on MACHINE COMMAND …, in a subshell, which becomes srun and so gets its signals
    exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"
}
head=$(on "${machines[0]}" python -c "import ray.util; print(ray.util.get_node_ip_address())")
trap 'kill $(jobs -p) 2> /dev/null' EXIT
on "${machines[0]}" ray start --head --block --node-ip-address="$head" --port="$port" --include-dashboard=false &
for machine in "${machines[@]:1}"; do
    on "$machine" ray start --block --address="$head:$port" &
done

# SIGTERM lets the driver finish its step and save
RAY_ADDRESS="$head:$port" on "${machines[0]}" python -m asyncrl.fully_async_main --config "$config" --resume auto "$@" &
driver=$!
trap 'kill -TERM $driver' TERM
while wait $driver && status=0 || status=$?; kill -0 $driver 2> /dev/null; do :; done # a signal ends a wait
wait $driver || status=$?
exit "$status"
