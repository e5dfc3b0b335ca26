"""A sync session's receiving end inside vLLM's workers: what the replica's process asks of them, and the engine that
vLLM's weight-transfer interface runs.

Every worker reads all buckets with a reader of its own and gives whole tensors to vLLM's loader, under its layerwise
reload: packed, sharded and quantised parameters come out as they do from a checkpoint. The target's tensors are loaded
as they arrive, those of the draft are kept until vLLM's turn to update the draft has come, in the same session.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.param_sync.digest import ROLES
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.handles import ReceivePlan
from asyncrl.param_sync.manifest import Manifest, Role
from asyncrl.param_sync.names import NamePlan, NameResolver
from asyncrl.param_sync.transports.base import BucketReader
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.param_sync.whole_tensors import WholeTensors
from asyncrl.rollouter.engines.vllm.arguments import BACKEND
from asyncrl.rollouter.engines.vllm.cpu_defects import correct_cpu_build
from asyncrl.rollouter.engines.vllm.live_names import resolver


class WorkerExtension:
    """Mixed into vLLM's worker class; it has one method, to stay out of vLLM's names."""

    def asyncrl(self, command: str, arguments: bytes) -> bytes:
        """Run a command of `BucketTransferEngine` with pickled arguments; returns ("done", what it returned) or
        ("failed", what it raised), pickled: errors keep their type on the way to the replica's process."""
        try:
            engine: BucketTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
            here = (self,) if command == "attach" else pickle.loads(arguments)
            answer = getattr(engine, command)(*here)
        except Exception as problem:
            return pickle.dumps(("failed", problem))
        return pickle.dumps(("done", answer))


@dataclass
class InitInfo(WeightTransferInitInfo):
    """``name`` of the replica, and how its weights travel."""

    name: str
    transport: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    deadline_s: float


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. A session: ``open``; then as vLLM has it start, update and finish for the target, and for the
    draft if there is one; ``verify``; ``close_session``, or ``abandon`` at any point instead."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: BucketReader | None = None
        self._target: tuple[torch.nn.Module, NameResolver] | None = None
        self._draft: tuple[torch.nn.Module, NameResolver] | None = None
        self._tensors: WholeTensors | None = None
        self._plans: dict[Role, NamePlan] = {}
        self._loads: dict[Role, dict[str, tuple[str, ...]]] = {}
        self._kept: list[tuple[str, torch.Tensor]] = []  # for the draft
        self._reloading: dict[torch.nn.Module, Any] = {}  # models in the midst of an update, and their configs
        self._corrected: list[str] = []
        self.problem: BaseException | None = None  # what broke the update

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank, world = self.parallel_config.rank, self.parallel_config.world_size
        self._name = init_info.name if world == 1 else f"{init_info.name} worker {rank}"
        self._reader = make_reader(init_info.transport, self._name)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)
        self._reloading[self.model] = self.model_config

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            if self._draft is not None and self.model is self._draft[0]:
                kept, self._kept = self._kept, []
                self._load("draft", iter(kept))
            else:
                self._load("target", self._arriving(update_info.deadline_s))
        except BaseException as problem:
            self.problem = problem
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        del self._reloading[self.model]

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()

    # -- the replica's commands ----------------------------------------------------------------------------------------

    def attach(self, worker: Any) -> dict[str, Any]:
        """Look at the loaded models. Returns what the replica must know of them."""
        self._corrected = correct_cpu_build(self.vllm_config)
        tp_size, lora = self.parallel_config.tensor_parallel_size, self.vllm_config.lora_config is not None
        target, draft = worker.get_model(), worker.get_draft_model()
        self._target = target, resolver(target, tp_size, lora)
        if draft is not None:
            self._draft = draft, resolver(draft, tp_size, lora=False, shared_with=target)
        return {"draft": draft is not None}

    def open(self, plan: ReceivePlan) -> str:
        """Check the manifest against the live models, and connect. Returns the reader's name."""
        assert self._reader is not None
        self.abandon()
        self._plans = self._planned(plan.manifest)
        self._loads = {role: names.loads() for role, names in self._plans.items()}
        self._tensors = WholeTensors(plan.session, plan.manifest)
        self._reader.connect(plan.session, plan.addresses, plan.deadline_s)
        return self._name

    def verify(self) -> dict[Role, str]:
        """Returns the digests of all that arrived and was loaded."""
        if self._tensors is None or self._reloading or self._kept:
            raise SyncError("verify", None, None, None, "no weight update has gone to its end in this session")
        self._tensors.verify()
        return {role: self._tensors.digest(role) for role in ROLES}

    def received_bytes(self) -> int:
        return 0 if self._tensors is None else self._tensors.nbytes

    def corrected(self) -> list[str]:
        """Defects of vLLM's that were found here."""
        return self._corrected

    def free_bytes(self) -> int:
        """Of this worker's GPU."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def failure(self) -> None:
        """Raises what broke the last update."""
        if self.problem is not None:
            raise self.problem

    def abandon(self) -> None:
        """Leave the session. An update that was cut off leaves weights of no version behind, but a model that can be
        updated again."""
        assert self._reader is not None
        self._reader.abort()
        self._tensors, self._kept, self.problem = None, [], None
        reloading, self._reloading = self._reloading, {}
        for model, config in reloading.items():
            finalize_layerwise_reload(model, config)

    # -- within --------------------------------------------------------------------------------------------------------

    def _planned(self, manifest: Manifest) -> dict[Role, NamePlan]:
        """Where each tensor belongs in the target, and in the draft if there is one. Raises ManifestError."""
        assert self._target is not None
        plans: dict[Role, NamePlan] = {"target": self._target[1].resolve(s for s in manifest if s.role == "target")}
        plans["draft"] = NamePlan(())
        if self._draft is not None:
            # a draft that does not share the target's embedding or head takes them, too
            resolver = self._draft[1]
            plans["draft"] = resolver.resolve(s for s in manifest if s.role == "draft" or resolver.wants(s.name))
        return plans

    def _load(self, role: Role, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Raises SyncError if vLLM's loader passed over any of the tensors: it says which parameters it filled."""
        filled = self.model.load_weights(tensors)
        passed_over = [name for name, _ in tensors]
        if filled is not None:
            wanted = {t.owner for t in self._plans[role].tensors if t.load_as is not None and t.owner is not None}
            passed_over += sorted(wanted - set(filled))
        if passed_over:
            some = ", ".join(passed_over[:4]) + (" …" if len(passed_over) > 4 else "")
            raise SyncError("transfer", None, None, None, f"vLLM's loader passed over {some} of the {role}")

    def _arriving(self, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """The target's tensors under the names that its loader takes; the draft's are put by."""
        assert self._reader is not None
        assert self._tensors is not None
        for bucket in self._reader.buckets(deadline_s):
            for spec, tensor in self._tensors.take(bucket):
                self._kept += [(name, tensor) for name in self._loads["draft"].get(spec.name, ())]
                yield from ((name, tensor) for name in self._loads["target"].get(spec.name, ()))


# vLLM warns of every module without weights of its own; whether all have arrived is checked here.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# This module is imported in vLLM's workers alone, where the engine must be known before they load their model.
WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
