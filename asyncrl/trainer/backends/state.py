"""Writing and reading of training state, at any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from asyncrl.models.checkpoint import is_draft
from asyncrl.models.config import CheckpointError
from asyncrl.param_sync.manifest import is_adapter
from asyncrl.trainer.backends.state_files import StateReader, StateWriter


def checkpoint_dtype(dtype: str) -> torch.dtype:
    """dtype of a Hugging Face export: the 16-bit one that the checkpoint's config names, else float32."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)


def digest_bytes(digest: str) -> Tensor:
    """A hexadecimal digest as uint8 [16], so that it can be stored among a state's tensors."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


class StagedState:
    """Host copy of a nested dict of tensors and DTensors, which can be written while training continues.

    The buffers are as large as the state, allocated once and reused; pinned if the state is on a GPU. ``group``: a gloo
    group of all ranks, used for nothing else, because the collectives of `write` and of training run in different
    threads."""

    def __init__(self, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        self._group = group
        mesh = DeviceMesh.from_group(group, "cpu")
        self._state = {name: _host_buffers(part, mesh) for name, part in state.items()}
        self._writing = threading.Lock()
        self.filled = False

    @torch.no_grad()
    def fill(self, state: Mapping[str, Any]) -> None:
        """Copy the state; complete on return. Raises RuntimeError during a `write`, which would read a torn copy."""
        with self._exclusive("stage"):
            _copy(self._state, state)
            self.filled = True
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()

    def write(self, path: Path) -> None:
        """Write the last copy, each rank its shards, synced to disk; collective over ``group``.

        Raises CheckpointError on every rank if one cannot write. The copy remains, and may be written elsewhere."""
        with self._exclusive("write"):
            try:
                dcp.save(self._state, storage_writer=StateWriter(path), process_group=self._group)
            except CheckpointException as e:
                raise _error(path, "written", e) from e

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        if not self._writing.acquire(blocking=False):
            raise RuntimeError(f"{what} during a write of the staged state: wait for that write to end first")
        try:
            yield
        finally:
            self._writing.release()


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from a state saved at any number of ranks; collective.

    Raises CheckpointError if ``path`` holds no complete state, or the state of another model."""
    files = StateReader(path)
    try:
        dcp.load(state, storage_reader=files)
    except CheckpointException as e:
        raise _error(path, "read", e) from e


def saved_names(path: Path) -> frozenset[str]:
    """Names of all tensors saved at ``path``; keys of nested dicts are joined by dots. Raises CheckpointError."""
    return StateReader(path).names


def expect_same_draft(path: Path, saved: frozenset[str], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if ``saved`` and ``state`` differ in having a draft, or in training it."""
    had, trained = (
        any(is_draft(name.removeprefix(part)) for name in saved if name.startswith(part))
        for part in ("model.", "optimizer.exp_avg.")
    )
    if had != any(map(is_draft, state["model"])):
        raise CheckpointError(
            f"{path} was saved {'with' if had else 'without'} MTP layers, the model to load it into has "
            f"{'none' if had else 'them'}; resume with the model.path and mtp.init_from_trunk of the run that saved it"
        )
    if trained != any(map(is_draft, state["optimizer"]["exp_avg"])):
        was, found = ("true", "false") if trained else ("false", "true")
        raise CheckpointError(
            f"{path} was saved with mtp.enable_train={was}, found {found}: the draft's optimizer state is "
            f"{'unexpected' if trained else 'missing'}; resume with mtp.enable_train={was}, or start a new run from an "
            f"exported checkpoint"
        )


def expect_same_adapters(path: Path, saved: frozenset[str], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError if only one of ``saved`` and ``state`` has LoRA adapters."""
    had, has = any(map(is_adapter, saved)), any(map(is_adapter, state["model"]))
    if had != has:
        raise CheckpointError(
            f"{path} holds {'LoRA adapters' if had else 'all weights'}, the run to load it into trains "
            f"{'adapters' if has else 'all weights'}; resume with the model.lora of the run that saved it"
        )


def expect_same_base(path: Path, saved: Tensor, digest: Tensor, base: str) -> None:
    """Raise CheckpointError if the adapters of ``path`` were trained on another model than ``base``."""
    if not torch.equal(saved, digest):
        raise CheckpointError(
            f"{path} holds adapters of another base model than {base}; resume with the model that they were trained on"
        )


def _host_buffers(state: Any, mesh: DeviceMesh) -> Any:
    """Host memory for every tensor; DTensors get a host ``mesh`` of the same ranks."""
    if isinstance(state, Mapping):
        return {name: _host_buffers(part, mesh) for name, part in state.items()}
    local = _local(state)
    # zeroed now: the first touch of a new page costs more than the copy into it
    buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda).zero_()
    if not isinstance(state, DTensor):
        return buffer
    return DTensor.from_local(buffer, mesh, state.placements, shape=state.shape, stride=state.stride())


def _copy(to: Any, of: Any) -> None:
    if isinstance(of, Mapping):
        for name, part in of.items():
            _copy(to[name], part)
    else:
        _local(to).copy_(_local(of), non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _error(path: Path, done: str, error: CheckpointException) -> CheckpointError:
    """The first failed rank's error in one line. CheckpointException is not an Exception, so most handlers miss it."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return CheckpointError(f"{path} cannot be {done}: trainer/{rank}: {type(cause).__name__}: {cause}")
