"""The checkpoints that a path names, as Hugging Face folders."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.load import CONFIG_FILE, ConfigError, load_config
from asyncrl.config.schema import CheckpointConfig, MegatronConfig
from asyncrl.models.config import CheckpointError
from asyncrl.run.environments import interpreter
from asyncrl.trainer.checkpoints import CheckpointStore

HF = "hf"  # of a checkpoint's folder
DRIVER = "_ASYNCRL_DRIVER_PYTHON"  #: variable: the interpreter in which `asyncrl eval` began


@dataclass(frozen=True)
class Evaluated:
    """A model to evaluate. ``folder``: Hugging Face's, or None if it must be exported from ``checkpoint``, a checkpoint
    of the run in ``run``."""

    name: str
    folder: Path | None
    run: Path | None = None
    checkpoint: Path | None = None


def find(path: Path) -> list[Evaluated]:
    """All checkpoints of a run's folder, oldest first; one checkpoint of a run; or a Hugging Face folder. Files are not
    verified; `verify` does that. Raises ConfigError for anything else."""
    path = path.resolve()
    if os.path.isfile(path / CONFIG_FILE):
        if not (found := _store(path / "checkpoints").all()):
            raise ConfigError([f"{path}: the run has no checkpoints yet"])
        return [_of_run(path, checkpoint.path) for checkpoint in found]
    if os.path.isfile(path / "metadata.json"):
        run = path.parent.parent
        if not os.path.isfile(run / CONFIG_FILE):
            raise ConfigError([f"{path}: a checkpoint outside of its run's folder, {run} has no {CONFIG_FILE}"])
        return [_of_run(run, path)]
    if os.path.isfile(path / "config.json"):
        return [Evaluated(path.name, path)]
    raise ConfigError([f"{path}: expected a run's folder, a checkpoint of one, or a Hugging Face folder"])


def _store(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointConfig())  # its options decide only which are kept


def _of_run(run: Path, checkpoint: Path) -> Evaluated:
    exported = checkpoint / HF
    whole = (exported / "config.json").is_file()  # else there is none, or only an adapter
    return Evaluated(checkpoint.name, exported if whole else None, run, checkpoint)


def verify(model: Evaluated) -> None:
    """Raises CheckpointError for a run's checkpoint whose files are not as they were written."""
    if model.checkpoint is not None:
        _store(model.checkpoint.parent).open(model.checkpoint)


def export(model: Evaluated, folder: Path) -> None:
    """Write the weights of a run's checkpoint as a Hugging Face folder, adapters merged, in a process with the
    trainer's interpreter. Raises CheckpointError with the process's last line."""
    assert model.run is not None
    assert model.checkpoint is not None
    config, checkpoint = load_config(model.run / CONFIG_FILE), model.checkpoint
    python = interpreter(config.trainer.python) or os.environ.get(DRIVER) or sys.executable
    command = [python, "-m", __name__, str(checkpoint), str(folder)]
    environment, limit_s = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}, config.checkpoint.timeout_s
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise CheckpointError(
            f"{checkpoint}: its weights were not exported within {limit_s:g} s (checkpoint.timeout_s)"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CheckpointError(f"{checkpoint}: its weights cannot be exported: {last}")


def _export(checkpoint: Path, folder: Path) -> None:
    """One rank in host memory."""
    from asyncrl.models.overridden import FOLDER
    from asyncrl.observability.telemetry.recorder import Recorder
    from asyncrl.trainer.rank import TrainerRank

    run = checkpoint.resolve().parent.parent
    config = load_config(run / CONFIG_FILE)
    if config.model.overrides:
        config.model.path = str(run / FOLDER)
    # nothing is trained: neither parallelism nor a reference, nor memory for checkpoints
    config.trainer.ranks, config.trainer.device, config.trainer.megatron = 1, "cpu", MegatronConfig()
    config.model.attention, config.checkpoint.export_lora, config.checkpoint.every_steps = "auto", "merged", 0
    config.algorithm.kl_coef = config.algorithm.kl_reward_coef = 0.0
    config.algorithm.reference_path = ""
    rank = TrainerRank(config, 0, 1, None, Recorder("trainer/0"))
    rank.load(checkpoint / "state")
    rank.export_hf(folder)
    rank.close()


if __name__ == "__main__":
    _export(Path(sys.argv[1]), Path(sys.argv[2]))
