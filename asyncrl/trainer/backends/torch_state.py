"""What a backend writes and reads: training state, for any number of ranks."""

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


def checkpoint_dtype(dtype: str) -> torch.dtype:
    """The floating dtype that a checkpoint's config names, or float32: what a Hugging Face export is written in."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)


def digest_bytes(digest: str) -> Tensor:
    """uint8 [16] of a digest's hex digits, to be kept among the tensors of a state."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8)


class StagedState:
    """A copy of a (nested) dict of tensors and DTensors in host memory, and the writing of it while training goes on.

    The buffers are made once, as large as the state, and filled again and again; pinned if the state is on a GPU.
    ``group``: a gloo group of all ranks that is used for nothing else, as the collectives of `write` run in one thread
    while those of training run in another."""

    def __init__(self, state: Mapping[str, Any], group: dist.ProcessGroup) -> None:
        self._group = group
        mesh = DeviceMesh.from_group(group, "cpu")
        self._state = {name: _host_buffers(part, mesh) for name, part in state.items()}
        self._writing = threading.Lock()
        self.filled = False

    @torch.no_grad()
    def fill(self, state: Mapping[str, Any]) -> None:
        """Copy the state as it is now; done on return. RuntimeError while a `write` is under way: it would be torn."""
        with self._alone("stage"):
            _copy(self._state, state)
            self.filled = True
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()

    def write(self, path: Path) -> None:
        """Write what was copied last, each rank its shards, onto the disk; collective over ``group``.

        Raises CheckpointError on every rank if one cannot write. The copy stays, and may be written elsewhere."""
        with self._alone("write"):
            # per_thread_copy_ahead: for state on a GPU, whose stream it waits for; here it would be training's
            files = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
            try:
                dcp.save(self._state, storage_writer=files, process_group=self._group)
            except CheckpointException as e:
                raise _told(path, "written", e) from e

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._writing.acquire(blocking=False):
            raise RuntimeError(f"{what} while a staged state is being written: wait for that write to end first")
        try:
            yield
        finally:
            self._writing.release()


def load_state(path: Path, state: dict[str, Any]) -> None:
    """Fill the tensors of ``state`` in place from what any number of ranks saved; collective.

    Raises CheckpointError if there is no whole checkpoint at ``path``, or one of another model."""
    _expect_whole(path)
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as e:
        raise _told(path, "read", e) from e


def saved_names(path: Path) -> frozenset[str]:
    """The names of all tensors that were saved at ``path``, those of nested dicts joined by dots."""
    _expect_whole(path)
    return frozenset(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def expect_same_draft(path: Path, saved: frozenset[str], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where a draft is there or trained, and was not when ``saved`` was; or the reverse."""
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
            f"{path} was saved with mtp.enable_train={was}, found {found}: the optimizer's state of the draft is "
            f"{'not wanted' if trained else 'missing'}; resume with mtp.enable_train={was}, or start a new run from an "
            f"exported checkpoint"
        )


def expect_same_adapters(path: Path, saved: frozenset[str], state: Mapping[str, Any]) -> None:
    """Raise CheckpointError where adapters are trained, and were not when ``saved`` was; or the reverse."""
    had, has = any(map(is_adapter, saved)), any(map(is_adapter, state["model"]))
    if had != has:
        raise CheckpointError(
            f"{path} holds {'LoRA adapters' if had else 'all weights'}, the run to load it into trains "
            f"{'adapters' if has else 'all weights'}; resume with the model.lora of the run that saved it"
        )


def expect_same_base(path: Path, saved: Tensor, digest: Tensor, base: str) -> None:
    """Raise CheckpointError where the adapters of ``path`` were trained on another model than ``base``."""
    if not torch.equal(saved, digest):
        raise CheckpointError(
            f"{path} holds adapters of another base model than {base}; resume with the one that they were trained on"
        )


def _expect_whole(path: Path) -> None:
    if not (path / ".metadata").is_file():
        raise CheckpointError(
            f"{path}: no training state there (.metadata is missing, which is written last: the save did not finish)"
        )


def _host_buffers(state: Any, mesh: DeviceMesh) -> Any:
    """Memory on the host for every tensor; DTensors on a ``mesh`` of the same ranks, which is the host's."""
    if isinstance(state, Mapping):
        return {name: _host_buffers(part, mesh) for name, part in state.items()}
    local = _local(state)
    # written to now, for a page of new memory costs more at its first touch than its copy does
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


def _told(path: Path, done: str, error: CheckpointException) -> CheckpointError:
    """In one line what the first rank that failed says. CheckpointException is not an Exception, so hardly anything
    that catches errors would see it."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return CheckpointError(f"{path} cannot be {done}: trainer/{rank}: {type(cause).__name__}: {cause}")
