"""Weight receiver inside vLLM's workers: a backend of vLLM's weight-transfer interface, and the commands of the
replica's process.

Every worker reads all buckets with its own reader and passes whole tensors to vLLM's loader, during a layerwise reload,
which packs, shards and quantises as it does from a checkpoint. The target's tensors are loaded as they arrive. The
draft's are kept until vLLM updates the draft, later in the same session.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from asyncrl.cpu.vllm import correct_cpu_build
from asyncrl.param_sync.errors import SyncError
from asyncrl.param_sync.fingerprints import fingerprint
from asyncrl.param_sync.manifest import ROLES, AdapterSpec, Role, is_adapter
from asyncrl.param_sync.session_protocol import ReceivePlan
from asyncrl.param_sync.tensor_assembler import TensorAssembler
from asyncrl.param_sync.transports.base import BucketReader
from asyncrl.param_sync.transports.choose import make_reader
from asyncrl.rollouter.engines.vllm.arguments import BACKEND
from asyncrl.rollouter.engines.vllm.live_adapters import LiveAdapters
from asyncrl.rollouter.engines.vllm.live_model import LiveModel, plan_loads


class WorkerExtension:
    """Mixed into vLLM's worker class. It has only one method, to avoid clashes with vLLM's names."""

    def asyncrl(self, command: str, arguments: bytes) -> bytes:
        """Run a command of `BucketTransferEngine` with pickled arguments. Returns a pickled ("done", result) or
        ("failed", exception), so that errors reach the replica's process with their type."""
        try:
            engine: BucketTransferEngine = self.weight_transfer_engine  # type: ignore[attr-defined]
            here = (self,) if command == "attach" else pickle.loads(arguments)
            answer = getattr(engine, command)(*here)
        except Exception as problem:
            return pickle.dumps(("failed", problem))
        return pickle.dumps(("done", answer))


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The replica's ``name``, its ``transport``, and the number of ``workers`` in all its copies of the model."""

    name: str
    transport: str
    workers: int


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    deadline_s: float


class BucketTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One per worker. A session is ``open``; vLLM's start, update and finish for the target, and again for the draft if
    there is one; ``verify``; with LoRA ``adopt``. ``abandon`` ends it at any point. If only an adapter is sent,
    ``receive`` replaces the target's update."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: BucketReader | None = None
        self._target: LiveModel | None = None
        self._draft: LiveModel | None = None
        self._tensors: TensorAssembler | None = None
        self._kept: list[tuple[str, torch.Tensor]] = []  # for the draft
        self._adapter: dict[str, torch.Tensor] = {}  # its tensors so far
        self._sent: dict[str, torch.Tensor] = {}  # fingerprints of the other tensors
        self._adapters: LiveAdapters | None = None
        self._corrected: list[str] = []
        self.problem: BaseException | None = None  # the error that ended the update

    # -- vLLM's interface ----------------------------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._name = init_info.name if init_info.workers == 1 else f"{init_info.name} worker {worker}"
        self._reader = make_reader(init_info.transport, self._name)

    def start_weight_update(self) -> None:
        self._updated().start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        with self._giving_up():
            model = self._updated()
            if model is self._draft:
                kept, self._kept = self._kept, []
                model.load(iter(kept))
            else:
                model.load(self._arriving(update_info.deadline_s))

    def finish_weight_update(self) -> None:
        self._updated().finish()

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()

    # -- the replica's commands ----------------------------------------------------------------------------------------

    def attach(self, worker: Any) -> dict[str, Any]:
        """Inspect the loaded models. Returns what the replica must know about them."""
        self._worker = worker
        self._corrected = correct_cpu_build(self.vllm_config)
        target, draft = worker.get_model(), worker.get_draft_model()
        self._target = LiveModel("target", target, self.vllm_config.model_config)
        if draft is not None:
            config = self.vllm_config.speculative_config.draft_model_config
            self._draft = LiveModel("draft", draft, config, shared_with=target)
        return {"draft": draft is not None}

    def open(self, plan: ReceivePlan) -> tuple[str, list[str], bool]:
        """Check the manifest against the live models, and connect. Returns the reader's name, the names of tensors that
        no module of this pipeline stage needs, and whether the draft needs any of the target's tensors."""
        assert self._reader is not None
        assert self._target is not None
        self.abandon()
        staged = self.parallel_config.pipeline_parallel_size > 1
        whole = replace(plan.manifest, tensors=tuple(t for t in plan.manifest if not is_adapter(t.name)))
        elsewhere = plan_loads(whole, self._target, self._draft, staged)
        takes_base = self._draft is not None and any(self._draft.wants(t.name) for t in whole if t.role == "target")
        self._tensors = TensorAssembler(plan.session, plan.manifest)
        self._reader.connect(plan.session, plan.addresses, plan.deadline_s)
        return self._name, elsewhere, takes_base

    def receive(self, deadline_s: float) -> None:
        """Receive the adapter, and the draft if it is sent, while generation is paused; the target does not change."""
        with self._giving_up():
            list(self._arriving(deadline_s))  # yields nothing: no tensor is the target's

    def verify(self) -> tuple[dict[Role, str], dict[Role, bool | None]]:
        """Returns the digests of the tensors that arrived and were loaded, and for each model `Verdict.stale`. Raises
        SyncError for live parameters that differ from the tensors sent."""
        if self._tensors is None or self._kept or any(model.reloading for model in self._models()):
            raise SyncError("verify", None, None, None, "no weight update was completed in this session")
        self._tensors.verify()
        verdicts = {model.role: model.verdict(self._sent) for model in self._models()}
        if wrong := [name for verdict in verdicts.values() for name in verdict.wrong]:
            some = ", ".join(wrong[:4]) + (" …" if len(wrong) > 4 else "")
            raise SyncError("verify", self._name, None, None, f"live parameters differ from the tensors sent: {some}")
        digests = {role: self._tensors.digest(role) for role in ROLES}
        return digests, {role: verdict.stale for role, verdict in verdicts.items()}

    def adopt(self, spec: AdapterSpec, slot: int, keep: Sequence[int]) -> list[str]:
        """Put the adapter that arrived into ``slot``, and empty all other slots except those in ``keep`` (vLLM empties
        all of them when the base is updated). Returns the adapter's modules that this worker does not have."""
        if self._adapters is None:
            self._adapters = LiveAdapters(self._worker.model_runner.lora_manager._adapter_manager)
        arrived, self._adapter = self._adapter, {}
        return self._adapters.adopt(spec, arrived, slot, keep)

    def received_bytes(self) -> int:
        return 0 if self._tensors is None else self._tensors.nbytes

    def corrected(self) -> list[str]:
        """Names of vLLM's defects that this worker found and corrected."""
        return self._corrected

    def free_bytes(self) -> int:
        """Free memory of this worker's GPU."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def failure(self) -> None:
        """Raises the error that ended the last update."""
        if self.problem is not None:
            raise self.problem

    def abandon(self) -> None:
        """Leave the session. After an interrupted update the weights match no version, but the model can be updated
        again."""
        assert self._reader is not None
        self._reader.abort()
        self._tensors, self._kept, self._adapter, self._sent, self.problem = None, [], {}, {}, None
        with set_current_vllm_config(self.vllm_config):
            for model in self._models():
                if model.reloading:
                    model.finish()
        self.reset_weight_update_target()
        self._worker._weight_update_active = False  # vLLM resets it when an update fails, not when it is abandoned

    # -- within --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """On an error, disconnect at once, so that the senders do not wait for this worker."""
        try:
            yield
        except BaseException as problem:
            self.problem = problem
            assert self._reader is not None
            self._reader.abort()
            raise

    def _models(self) -> list[LiveModel]:
        return [model for model in (self._target, self._draft) if model is not None]

    def _updated(self) -> LiveModel:
        """The model that vLLM currently updates."""
        return next(model for model in self._models() if model.net is self.model)

    def _arriving(self, deadline_s: float) -> Iterator[tuple[str, torch.Tensor]]:
        """The target's tensors, under the names that its loader expects; keeps those of the draft and the adapter for
        later."""
        assert self._reader is not None
        assert self._tensors is not None
        assert self._target is not None
        kept = self._draft.loads if self._draft is not None else {}
        for bucket in self._reader.buckets(deadline_s):
            for spec, tensor in self._tensors.take(bucket):
                if is_adapter(spec.name):
                    self._adapter[spec.name] = tensor
                    continue
                self._sent[spec.name] = fingerprint(tensor)
                self._kept += [(name, tensor) for name in kept.get(spec.name, ())]
                yield from ((name, tensor) for name in self._target.loads.get(spec.name, ()))


# vLLM warns about every module without weights of its own. The resolver and `LiveModel.load` check completeness.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
# Only vLLM's workers import this module. The backend must be registered before they load their model.
WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
