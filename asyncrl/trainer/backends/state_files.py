"""Files of a training state: one file of raw tensors per rank, and a JSON index of them, which is written last.

    state/index.json    {"model.norm.weight": {"dtype": "float32", "shape": [64], "shards": [
                            {"offsets": [0], "shape": [32], "file": "rank_0.bin", "start": 4096}, …]}, …}
    state/rank_0.bin    shards one after the other, row-major, in the machine's byte order

A checkpoint may come from a stranger. Nothing here can hold code, unlike torch's own format, whose index is a pickle.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncrl.models.config import CheckpointError

INDEX = "index.json"

_FILE = re.compile(r"rank_\d+\.bin")


class StateWriter(dcp.StorageWriter):
    """Writes a state of tensors into ``folder``, each rank its own file, synced to disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        (self._folder / INDEX).unlink(missing_ok=True)  # incomplete from here on
        return [replace(plan, storage_data=f"rank_{rank}.bin") for rank, plan in enumerate(plans)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        results, start = [], 0
        with open(self._folder / plan.storage_data, "wb") as file:
            for item in plan.items:
                shard = planner.resolve_data(item)
                assert isinstance(shard, Tensor), f"{item.index.fqn} is no tensor"
                file.write(_bytes(shard.detach().contiguous()))
                results.append(WriteResult(item.index, shard.nbytes, {"file": plan.storage_data, "start": start}))
                start += shard.nbytes
            _sync(file)
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index = {
            name: {
                "dtype": str(tensor.properties.dtype).removeprefix("torch."),
                "shape": tensor.size,
                "shards": [
                    {"offsets": shard.offsets, "shape": shard.sizes, **places[MetadataIndex(name, shard.offsets)]}
                    for shard in tensor.chunks
                ],
            }
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        partial = self._folder / f"{INDEX}.partial"
        with open(partial, "wb") as file:
            file.write(json.dumps(index).encode())
            _sync(file)
        partial.replace(self._folder / INDEX)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class StateReader(dcp.StorageReader):
    """Reads a state from ``folder``. ``names``: of its tensors; keys of nested dicts are joined by dots.

    Raises CheckpointError if the folder holds no complete state, or a damaged one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._shards: dict[MetadataIndex, _Shard] = {}
        index = folder / INDEX
        try:
            found = json.loads(index.read_bytes())
            self._metadata = Metadata({name: self._tensor(name, entry) for name, entry in found.items()})
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder}: no complete training state ({INDEX}, written last, is missing: the save did not finish, or "
                "another program wrote it)"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as e:
            raise CheckpointError(
                f"{index}: expected dtype, shape and shards of each tensor; the file is damaged "
                f"({type(e).__name__}: {e})"
            ) from None
        self.names = frozenset(self._metadata.state_dict_metadata)

    def read_metadata(self) -> Metadata:
        return self._metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        files: dict[str, BinaryIO] = {}
        with contextlib.ExitStack() as opened:
            for item in plan.items:
                shard = self._shards[item.storage_index]
                if shard.file not in files:
                    files[shard.file] = opened.enter_context(open(self._folder / shard.file, "rb"))
                data = shard.read(files[shard.file])
                needed = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                target = planner.resolve_tensor(item)
                target.detach().copy_(data[needed])
                planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def _tensor(self, name: str, entry: Mapping[str, Any]) -> TensorStorageMetadata:
        """A tensor of the index. Raises ValueError, LookupError, TypeError, AttributeError or ArithmeticError."""
        dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no dtype")
        chunks = []
        for shard in entry["shards"]:
            offsets, sizes = torch.Size(shard["offsets"]), torch.Size(shard["shape"])
            inside = all(0 <= o <= o + n <= total for o, n, total in zip(offsets, sizes, shape, strict=True))
            if not inside or not _FILE.fullmatch(shard["file"]) or not shard["start"] >= 0:
                raise ValueError(f"{name} has an impossible shard")
            self._shards[MetadataIndex(name, offsets)] = _Shard(shard["file"], shard["start"], sizes, dtype)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        if (stored := sum(math.prod(chunk.sizes) for chunk in chunks)) != math.prod(shape):
            raise ValueError(f"the shards of {name} have {stored} elements, its shape {math.prod(shape)}")
        return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


class _Shard(NamedTuple):
    file: str
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def read(self, file: BinaryIO) -> Tensor:
        data = torch.empty(self.shape, dtype=self.dtype)
        file.seek(self.start)
        if (count := file.readinto(_bytes(data))) < data.nbytes:  # type: ignore[attr-defined]
            raise CheckpointError(f"{file.name}: expected {data.nbytes} bytes at {self.start}, found {count}")
        return data


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's own memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
